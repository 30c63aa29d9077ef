"""What a silo and the operator may ask of the coordinator. The edges call this and translate its errors; it knows no
gRPC."""

import asyncio

import structlog

from lorica_coordinator.rounds.events import PlanStopped
from lorica_coordinator.rounds.states import Finished, Stopped, course_of, round_of
from lorica_coordinator.service.callers.lookers import ForLookers
from lorica_coordinator.service.callers.operators import ForOperators
from lorica_coordinator.service.callers.silos import ForSilos
from silo_wire.plans.plan import PlanOfAnotherRelease

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Federation(ForSilos, ForOperators, ForLookers):
    """`await start()` once, keep `run()` going as a task, then call the rest from the same event loop."""

    async def start(self) -> None:
        """Take up the persisted state; raises StorageError, or what is wrong with the plan under way.

        A plan that is over, or stopped, may be one of another release: the next one is started beside it. One whose
        present model is not stored is stopped, before silos train for it.
        """
        await self.groups.load()
        await self._loop.resume()
        self._last_seen = {item.silo: item.last_seen_unix_s for item in await self._threads.store(self._store.silos)}
        self._announced = await self._threads.store(self._store.announced)
        await self.register.reload()
        await self.held.load()
        await self.enrolment.resume()
        if (course := course_of(self._loop.state)) is not None:
            try:
                opened = await self._desk.opened(course.terms.plan)
                if not isinstance(self._loop.state, (Finished, Stopped)) and (wrong := self._missing(opened, course)):
                    _log.error("the plan is stopped", plan=course.terms.name, detail=wrong)
                    self._loop.post_soon(PlanStopped(now=self._loop.now(), missing=wrong))
                else:
                    self._unattended.add(soon := asyncio.create_task(self._keep_plan_soon(course)))
                    soon.add_done_callback(self._unattended.discard)
            except PlanOfAnotherRelease as error:
                if not isinstance(self._loop.state, (Finished, Stopped)):
                    raise
                _log.warning("plan of another release", plan=course.terms.plan, detail=str(error))
        self._changed()

    @property
    def waiting_events(self) -> int:
        """Of the round machine: what has happened and was not looked at yet."""
        return self._loop.waiting_events

    async def run(self) -> None:
        """Drive the rounds until cancelled."""
        await self._loop.run()

    async def end(self) -> None:
        """Once nobody attends any more and `run` is over: until it is stored when they left, and what is left of the
        deadline."""
        await asyncio.gather(*self._leavings)
        await self._loop.end()

    @property
    def place(self) -> tuple[str, int, int]:
        """Phase, round and attempt of this moment."""
        return (self._loop.state.phase, *round_of(self._loop.state))

    @property
    def fault(self) -> str | None:
        """Why the present phase cannot go on, while it is tried again."""
        return self._loop.fault

    @property
    def trust_digest(self) -> bytes:
        """Of the trust bundle that stands now: what each order comes with."""
        return self._keys.trust_digest
