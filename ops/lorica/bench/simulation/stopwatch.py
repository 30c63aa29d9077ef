"""Where the time of a simulated round goes, told from outside: the functions that do the work are wrapped while it is
measured.

Time within a wrapped function counts for its own part, but for what wrapped functions that it calls take. All of them
run in one thread at a time, since silos train in turn, so that the parts add up to no more than the wall time.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

from torch import nn

from lorica_coordinator.edges.sums.aggregator import Aggregator
from silo_agent.edges.workshop.workshop import Workshop
from silo_agent.training import evaluation, local_trainer, silo_trainer
from silo_agent.training.checkpoint import CheckpointFile
from silo_agent.training.data.tokenizer import TextTokenizer
from silo_agent.training.local_optimizer import local_optimizer
from silo_agent.training.model.plan_model import PlanModel

TRAINING, REDUCTION, OPTIMIZER, EVALUATION = "training", "reduction", "optimizer", "evaluation"
BATCHES, CHECKPOINTS, VECTORS, AGGREGATION, REST = "batches", "checkpoints", "vectors", "aggregation", "rest"
FORWARD: Final = (TRAINING, REDUCTION, EVALUATION)
"""What a model computes: no simulation has less of that."""
PARTS: Final[Mapping[str, str]] = {
    TRAINING: "forward and backward",
    REDUCTION: "forward of the loss reduction's sample, twice",
    OPTIMIZER: "clipping and optimizer steps",
    EVALUATION: "forward and generation of dev scores",
    BATCHES: "batches and tokens",
    CHECKPOINTS: "checkpoints within a training",
    VECTORS: "round models read, updates written",
    AGGREGATION: "the coordinator's sum and step",
    REST: "everything else",
}
_FUNCTIONS: Final[tuple[tuple[Any, str, str], ...]] = (
    (local_trainer, "accumulate_gradient", TRAINING),
    (local_trainer, "sample_loss", REDUCTION),
    (nn.utils, "clip_grad_norm_", OPTIMIZER),
    (evaluation, "encoded_inputs", EVALUATION),
    (evaluation, "summed_loss", EVALUATION),
    (evaluation, "generated", EVALUATION),
    (local_trainer, "collate", BATCHES),
    (local_trainer, "shuffled_batches", BATCHES),
    (evaluation, "collate", BATCHES),
    (silo_trainer, "encode_examples", BATCHES),
    (TextTokenizer, "decode", BATCHES),
    (CheckpointFile, "save", CHECKPOINTS),
    (CheckpointFile, "load", CHECKPOINTS),
    (PlanModel, "load", VECTORS),
    (silo_trainer, "write_update", VECTORS),
    (Aggregator, "aggregate", AGGREGATION),
)


@dataclass(frozen=True, slots=True)
class Lap:
    """Totals since the watch began, in seconds, at the moment at which a round's first silo begins to train."""

    at_s: float
    training_s: float
    parts: Mapping[str, float]


@dataclass(slots=True)
class Stopwatch:
    """`laps` has one for each round that has begun to train. `training_s` is of the silos' whole calls to train."""

    laps: list[Lap] = field(default_factory=list)
    _parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _training_s: float = 0.0
    _round: int = 0
    _open: threading.local = field(default_factory=threading.local)

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is called while this is open is timed."""
        with ExitStack() as patched:
            for owner, name, part in _FUNCTIONS:
                patched.enter_context(patch.object(owner, name, self._timed(getattr(owner, name), part)))
            patched.enter_context(
                patch.object(local_trainer, "local_optimizer", self._timed_optimizers(local_optimizer))
            )
            patched.enter_context(patch.object(Workshop, "train", self._counted(Workshop.train)))
            yield

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **more: Any) -> Any:
            outer = getattr(self._open, "within", None)
            within = [0.0]
            self._open.within = within
            began = time.perf_counter()
            try:
                return function(*arguments, **more)
            finally:
                took = time.perf_counter() - began
                self._open.within = outer
                self._parts[part] += took - within[0]
                if outer is not None:
                    outer[0] += took

        return timed

    def _timed_optimizers(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any) -> Any:
            optimizer = make(*arguments)
            optimizer.step = self._timed(optimizer.step, OPTIMIZER)
            optimizer.zero_grad = self._timed(optimizer.zero_grad, OPTIMIZER)
            return optimizer

        return made

    def _counted(self, train: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **work: Any) -> Any:
            began = time.perf_counter()
            if work["key"].round != self._round:
                self._round = work["key"].round
                self.laps.append(Lap(began, self._training_s, dict(self._parts)))
            try:
                return train(*arguments, **work)
            finally:
                self._training_s += time.perf_counter() - began

        return counted
