"""The weighted mean of deltas in the clear, each of which the coordinator sees."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from torch import Tensor

from lorica_coordinator.aggregation.round_arithmetic import aggregate_slab
from lorica_coordinator.aggregation.squared_distances import squared_norm_of_mean
from lorica_coordinator.aggregation.streaming_sum import Scratch
from lorica_coordinator.aggregation.weighting import CohortWeights, weigh
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.delta_source import DeltaForm
from lorica_coordinator.edges.sums.next_model import Deltas, NextModel
from lorica_coordinator.edges.sums.reducers.reducer import (
    blamed_on_the_longest,
    caps_of,
    result_of,
    spools_of,
    summary_of,
)
from lorica_coordinator.edges.sums.spool_pieces import pieces
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome
from lorica_coordinator.service.unusable import UnusableUpdate
from lorica_security.errors import StateError
from lorica_security.identifiers import SiloName
from silo_wire.algorithm import Number, Promise
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.training import TrainingSection
from silo_wire.plans.work import optimizer_steps
from silo_wire.server_step.server_optimizer import ServerOptimizer
from silo_wire.server_step.step_length import FEDEXP, fedexp


class Plain:
    """`form` is how the committed deltas are read; `training`, of the plan, is what the optimizer steps that silos
    report are held to."""

    name: Final = "plain"
    meaning: Final = "weighted mean of the deltas"
    needs: Final = frozenset({Number.DELTA_NORM})
    masks: Final = ""
    promises: Final = frozenset[Promise]({"record"})
    passes: Final = 1

    def __init__(
        self,
        section: AggregationSection,
        training: TrainingSection | None,
        *,
        spools: Spools,
        form: DeltaForm,
        into: NextModel,
    ) -> None:
        self._weighting = section.weighs
        self._training = training
        self._caps = caps_of(section)
        self._step_length = section.step_length
        self._spools = spools
        self._form = form
        self._into = into

    def reduce(self, key: RoundKey, base_model: Digest, committed: Sequence[CommittedUpdate]) -> AggregationResult:
        """Weigh the updates and sum them. Raises what every reducer raises, and UnusableUpdate naming the silo whose
        delta takes the model out of float32's range."""
        if Number.OPTIMIZER_STEPS in self._weighting.needs:
            self._require_steps_of_the_plan(committed)
        summaries = [summary_of(update) for update in committed]
        cohort = weigh(summaries, weighting=self._weighting, caps=self._caps)
        if self._step_length == FEDEXP.name:
            norms = {summary.silo: summary.delta_norm for summary in summaries}
            cohort = self._lengthened(key, base_model, committed, cohort, norms)
        return self.weighed(key, base_model, committed, cohort)

    def _lengthened(
        self,
        key: RoundKey,
        base_model: Digest,
        committed: Sequence[CommittedUpdate],
        cohort: CohortWeights,
        norms: Mapping[SiloName, float],
    ) -> CohortWeights:
        """The cohort whose mean is as long as FedExP's step; reads every delta once."""
        elements = self._into.base(base_model).elements
        rows = pieces(spools_of(self._spools, key, committed), cohort, self._form, elements)
        shares = [member.share for member in cohort.silos]
        with blamed_on_the_longest(committed):
            square = squared_norm_of_mean([member.silo for member in cohort.silos], shares, rows)
        capped = [member.delta_scale * norms[member.silo] for member in cohort.silos]
        return replace(cohort, length=fedexp(shares, capped, square))

    def _require_steps_of_the_plan(self, committed: Sequence[CommittedUpdate]) -> None:
        """They follow from the examples, so a silo that claims others would take a weight that no training gives."""
        if self._training is None:
            raise StateError(f'weighting = "{self._weighting.name}" needs [training] of the plan, and none was given')
        for update in committed:
            expected = optimizer_steps(update.examples, self._training.for_silo(update.silo))
            if update.summary.optimizer_steps != expected:
                raise UnusableUpdate(
                    update.silo,
                    f"silo {update.silo} reports {update.summary.optimizer_steps} optimizer steps on {update.examples} "
                    f"examples, the plan makes {expected} of them: leave the silo out",
                )

    def weighed(
        self, key: RoundKey, base_model: Digest, committed: Sequence[CommittedUpdate], cohort: CohortWeights
    ) -> AggregationResult:
        """`reduce` with the weights given. A sum of weights that is not above zero changes nothing: ZERO_WEIGHT."""
        if not cohort.total > 0.0:
            return result_of(base_model, Outcome.ZERO_WEIGHT, cohort)
        spools = spools_of(self._spools, key, committed)
        base = self._into.base(base_model)
        deltas = Deltas(
            sources=[partial(self._form.open, *spool) for spool in spools],
            dtype=self._form.dtype,
            step=partial(_step, cohort),
        )
        with blamed_on_the_longest(committed):
            model, rate = self._into.made(base, deltas, round_number=key.round, silos=len(committed))
        return result_of(model, Outcome.APPLIED, cohort, rate=rate)


def _step(
    cohort: CohortWeights,
    model: Tensor,
    slabs: Iterator[Tensor],
    optimizer: ServerOptimizer,
    state: Mapping[str, Tensor],
    step_number: int,
    scratch: Scratch,
) -> None:
    named = zip((silo.silo for silo in cohort.silos), slabs, strict=True)
    aggregate_slab(model, named, cohort, optimizer, state, step_number=step_number, scratch=scratch)
