"""The trimmed mean, parameter by parameter: what the smallest and the largest silos say of it counts nothing.

Yin, Chen, Kannan and Bartlett, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018,
definition 2. Of n silos k = trimmed_share x n, rounded down, are left out at either end.

What it promises, where at most k silos are hostile, whatever they send and know: with h(1) <= ... <= h(m) the m values
of honest silos, each parameter of the result is at least the mean of h(k + 1 - f) to h(n - k - f), at most that of
h(k + 1) to h(n - k), f being the hostile ones. So it stays among what honest silos sent, and every silo counts the
same. It is not the honest mean: silos whose data differ from the others' are left out as hostile ones are.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from torch import Tensor

from lorica_coordinator.aggregation.streaming_sum import Scratch
from lorica_coordinator.aggregation.trimmed_mean import gathered, trimmed_mean
from lorica_coordinator.aggregation.weighting import CohortWeights
from lorica_coordinator.edges.sums.reducers.reducer import (
    Robust,
    blamed_on_the_longest,
    result_of,
    spools_of,
)
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.plans.robust import TRIMMED_MEAN, trimmed_silos
from silo_wire.server_step.apply_mean import apply_mean
from silo_wire.server_step.server_optimizer import ServerOptimizer


class TrimmedMean(Robust):
    rule = TRIMMED_MEAN
    passes: Final = 1

    def reduce(self, key: RoundKey, base_model: Digest, committed: Sequence[CommittedUpdate]) -> AggregationResult:
        """Sort and average the updates, capped in length. Raises what every reducer raises, and StateError for fewer
        silos than the rule needs."""
        cohort = self._cohort(committed)
        base = self._into.base(base_model)
        rows = self._table(len(cohort.silos), base)
        step = partial(_step, cohort, rows, self._trimmed(len(cohort.silos)))
        deltas = self._deltas(spools_of(self._spools, key, committed), step, most_elements=rows.shape[1])
        with blamed_on_the_longest(committed):
            model, rate = self._into.made(base, deltas, round_number=key.round, silos=len(committed))
        return result_of(model, Outcome.APPLIED, cohort, rate=rate)

    def _trimmed(self, silos: int) -> int:
        return trimmed_silos(self._section.trimmed_share, silos)


def _step(
    cohort: CohortWeights,
    rows: Tensor,
    trimmed: int,
    model: Tensor,
    slabs: Iterator[Tensor],
    optimizer: ServerOptimizer,
    state: Mapping[str, Tensor],
    step_number: int,
    scratch: Scratch,
) -> None:
    of_slab = rows[:, : model.numel()]
    gathered(zip((silo.silo for silo in cohort.silos), slabs, strict=True), cohort, of_slab)
    mean = trimmed_mean(of_slab, trimmed, scratch.mean)
    apply_mean(model, mean, optimizer, state, step_number=step_number, scratch=scratch.product)
