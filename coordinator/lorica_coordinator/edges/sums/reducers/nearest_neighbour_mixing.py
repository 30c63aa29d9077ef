"""Nearest-neighbour mixing before a trimmed mean: each delta becomes the mean of the n - f nearest to it, itself among
them.

Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, Fixing by Mixing: A Recipe for Optimal Byzantine ML under
Heterogeneity, AISTATS 2023, algorithm 2. f hostile silos are assumed, of n >= 2f + 1. Mixed deltas of honest silos are
nearer to each other than these are, so the rule after it has less to choose among. It is the trimmed mean here, with f
left out at either end.

What it promises, where at most f silos are hostile, whatever they send and know: with s the root of the mean squared
distance of n - f honest deltas from their mean, the result is within mixing_reach (proto/silo_wire/plans/robust.py)
times s of that mean (lemma 1 and proposition 2 there). Where honest silos agree, so does it; where their data differ,
what most of them share is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from torch import Tensor

from lorica_coordinator.aggregation.neighbour_mixing import mixed, nearest
from lorica_coordinator.aggregation.squared_distances import between
from lorica_coordinator.aggregation.streaming_sum import Scratch
from lorica_coordinator.aggregation.trimmed_mean import gathered, trimmed_mean
from lorica_coordinator.aggregation.weighting import CohortWeights
from lorica_coordinator.edges.sums.reducers.reducer import Robust, blamed_on_the_longest, result_of, spools_of
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.plans.robust import NEAREST_NEIGHBOUR_MIXING
from silo_wire.server_step.apply_mean import apply_mean
from silo_wire.server_step.server_optimizer import ServerOptimizer


class NearestNeighbourMixing(Robust):
    rule = NEAREST_NEIGHBOUR_MIXING
    passes: Final = 2

    def reduce(self, key: RoundKey, base_model: Digest, committed: Sequence[CommittedUpdate]) -> AggregationResult:
        """Measure, mix, sort and average. Raises what every reducer raises, and StateError for fewer silos than the
        rule needs."""
        cohort = self._cohort(committed)
        count, hostile = len(cohort.silos), self._section.hostile_silos
        base = self._into.base(base_model)
        spools = spools_of(self._spools, key, committed)
        rows, after = self._table(2 * count, base).view(2, count, -1)
        with_which = nearest(self._compared(committed, spools, cohort, base, between), hostile)
        step = partial(_step, cohort, rows, after, with_which, hostile)
        with blamed_on_the_longest(committed):
            deltas = self._deltas(spools, step, most_elements=rows.shape[1])
            model, rate = self._into.made(base, deltas, round_number=key.round, silos=len(committed))
        return result_of(model, Outcome.APPLIED, cohort, rate=rate)


def _step(
    cohort: CohortWeights,
    rows: Tensor,
    after: Tensor,
    with_which: Sequence[Sequence[int]],
    hostile: int,
    model: Tensor,
    slabs: Iterator[Tensor],
    optimizer: ServerOptimizer,
    state: Mapping[str, Tensor],
    step_number: int,
    scratch: Scratch,
) -> None:
    of_slab = rows[:, : model.numel()]
    gathered(zip((silo.silo for silo in cohort.silos), slabs, strict=True), cohort, of_slab)
    mean = trimmed_mean(mixed(of_slab, with_which, after[:, : model.numel()]), hostile, scratch.mean)
    apply_mean(model, mean, optimizer, state, step_number=step_number, scratch=scratch.product)
