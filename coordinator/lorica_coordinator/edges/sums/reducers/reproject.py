"""The mean of merged adapters, cut to their rank: `[adapters] train = "reproject"` (aggregation/reprojection.py).

The next model is what the mean of the products B A comes to, so that the server has no step of its own beside it: plans
have server_optimizer "sgd" with a server_learning_rate of 1 and no momentum, whose numbers would be of the axes of the
round before. What is handed to that step is the next model minus this one.

A hostile silo's product grows with the square of what it sends where both halves are long: max_delta_norm bounds a
delta, and so its product.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from lorica_coordinator.aggregation.reprojection import Matrix, Part, reprojected
from lorica_coordinator.aggregation.weighting import CohortWeights, SiloWeight, weigh
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.masked_sum import Spooled, SpoolReader
from lorica_coordinator.edges.sums.next_model import BaseModel, NextModel, Source, of_mean
from lorica_coordinator.edges.sums.reducers.reducer import (
    blamed_on_the_longest,
    caps_of,
    result_of,
    spools_of,
    summary_of,
)
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome
from lorica_coordinator.vectors.stored_vector import VectorReader
from lorica_security.errors import MalformedMessage
from silo_wire.algorithm import Number, Promise
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.plans.adapters import Pair
from silo_wire.plans.sections.aggregation import AggregationSection


class Reproject:
    """`pairs` are what the plan's flat vector consists of; committed deltas are float32."""

    name: Final = "reproject"
    meaning: Final = 'mean of the merged adapters B A, cut to their rank; with `[adapters] train = "reproject"`'
    needs: Final = frozenset({Number.DELTA_NORM})
    masks: Final = ""
    promises: Final = frozenset[Promise]()
    passes: Final = 1

    def __init__(self, section: AggregationSection, pairs: Sequence[Pair], *, spools: Spools, into: NextModel) -> None:
        self._weighting = section.weighs
        self._caps = caps_of(section)
        self._pairs = pairs
        self._spools = spools
        self._into = into

    def reduce(self, key: RoundKey, base_model: Digest, committed: Sequence[CommittedUpdate]) -> AggregationResult:
        """Weigh the updates, merge, sum and cut, one adapter after the other. Raises what every reducer raises, and
        UnusableUpdate naming the silo of the longest delta where what is left is beyond float32's range."""
        summaries = [summary_of(update) for update in committed]
        cohort = weigh(summaries, weighting=self._weighting, caps=self._caps)
        spools = spools_of(self._spools, key, committed)
        base = self._into.base(base_model)
        with ExitStack() as opened, blamed_on_the_longest(committed):
            found = _Reprojection(self._pairs, cohort, spools, base, opened)
            model, _ = self._into.made(base, of_mean(found), round_number=key.round, silos=len(committed))
        return result_of(model, Outcome.APPLIED, cohort)


class _Reprojection(Source):
    """The next model minus this one, in float32, pair by pair as it is read; in memory is one pair of each silo."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        cohort: CohortWeights,
        spools: Sequence[Spooled],
        base: BaseModel,
        opened: ExitStack,
    ) -> None:
        self._pairs = iter(pairs)
        self._base = opened.enter_context(closing(VectorReader(base.vector)))
        readers = [opened.enter_context(closing(SpoolReader(*spool))) for spool in spools]
        self._silos = list(zip(cohort.silos, readers, strict=True))
        self._rest = memoryview(b"")  # of the pair that is being read

    def read_into(self, buffer: memoryview) -> None:
        while buffer:
            if not self._rest:
                self._rest = self._moved(next(self._pairs)).view(np.uint8).data
            taken = min(len(buffer), len(self._rest))
            buffer[:taken] = self._rest[:taken]
            buffer, self._rest = buffer[taken:], self._rest[taken:]

    def close(self) -> None:
        """Files are the caller's."""

    def _moved(self, pair: Pair) -> NDArray[np.float32]:
        before = _read(self._base, pair)
        cut = reprojected(
            self._parts(pair, before),
            silos=len(self._silos),
            rows=pair.rows,
            columns=pair.columns,
            rank=pair.rank,
        )
        moved = np.concatenate([cut.a.ravel(), cut.b.ravel()]) - before
        if not np.abs(moved).max() <= torch.finfo(torch.float32).max:
            raise MalformedMessage(
                "the mean of merged adapters leaves the range of float32: set max_delta_norm to bound each delta"
            )
        return moved.astype("<f4")

    def _parts(self, pair: Pair, before: Matrix) -> Iterator[Part]:
        member: SiloWeight
        for member, reader in self._silos:
            local = before + member.delta_scale * _read(reader, pair)
            yield Part(
                member.share,
                a=local[: pair.rank * pair.columns].reshape(pair.rank, pair.columns),
                b=local[pair.rank * pair.columns :].reshape(pair.rows, pair.rank),
            )


def _read(source: Source, pair: Pair) -> Matrix:
    read = np.empty(pair.elements, dtype="<f4")
    source.read_into(read.view(np.uint8).data)
    return read.astype(np.float64)
