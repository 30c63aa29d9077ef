"""Training in turn: all silos of a simulation share one model in memory and one thread at a time, whatever their
number."""

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lorica.simulation import losses
from lorica.simulation.workers.worker_messages import WorkerSilo
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.edges.workshop.workshop import Workshop
from silo_agent.service.ports import DataSummary, MaskedFile, RoundModel, TrainedUpdate
from silo_agent.training.device import DeviceSettings
from silo_agent.training.model.plan_model import PlanModel
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation
from silo_wire.plans.plan import PlanBundle

T = TypeVar("T")

CHECKPOINT_EVERY_S = 30.0
"""Of training: what a simulation that was killed may have to train again."""
NOBODYS_ENTROPY = bytes(32)
"""In place of a silo's own: a simulation hides nothing from anybody, and is to come to the same each time."""


class OneBench:
    """The model that workshops of one plan use in turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._model: tuple[Digest, PlanModel] | None = None

    def model(self, bundle: PlanBundle, device: DeviceSettings, base: RoundModel | None) -> PlanModel:
        """Made for whoever asks first; the caller has the turn."""
        if self._model is None or self._model[0] != bundle.plan.digest:
            self._model = None  # two models need not be in memory
            self._model = bundle.plan.digest, PlanModel(bundle, device, base=base)
        return self._model[1]

    def workshop(self, silo: WorkerSilo) -> Workshop:
        return Workshop(
            settings=silo.settings,
            policy=silo.policy,
            sources=SiloSources(silo.settings, silo.scratch),
            model_of=self.model,
            own_entropy=NOBODYS_ENTROPY,
            checkpoint_every_s=CHECKPOINT_EVERY_S,
            on_losses=functools.partial(losses.append, silo.losses),
        )

    def in_turn(self, call: Callable[[], T]) -> T:
        with self._lock:
            return call()


class TakingTurns:
    """`TrainerPort` of one silo, over a workshop that waits for its turn."""

    def __init__(self, bench: OneBench, workshop: Workshop) -> None:
        self._bench, self._workshop = bench, workshop

    def prepare(self, bundle: PlanBundle, base: RoundModel | None) -> DataSummary:
        return self._bench.in_turn(lambda: self._workshop.prepare(bundle, base))

    def train(self, **work: Any) -> TrainedUpdate:
        return self._bench.in_turn(lambda: self._workshop.train(**work))

    def no_training(self, *, update_file: Path) -> TrainedUpdate:
        return self._workshop.no_training(update_file=update_file)

    def mask(self, **work: Any) -> MaskedFile:
        return self._bench.in_turn(lambda: self._workshop.mask(**work))

    def evaluate(self, **work: Any) -> Evaluation:
        return self._bench.in_turn(lambda: self._workshop.evaluate(**work))
