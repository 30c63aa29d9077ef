"""Parts of a silo agent that tests look into."""

import asyncio
from collections.abc import Callable
from typing import Any

from silo_agent.rounds.effects import JournalActivity


class Notes:
    """A DisplayPort that remembers."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.activities: list[str] = []
        self._changed = asyncio.Event()

    def activity(self, activity: JournalActivity) -> None:
        self.activities.append(activity.activity.value)
        self._changed.set()

    def progress(self, fraction: float) -> None:
        return

    def note(self, event: str, **fields: object) -> None:
        self.notes.append((event, fields))
        self._changed.set()

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.notes if name == event]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def outcomes(self, count: int) -> None:
        """Until so many parts of rounds have ended."""
        await self.until(lambda: len(self.of("round")) == count)
