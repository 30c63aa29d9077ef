"""What people who only look may see: how everything stands, and the rounds of this plan and of those before it."""

from dataclasses import dataclass, replace

from lorica_coordinator.rounds.orders import CLOSING
from lorica_coordinator.rounds.states import course_of
from lorica_coordinator.rounds.terms import EXACT_MATCH, PlanTerms
from lorica_coordinator.service.callers.parts import FederationParts
from lorica_coordinator.service.records import BegunPlan, RoundRow
from lorica_coordinator.service.views.disclosure import of_all_silos
from lorica_coordinator.service.views.round_rows import as_they_stand
from lorica_coordinator.service.views.standing import Standing, standing
from silo_wire.canonical import Digest
from silo_wire.plans.plan import Plan, PlanOfAnotherRelease


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan:
    """A plan that was offered to silos, and what its own terms say of it.

    `shows_single_silos` is this plan's rule, whichever plan is under way. Terms that cannot be read show none, and
    leave `rounds` 0 and `score` "". `newest_round` is None where none was opened. With another number of `deletions`
    details of single silos, which were read before, may be deleted.
    """

    digest: Digest
    name: str
    begun_unix_s: float
    active_unix_s: float
    present: bool
    rounds: int
    score: str
    shows_single_silos: bool
    newest_round: int | None
    deletions: int


class ForLookers(FederationParts):
    """What anybody may ask who may look, and change nothing."""

    async def status(self) -> Standing:
        enrolled = await self._threads.store(self._store.silos)
        return standing(
            federation=self._federation,
            state=self._loop.state,
            fault=self._loop.fault,
            behind=self.groups.behind(self._attendance.connected),
            enrolled=[
                replace(item, last_seen_unix_s=max(item.last_seen_unix_s, self._last_seen.get(item.silo, 0.0)))
                for item in enrolled
            ],
            invited=self.enrolment.invited(),
            attendance=self._attendance,
            now=self._clock(),
            seconds_left=self._loop.seconds_left,
        )

    async def plan(self) -> Plan | None:
        """The one under way, or that ran last, if this release reads it; raises StateError or IntegrityError for its
        kept copy."""
        course = course_of(self._loop.state)
        try:
            return None if course is None else (await self._desk.opened(course.terms.plan)).bundle.plan
        except PlanOfAnotherRelease:
            return None

    @property
    def score(self) -> str:
        """By what answers count under the plan that is under way, as people are shown it."""
        course = course_of(self._loop.state)
        return EXACT_MATCH if course is None else course.terms.score

    async def rounds(self, last: int = 0) -> tuple[RoundRow, ...]:
        """The last attempts at rounds of the plan under way, oldest first; 0: all. A closing round, whose number is
        beyond the plan's, is named."""
        course = course_of(self._loop.state)
        return () if course is None else await self._rounds(course.terms.plan, course.terms, last=last)

    async def recorded_plans(self) -> tuple[RecordedPlan, ...]:
        """Every plan that was offered to silos, the present one last, those before it by when they were last active."""
        begun = await self._threads.store(self._store.plans)
        plans = [self._recorded(plan, await self._terms_of(plan.digest)) for plan in begun]
        return tuple(sorted(plans, key=lambda plan: (plan.present, plan.active_unix_s, plan.digest)))

    async def rounds_of(
        self, plan: Digest, *, since: int = 0, until: int | None = None, attempts: int = 0
    ) -> tuple[RoundRow, ...]:
        """Of any plan the attempts at the rounds with these numbers, as this plan's own terms show them; `attempts`: of
        each round so many, its first one and the newest; 0: all."""
        return await self._rounds(plan, await self._terms_of(plan), since=since, until=until, attempts=attempts)

    def _recorded(self, plan: BegunPlan, terms: PlanTerms | None) -> RecordedPlan:
        course = course_of(self._loop.state)
        return RecordedPlan(
            digest=plan.digest,
            name=plan.name,
            begun_unix_s=plan.begun_unix_s,
            active_unix_s=plan.active_unix_s,
            present=course is not None and course.terms.plan == plan.digest,
            rounds=0 if terms is None else terms.rounds,
            score="" if terms is None else terms.score,
            shows_single_silos=terms is not None and terms.shows_single_silos,
            newest_round=plan.newest_round,
            deletions=plan.deletions,
        )

    async def _terms_of(self, plan: Digest) -> PlanTerms | None:
        course = course_of(self._loop.state)
        return course.terms if course is not None and course.terms.plan == plan else await self._desk.terms(plan)

    async def _rounds(
        self,
        plan: Digest,
        terms: PlanTerms | None,
        *,
        last: int = 0,
        since: int = 0,
        until: int | None = None,
        attempts: int = 0,
    ) -> tuple[RoundRow, ...]:
        kept = await self._threads.store(self._store.rounds, plan, last, since, until, attempts)
        state, connected = self._loop.state, self._attendance.connected
        rows = (as_they_stand(row, plan, state, connected) for row in kept)
        if terms is None:
            return tuple(map(of_all_silos, rows))
        named = (
            replace(row, detail="; ".join(filter(None, (CLOSING, row.detail)))) if row.round > terms.rounds else row
            for row in rows
        )
        return tuple(named if terms.shows_single_silos else map(of_all_silos, named))
