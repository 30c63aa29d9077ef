"""What is deleted as rounds go on: updates, models, spools. That it cannot be deleted harms no round."""

import asyncio
from collections.abc import Callable

from lorica_coordinator.rounds.states import Finished, State, course_of, round_of
from lorica_coordinator.service.plan_desk import OpenedPlan, PlanDesk
from lorica_coordinator.service.ports import Spools
from lorica_coordinator.service.round_checks import RoundChecks
from lorica_security.errors import LoricaError
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey


class Tidying:
    """`complain` hears of what could not be deleted; `state` is the machine's, of this moment."""

    def __init__(
        self,
        *,
        desk: PlanDesk,
        spools: Spools,
        checks: RoundChecks,
        state: Callable[[], State],
        complain: Callable[[str, LoricaError], None],
    ) -> None:
        self._desk, self._spools, self._checks = desk, spools, checks
        self._state, self._complain = state, complain

    async def let_go_of(self, ended: Digest | None) -> None:
        """What is kept for further rounds goes with the plan that has ended: its spools, and files to write over."""
        plan = plan_under_way(self._state())
        await self._tidy(lambda: self._spools.retain(plan))
        if ended is not None and (opened := await self._opened(ended)) is not None:
            await self._tidy(opened.parts.models.clear_spares)

    async def discard(self, key: RoundKey) -> None:
        """Let the updates of an attempt go, unless they are what the present model can be checked with."""

        def let_go(opened: OpenedPlan | None) -> None:
            if opened is None or not self._checks.is_kept(opened, key, self._present_model):
                self._spools.discard(key)

        course = course_of(self._state())
        opened = await self._opened(key.plan) if course is not None and course.terms.plan == key.plan else None
        await self._tidy(lambda: let_go(opened))

    async def retain(self, plan: Digest, models: set[Digest]) -> None:
        opened = await self._opened(plan)
        if opened is not None:
            await self._tidy(lambda: self._keep_alone(opened, models))

    def _keep_alone(self, opened: OpenedPlan, models: set[Digest]) -> None:
        self._checks.let_go(opened, but=self._present_model, under_way=round_of(self._state()))
        opened.parts.models.retain(models | self._checks.bases(opened))

    @property
    def _present_model(self) -> Digest | None:
        course = course_of(self._state())
        return None if course is None else course.model

    async def _opened(self, plan: Digest) -> OpenedPlan | None:
        try:
            return await self._desk.opened(plan)
        except LoricaError as error:
            self._complain("models could not be tidied", error)
            return None

    async def _tidy(self, work: Callable[[], None]) -> None:
        """Deleting what is needed no more may fail without harm to the round."""
        try:
            await asyncio.to_thread(work)
        except LoricaError as error:
            self._complain("files could not be deleted", error)


def plan_under_way(state: State) -> Digest | None:
    """The plan that further rounds may be of."""
    course = course_of(state)
    return None if course is None or isinstance(state, Finished) else course.terms.plan
