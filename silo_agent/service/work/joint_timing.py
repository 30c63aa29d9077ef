"""When a silo answers under joint noise: at an instant that tells nobody how many records its sample has."""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

from lorica_security.errors import LoricaError, StateError
from silo_agent.service.ports import JournalPort, TrainedUpdate
from silo_agent.service.work.worker_thread import WorkerThread, finished
from silo_wire.messages import RoundKey
from silo_wire.plans.plan import Plan

LATE_S = 60.0
"""Under joint noise a silo that is late, or called off, begins nothing for a whole number of these: when it was done
tells of its sample."""


class JointTiming:
    """Holds answers back, and what comes after work that nobody waits for any more."""

    def __init__(self, thread: WorkerThread, journal: JournalPort) -> None:
        self._thread, self._journal = thread, journal
        self._ended = asyncio.Event()
        self._behind: asyncio.Task[None] | None = None  # what training that nobody waits for any more still does

    def end(self) -> None:
        """The agent ends: nothing is held back any more."""
        self._ended.set()

    async def settle(self) -> None:
        """Return when what was given up has ended, also when cancelled."""
        if self._behind is not None:
            await finished(self._behind)

    async def free(self) -> None:
        """The same before other work begins; raises what it ended with."""
        if self._behind is not None:
            behind, self._behind = self._behind, None
            await finished(behind)
            behind.result()

    async def when_due(
        self, due: float, work: Coroutine[Any, Any, TrainedUpdate], key: RoundKey, plan: Plan
    ) -> TrainedUpdate:
        """What `work` comes to, under joint noise: neither sooner nor later than `due`, whichever way it ends.

        Who answers, fails or begins other work as soon as it can tells by that how many records its sample has. Raises
        StateError for what is not done then. The sum of what did not come to an answer is erased; nothing begins before
        that, and a while after.
        """
        working = asyncio.create_task(work)
        try:
            await self._hidden_until(due)
            if working.done():
                return working.result()
        except BaseException:
            self._behind = asyncio.create_task(self._given_up(working, key, due))
            raise
        self._behind = asyncio.create_task(self._given_up(working, key, due))
        raise StateError(
            f"the gradients were not there {plan.privacy.answer_after_s:g} s after the order, which is [privacy] "
            f"answer_after_s of plan {plan.name}: nothing leaves; have the operator raise it, or give this silo a "
            f"faster machine"
        )

    async def _given_up(self, working: asyncio.Task[TrainedUpdate], key: RoundKey, due: float) -> None:
        """Return when nobody can tell any more when `working` would have been done."""
        working.cancel()
        await asyncio.wait({working})
        await self._thread.run(lambda _cancelled: self._journal.erase_update(key))
        late = asyncio.get_running_loop().time() - due
        await self._hidden_until(due + LATE_S * max(1, math.ceil(late / LATE_S)))
        error = None if working.cancelled() else working.exception()
        if error is not None and not isinstance(error, LoricaError):
            raise error

    async def _hidden_until(self, due: float) -> None:
        """Return then, also when cancelled; sooner only where this agent ends."""
        cancelled: asyncio.CancelledError | None = None
        while asyncio.get_running_loop().time() < due and not self._ended.is_set():
            try:
                async with asyncio.timeout_at(due):
                    await self._ended.wait()
            except TimeoutError:
                pass
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
