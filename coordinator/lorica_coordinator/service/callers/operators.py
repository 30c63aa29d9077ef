"""What an operator may have the coordinator do: plans, access, tidying."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lorica_coordinator.rounds.events import PlanOffered, PlanPaused, PlanResumed, PlanStarted, PlanStopped, SiloRevoked
from lorica_coordinator.rounds.orders import waiting_for
from lorica_coordinator.rounds.states import Course, Finished, Idle, course_of, population_of
from lorica_coordinator.rounds.which_plan import DEFAULT_PLAN, check_start, unfinished
from lorica_coordinator.service.callers.parts import FederationParts
from lorica_coordinator.service.members.renewal import Renewed
from lorica_coordinator.service.plan_desk import OpenedPlan, terms_of
from lorica_coordinator.service.records import PresentPlan
from lorica_security.errors import AuthorisationError, ConfigurationError, StateError
from lorica_security.identifiers import Identity, Role, SiloName
from silo_wire.canonical import Digest
from silo_wire.plans.plan import PlanOfAnotherRelease

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedPlan:
    plan: Digest
    name: str
    waits_for: str


class ForOperators(FederationParts):
    """What an operator may have done."""

    async def offer_plan(self, name: str) -> None:
        """Let silos prepare the plan folder `name` at once, if no plan is there; it starts by itself if it says so."""
        async with self._choosing:
            if isinstance(self._loop.state, Idle):
                await self._offer_plan(name)

    async def _offer_plan(self, name: str) -> None:
        opened = await self._desk.compile(name)
        await self._check_unused(opened)
        model = await self._desk.store_initial(opened)
        await self._loop.post(
            PlanOffered(
                now=self._loop.now(),
                terms=terms_of(opened.bundle.plan),
                model=model,
                signature=self._sign_initial(opened.digest, model),
            )
        )

    async def collect_garbage(self, collect: Callable[[PresentPlan], T]) -> T:
        """What `collect`, in a thread, makes of the plan that the state is about; no other one is begun meanwhile."""
        # A thread cannot be stopped: when whoever asked goes away in the middle, no plan begins before it has ended all
        # the same.
        return await self._to_its_end(self._collect_garbage(collect))

    async def _collect_garbage(self, collect: Callable[[PresentPlan], T]) -> T:
        async with self._choosing:
            course = course_of(self._loop.state)
            present = PresentPlan(
                plan=None if course is None else course.terms.plan,
                models=frozenset() if course is None else await self._kept_models(course),
                under_way=course is not None and not isinstance(self._loop.state, Finished),
            )
            return await asyncio.to_thread(collect, present)

    async def _kept_models(self, course: Course) -> frozenset[Digest]:
        try:
            opened = await self._desk.opened(course.terms.plan)
        except PlanOfAnotherRelease:
            return frozenset({course.model, course.best_model})
        return frozenset({course.model, course.best_model, *await asyncio.to_thread(self.checks.bases, opened)})

    async def start_plan(self, name: str = "", *, leave: str = "") -> StartedPlan:
        """Start the plan folder `name`, or go on with it after a stop. Without a name: the plan that is there, else the
        default one.

        `leave` names the unfinished plan that is left for good. Raises ConfigurationError for a plan that cannot be
        used, StateError when another runs, or is stopped and not named so, when this one has run to its end or was left
        for another, or when fewer silos are enrolled than its quorum.
        """
        async with self._choosing:
            return await self._start_plan(name, leave)

    async def _start_plan(self, name: str, leave: str) -> StartedPlan:
        course = course_of(self._loop.state)
        if not name and course is not None and (there := unfinished(self._loop.state)) is not None:
            opened = await self._desk.opened(there.plan)  # as it began, whatever became of its folder
        else:
            opened = await self._desk.compile(name or (DEFAULT_PLAN if course is None else course.terms.name))
        plan = opened.bundle.plan
        known = course is not None and course.terms.plan == opened.digest
        if not known:
            await self._check_unused(opened)
        check_start(self._loop.state, plan=opened.digest, name=plan.name, leave=leave)
        if course is not None and known and (wrong := self._missing(opened, course)):
            raise StateError(wrong)
        population = population_of(self._loop.state)
        if wrong := plan.too_few(population):
            raise StateError(wrong)
        if plan.aggregation.secure_aggregation:  # silos sign while they train
            groups = plan.semi_supervised.who_trains.kinds(population)
            await self.groups.propose_first(groups, colluders=plan.aggregation.colluders)
        # A plan that is known goes on from where it is: the machine looks at no model then.
        model = course.model if course is not None and known else await self._desk.store_initial(opened)
        state = await self._loop.post(
            PlanStarted(
                now=self._loop.now(),
                terms=terms_of(plan),
                model=model,
                signature=self._sign_initial(opened.digest, model),
                leave=leave,
            )
        )
        return StartedPlan(plan=opened.digest, name=plan.name, waits_for=waiting_for(state))

    async def stop_plan(self) -> str:
        """Stop the plan under way, keeping all that is committed; what that means, in one line."""
        return waiting_for(await self._loop.post(PlanStopped(now=self._loop.now())))

    async def pause_plan(self) -> str:
        """Let the attempt under way end and open no other; raises StateError where there is nothing to pause."""
        self._require_plan("pause")
        return waiting_for(await self._loop.post(PlanPaused(now=self._loop.now())))

    async def resume_plan(self) -> str:
        """Raises StateError where nothing is paused."""
        self._require_plan("resume")
        return waiting_for(await self._loop.post(PlanResumed(now=self._loop.now())))

    async def revoke(self, role: Role, name: str) -> str:
        """Shut somebody out: refused from now on, live calls cut, of no cohort any more; what that came to, in one
        line.

        Raises ConfigurationError for a name that is none, StateError where nobody of that name could be shut out.
        """
        if role is Role.COORDINATOR:
            raise ConfigurationError("the coordinator cannot revoke itself: stop it")
        identity = Identity(self._federation, role, name)
        # An operator who goes away in the middle has revoked all the same, in the machine as well.
        await self._to_its_end(self._revoke(identity))
        return f"{identity.uri} is revoked: its certificates are refused and its open calls were cut"

    async def _revoke(self, identity: Identity) -> None:
        if identity.role is not Role.SILO:
            return await self.register.revoke(identity)
        silo = SiloName(identity.name)
        enrolled = await self._threads.store(self._store.silo, silo) is not None
        await self.register.revoke(identity, known=enrolled or silo in self.enrolment.invited())
        await self.enrolment.resume()
        await self._loop.post(SiloRevoked(now=self._loop.now(), silo=silo))

    async def grant(self, role: Role, name: str, *, csr_der: bytes, valid_s: float) -> Renewed:
        """As Renewal.grant has it; raises AuthorisationError for a role that is not given so."""
        if role not in (Role.OPERATOR, Role.VIEWER):
            raise AuthorisationError(f"role {role.value} is not granted: operator and viewer are; silos are invited")
        return await self.renewal.grant(Identity(self._federation, role, name), csr_der=csr_der, valid_s=valid_s)

    def _require_plan(self, what: str) -> None:
        if isinstance(self._loop.state, Idle):
            raise StateError(f"there is no plan to {what}: start one with coordinator plan start")

    def _missing(self, opened: OpenedPlan, course: Course) -> str:
        """Why the plan cannot go on from its present model; "" where all is stored that silos and the next sum need."""
        if not (lacking := opened.lacking(course.model)):
            return ""
        first = f"{lacking[0]} (and {len(lacking) - 1} more)" if len(lacking) > 1 else lacking[0]
        return (
            f"model {course.model} of plan {course.terms.name}, from which it goes on, is not whole: {first} is "
            "stored nowhere that this coordinator knows; the database is of another instant than the files are, or "
            "they were deleted: bring back the bucket's versions of the database's instant, or that file from "
            "state/models of the folder that has it, and start again; where it is lost, start another plan with "
            f"--leave {course.terms.name}"
        )

    async def _check_unused(self, opened: OpenedPlan) -> None:
        if await self._threads.store(self._store.has_rounds, opened.digest):
            raise StateError(
                f"plan {opened.bundle.plan.name} has run before and was left for another: "
                "change its seed or its name to run it from the beginning"
            )
