"""The geometric median: the point from which the distances to all deltas have the smallest sum.

Pillutla, Kakade and Harchaoui, Robust Aggregation for Federated Learning, IEEE Transactions on Signal Processing 2022,
algorithm 1: the smoothed Weiszfeld algorithm, with equal weights. Theirs stops after three iterations, each of which
has the silos compute. Here the first pass over the deltas takes their inner products, from which the shares of the
median follow to the end (aggregation/geometric_median.py), and the second adds up.

What it promises, where f of n silos are hostile and fewer than half, whatever they send and know: with r the distance
from any point to the farthest honest delta, it is within r (n - f) / sqrt(n (n - 2f)) of that point (Minsker 2015,
lemma 2.1). A delta counts the less the farther it is from the median, and none is left out whole.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lorica_coordinator.aggregation.geometric_median import median_shares
from lorica_coordinator.aggregation.squared_distances import inner_products
from lorica_coordinator.edges.sums.reducers.plain import Plain
from lorica_coordinator.edges.sums.reducers.reducer import Robust, spools_of
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.plans.robust import GEOMETRIC_MEDIAN


class GeometricMedian(Robust):
    rule = GEOMETRIC_MEDIAN
    passes: Final = 2

    def reduce(self, key: RoundKey, base_model: Digest, committed: Sequence[CommittedUpdate]) -> AggregationResult:
        """Find the shares, and add up. Raises what every reducer raises, and StateError for fewer silos than the rule
        needs."""
        cohort = self._cohort(committed)
        mean = Plain(self._section, None, spools=self._spools, form=self._form, into=self._into)
        base, spools = self._into.base(base_model), spools_of(self._spools, key, committed)
        shares = median_shares(self._compared(committed, spools, cohort, base, inner_products))
        silos = tuple(replace(one, share=share) for one, share in zip(cohort.silos, shares, strict=True))
        return mean.weighed(key, base_model, committed, replace(cohort, silos=silos))
