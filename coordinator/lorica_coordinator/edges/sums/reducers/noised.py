"""The noised sum of clipped deltas over a public constant: silo-level privacy, with the coordinator's noise."""

from collections.abc import Sequence
from contextlib import closing
from typing import Final

from lorica_coordinator.aggregation.noised_sum import NoisedSum
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.next_model import NextModel, of_mean
from lorica_coordinator.edges.sums.noised_mean import NoisedMeanReader
from lorica_coordinator.edges.sums.reducers.reducer import by_name, spools_of, summary_of
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger, release_statement
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome
from lorica_security.errors import StateError
from lorica_security.noise.noise_streams import NoiseStream
from silo_wire.algorithm import Number, Promise
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.plans.privacy import PrivacySection
from silo_wire.plans.sections.aggregation import AggregationSection


class Noised:
    """What is released is entered into `releases`."""

    name: Final = "noised"
    meaning: Final = "clipped sum of the deltas with noise, over a public constant"
    needs: Final = frozenset({Number.DELTA_NORM})
    masks: Final = ""
    promises: Final = frozenset[Promise]({"silo"})
    passes: Final = 1

    def __init__(
        self,
        section: AggregationSection,
        privacy: PrivacySection,
        *,
        releases: ReleaseLedger | None,
        spools: Spools,
        into: NextModel,
    ) -> None:
        self._section = section
        self._privacy = privacy
        self._releases = releases
        self._spools = spools
        self._into = into

    def reduce(self, key: RoundKey, base_model: Digest, committed: Sequence[CommittedUpdate]) -> AggregationResult:
        """Enter the sum into the ledger of releases, then make it. Of single silos the result tells nothing.

        Raises what every reducer raises; BudgetSpent, before anything is made, where this release would cost more than
        the plan promises; ConfigurationError where the step takes the model out of float32's range, which is the plan's
        fault, since every delta is clipped.
        """
        if self._releases is None:
            raise StateError("deltas are to be noised here, and no ledger of releases was given: nothing is released")
        base = self._into.base(base_model)
        arithmetic = NoisedSum(
            clipping_norm=self._section.max_delta_norm,
            weight_cap=self._section.weight_cap,
            noise_multiplier=self._privacy.noise_multiplier,
            divisor=self._privacy.nominal_silos,
            parameters=base.elements,
        )
        updates = by_name(committed)
        factors = []
        for update in updates:
            summary = summary_of(update)
            weight = self._section.weighs.raw_weight(summary)
            factors.append(arithmetic.factor(weight=weight, delta_norm=summary.delta_norm))
        spools = spools_of(self._spools, key, updates)
        statement = release_statement(
            key,
            base_model,
            ((update.silo, update.digest, factor) for update, factor in zip(updates, factors, strict=True)),
        )
        noise = NoiseStream(self._releases.noise_key(statement))
        more = self._releases.enter(key, statement, self._privacy)
        with closing(NoisedMeanReader(spools, factors, arithmetic=arithmetic, noise=noise)) as mean:
            model, rate = self._into.made(base, of_mean(mean), round_number=key.round, silos=len(updates))
        return AggregationResult(model=model, outcome=Outcome.APPLIED, weights=(), step_length=rate, last=not more)
