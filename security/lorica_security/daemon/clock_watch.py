"""The wall clock beside one that nobody sets: where they part, the wall clock was set, and people are told."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from lorica_security.daemon.beside import beside

LOOK_S: Final = 10.0
LEAST_S: Final = 60.0
"""Less than that NTP does every day, and no certificate or record minds."""
_STEADY: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # which goes on while the machine sleeps


def wall_ahead() -> float:
    """Of the steady clock, in seconds: the same at any moment, unless the wall clock is set."""
    return time.time() - time.clock_gettime(_STEADY)


@asynccontextmanager
async def watched_clock(told: Callable[[float], None], ahead: Callable[[], float] = wall_ahead) -> AsyncIterator[None]:
    """While inside, `told` hears by how many seconds the clock was set: forward, or back (negative)."""
    async with beside(_watch(told, ahead)):
        yield


async def _watch(told: Callable[[float], None], ahead: Callable[[], float]) -> None:
    known = ahead()
    while True:
        await asyncio.sleep(LOOK_S)
        if abs((now := ahead()) - known) >= LEAST_S:
            told(now - known)
            known = now
