"""Multi-Krum: the mean of the n - f deltas that have the nearest neighbours; the others are left out whole.

Blanchard, El Mhamdi, Guerraoui and Stainer, Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
NeurIPS 2017. f hostile silos are assumed, of n >= 2f + 3. A delta's score is the sum of its squared distances from the
n - f - 2 others nearest to it. Krum keeps the delta of the lowest score; the paper's proof is of that one. Its m-Krum
averages the m lowest. Here m is n - f: as many as are honest.

What it promises for that, where at most f silos are hostile, whatever they send and know: with D the longest distance
between two honest deltas, no delta is kept that is further than r = D x sqrt((n - f - 2) / (n - 2f - 1)) from every
honest one. An honest delta has n - f - 2 honest others within D, so n - f deltas have scores of at most
(n - f - 2) x D^2, and so has whatever is kept. Of the neighbours that a hostile delta's score counts at least
n - 2f - 1 are honest. So the mean is within r x f / (n - f) of a mean of honest deltas. Hostile deltas within r are
kept, and an honest silo whose data differ from the others' is left out: it is the farthest.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from lorica_coordinator.aggregation import krum
from lorica_coordinator.aggregation.squared_distances import between
from lorica_coordinator.edges.sums.reducers.plain import Plain
from lorica_coordinator.edges.sums.reducers.reducer import (
    Robust,
    spools_of,
)
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, SiloWeight
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.plans.robust import MULTI_KRUM


class MultiKrum(Robust):
    rule = MULTI_KRUM
    passes: Final = 2

    def reduce(self, key: RoundKey, base_model: Digest, committed: Sequence[CommittedUpdate]) -> AggregationResult:
        """Choose by distance, and average what is kept; of the others the result says that they weigh 0.

        Raises what every reducer raises, and StateError for fewer silos than the rule needs.
        """
        cohort = self._cohort(committed)
        names = [member.silo for member in cohort.silos]
        mean = Plain(self._section, None, spools=self._spools, form=self._form, into=self._into)
        base, spools = self._into.base(base_model), spools_of(self._spools, key, committed)
        distances = self._compared(committed, spools, cohort, base, between)
        kept = {names[index] for index in krum.kept(distances, self._section.hostile_silos)}
        made = mean.reduce(key, base_model, [update for update in committed if update.silo in kept])
        left_out = (
            SiloWeight(silo=one.silo, weight=0.0, share=0.0, capped=bool(one.caps), left_out=True)
            for one in cohort.silos
            if one.silo not in kept
        )
        return replace(made, weights=tuple(sorted((*made.weights, *left_out), key=lambda weight: weight.silo)))
