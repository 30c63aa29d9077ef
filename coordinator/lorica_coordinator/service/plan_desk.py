"""The plan that is under way: its bundle, its models, its aggregator, opened once."""

import asyncio
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lorica_coordinator.rounds.terms import PlanTerms
from lorica_coordinator.service.ports import OpenPlan, PlanParts, PlanShelf, Steady
from lorica_security.errors import ConfigurationError, IntegrityError, StateError, StorageError
from lorica_security.identifiers import FederationName
from silo_wire.canonical import Digest
from silo_wire.plans.plan import Plan, PlanBundle

READ_AGAIN_S: Final = 300.0
"""A kept copy that could not be read is tried again after this time: the operator may have restored it."""


@dataclass(frozen=True)
class OpenedPlan:
    bundle: PlanBundle
    parts: PlanParts
    digest: Digest
    encoded: bytes

    def lacking(self, model: Digest) -> tuple[Path, ...]:
        """Files of `model`, and of the base of adapters, without which nobody trains from it, or no next one is made of
        it."""
        base, digest = self.parts.base, self.bundle.plan.model.base
        of_base = () if base is None or digest is None else base.lacking(Digest(digest))
        return (*self.parts.models.lacking(model), *of_base)


def terms_of(plan: Plan) -> PlanTerms:
    schedule, evaluation, aggregation = plan.schedule, plan.evaluation, plan.aggregation
    return PlanTerms(
        score=plan.task.score_label,
        federation=FederationName(plan.federation),
        plan=plan.digest,
        name=plan.name,
        rounds=schedule.rounds,
        min_silos=schedule.min_silos,
        start_when_ready=schedule.start_when_ready,
        gathering_deadline_s=schedule.gathering_deadline_s,
        training_deadline_s=schedule.training_deadline_s,
        evaluation_deadline_s=schedule.evaluation_deadline_s,
        evaluate_every=evaluation.every,
        evaluate_initial=evaluation.initial,
        evaluate_last=evaluation.last,
        secure_aggregation=aggregation.secure_aggregation,
        masking_deadline_s=schedule.masking_deadline_s,
        min_survivors=aggregation.min_survivors,
        colluders=aggregation.colluders,
        threshold=aggregation.threshold or None,
        record_level=plan.privacy.level == "record",
        silo_level=plan.privacy.level == "silo",
        cohort_size=schedule.cohort_size,
        corrects_drift=plan.corrects_drift,
        without_labels=tuple(plan.semi_supervised.unlabelled),
        labelled_alone=plan.semi_supervised.who_trains.labelled_alone,
        min_labelled=plan.semi_supervised.min_labelled,
    )


class PlanDesk:
    """Keeps the last plan that was asked for."""

    def __init__(self, *, federation: FederationName, shelf: PlanShelf, open_plan: OpenPlan, steady: Steady) -> None:
        """`steady`: a clock that is never set, in seconds."""
        self._federation = federation
        self._steady = steady
        self._shelf = shelf
        self._open_plan = open_plan
        self._opened: OpenedPlan | None = None
        self._opening = asyncio.Lock()
        self._terms: dict[Digest, PlanTerms] = {}
        self._unread: dict[Digest, float] = {}
        """Until when a plan's terms are taken for unreadable without another look at the disk."""

    async def compile(self, name: str) -> OpenedPlan:
        """Read the operator's plan folder `name`; raises ConfigurationError for another federation's plan."""
        bundle = await asyncio.to_thread(self._shelf.compile, name)
        if bundle.plan.federation != self._federation:
            raise ConfigurationError(
                f"plan {name} is for federation {bundle.plan.federation!r}, this is {self._federation!r}: "
                "correct `federation` in its plan.toml"
            )
        return await asyncio.to_thread(self._open, bundle)

    async def opened(self, plan: Digest) -> OpenedPlan:
        """The plan with this digest, from its kept copy; raises StateError or IntegrityError."""
        async with self._opening:
            if self._opened is None or self._opened.digest != plan:
                bundle = await asyncio.to_thread(self._shelf.bundle, plan)
                self._opened = await asyncio.to_thread(self._open, bundle)
            return self._opened

    async def terms(self, plan: Digest) -> PlanTerms | None:
        """Of any plan that was kept: a digest has one plan for good. None where this release cannot read it, which
        is found out once in READ_AGAIN_S."""
        if plan in self._terms:
            return self._terms[plan]
        if self._steady() < self._unread.get(plan, float("-inf")):
            return None
        try:
            bundle = await asyncio.to_thread(self._shelf.bundle, plan)
        except (StateError, IntegrityError, StorageError):  # another release's, not kept, or damaged
            self._unread[plan] = self._steady() + READ_AGAIN_S
            return None
        self._unread.pop(plan, None)
        self._terms[plan] = terms_of(bundle.plan)
        return self._terms[plan]

    async def store_initial(self, opened: OpenedPlan) -> Digest:
        """Have the initial model, and the base of adapters, stored before a plan begins: later its folder may go.

        Raises IntegrityError.
        """
        if opened.parts.base is not None:
            await asyncio.to_thread(opened.parts.base.initial)
        return await asyncio.to_thread(opened.parts.models.initial)

    async def keep(self, opened: OpenedPlan, models: AbstractSet[Digest]) -> None:
        """Have what another coordinator would go on with outlast the folder: the plan, and of `models`, and of the base
        of adapters, those that are stored. What does already costs next to nothing. Raises StorageError."""
        await asyncio.to_thread(self._keep, opened, models)

    def _keep(self, opened: OpenedPlan, models: AbstractSet[Digest]) -> None:
        self._shelf.keep(opened.bundle)
        base, parts = opened.bundle.plan.model.base, opened.parts
        if parts.base is not None and base is not None and not parts.base.lacking(Digest(base)):
            parts.base.keep(Digest(base))
        for model in sorted(models):
            if not parts.models.lacking(model):
                parts.models.keep(model)

    def _open(self, bundle: PlanBundle) -> OpenedPlan:
        return OpenedPlan(bundle, self._open_plan(bundle), bundle.plan.digest, bundle.encode())
