"""How far work is: what a person sees of it, and what the coordinator is told."""

import asyncio
from functools import partial

from silo_agent.service.ports import CoordinatorPort, DisplayPort, Notice, Progress
from silo_wire.messages import AgentPhase, RoundKey

PROGRESS_S = 2.0
"""Between two reports of progress to the coordinator."""
_PROGRESS_STEP = 0.005  # of what a person sees


class ProgressReports:
    """Of one agent; `keep_telling` runs as long as it does."""

    def __init__(self, coordinator: CoordinatorPort, display: DisplayPort) -> None:
        self._coordinator, self._display = coordinator, display
        self._reported: tuple[RoundKey, AgentPhase, float] | None = None
        self._due = asyncio.Event()

    def of(self, key: RoundKey | None, phase: AgentPhase, *, told: bool = True) -> Progress:
        """For work in this thread or another; passes on what a person could see. Unless `told`, the coordinator hears
        of the phase alone."""
        loop = asyncio.get_running_loop()
        shown = -1.0

        def report(fraction: float) -> None:
            nonlocal shown
            fraction = min(max(fraction, 0.0), 1.0)
            if fraction - shown >= _PROGRESS_STEP or fraction == 1.0 > shown:
                shown = fraction
                loop.call_soon_threadsafe(self._progressed, key, phase, fraction, told)

        return report

    def _progressed(self, key: RoundKey | None, phase: AgentPhase, fraction: float, told: bool) -> None:
        self._display.progress(fraction)
        report = None if key is None else (key, phase, fraction if told else 0.0)
        if report is not None and report != self._reported:
            self._reported = report
            self._due.set()

    async def keep_telling(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            if self._reported is not None:
                await self._coordinator.report_progress(*self._reported)
                await asyncio.sleep(PROGRESS_S)

    def notice(self) -> Notice:
        """For work in another thread."""
        loop = asyncio.get_running_loop()

        def tell(event: str, detail: str) -> None:
            loop.call_soon_threadsafe(partial(self._display.note, event, detail=detail))

        return tell
