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
from typing import ClassVar, Final

import torch

from lorica_coordinator.aggregation.geometric_median import median_shares
from lorica_coordinator.aggregation.squared_distances import inner_products
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.next_model import NextModel
from lorica_coordinator.edges.sums.reducers.plain import Plain
from lorica_coordinator.edges.sums.reducers.reducer import blamed_on_the_longest, equal_weights, spools_of
from lorica_coordinator.edges.sums.spool_pieces import pieces
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate
from silo_wire.algorithm import Number, Promise
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.plans.robust import GEOMETRIC_MEDIAN
from silo_wire.plans.sections.aggregation import AggregationSection


class GeometricMedian:
    """`dtype` is the type of the committed deltas."""

    name: ClassVar[str] = GEOMETRIC_MEDIAN.name
    meaning: ClassVar[str] = GEOMETRIC_MEDIAN.meaning
    needs: Final = frozenset({Number.DELTA_NORM})
    masks: Final = ""
    promises: Final = frozenset[Promise]({"record"})
    passes: Final = 2

    def __init__(self, section: AggregationSection, *, spools: Spools, dtype: torch.dtype, into: NextModel) -> None:
        self._section = section
        self._spools = spools
        self._dtype = dtype
        self._into = into
        self._mean = Plain(section, None, spools=spools, dtype=dtype, into=into)

    def reduce(self, key: RoundKey, base_model: Digest, committed: Sequence[CommittedUpdate]) -> AggregationResult:
        """Find the shares, and add up. Raises what every reducer raises, and StateError for fewer silos than the rule
        needs."""
        cohort = equal_weights(GEOMETRIC_MEDIAN, self._section, committed)
        names = [member.silo for member in cohort.silos]
        elements = self._into.base(base_model).elements
        read = pieces(spools_of(self._spools, key, committed), cohort, self._dtype, elements)
        with blamed_on_the_longest(committed):
            shares = median_shares(inner_products(names, read))
        silos = tuple(replace(one, share=share) for one, share in zip(cohort.silos, shares, strict=True))
        return self._mean.weighed(key, base_model, committed, replace(cohort, silos=silos))
