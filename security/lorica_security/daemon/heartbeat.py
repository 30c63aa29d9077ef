"""A sign of life that costs nothing to look at: a file that the event loop touches, and systemd's watchdog where
systemd asks for it.

A loop that hangs touches nothing, also where threads beside it still answer. Whoever looks (a container's health check)
asks the file's age alone: no command is started, no port and no key is needed.
"""

import asyncio
import math
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from lorica_security.daemon.beside import beside

BEAT_S: Final = 10.0
"""The health checks of ops/ take a file of a minute for stale (`find -mmin -1`)."""
STEP_S: Final = 1800.0
"""How long one step of a start may take: a look through a long log, or a change of a large database's tables."""
_EXTEND: Final = "EXTEND_TIMEOUT_USEC=60000000"


class Start:
    """Signs of life from a thread while a start has no event loop: every BEAT_S, for as long as it goes on from step to
    step. One that hangs in a step shows no more of them after `step_s` seconds."""

    def __init__(self, file: Path, *, step_s: float = STEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._step_s, self._clock = file, step_s, clock
        self._since = -math.inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="signs of a start", daemon=True)

    def __enter__(self) -> Self:
        self.went_on()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._thread.join(BEAT_S)  # a touch may hang with its file system

    def went_on(self) -> None:
        """A step is done, and the next one begins."""
        self._since = self._clock()

    def rest(self) -> None:
        """No step is under way, until the next one begins."""
        self._since = -math.inf

    def end(self) -> None:
        """Whoever comes next shows that it is alive, or nobody does."""
        self._over.set()

    def _beat(self) -> None:
        while not self._over.is_set():
            if self._clock() - self._since <= self._step_s:
                is_alive(self._file)
                tell_systemd(_EXTEND)
            self._over.wait(BEAT_S)


@asynccontextmanager
async def beating(file: Path, start: Start | None = None) -> AsyncIterator[None]:
    """`file`, which is there, is touched every BEAT_S while inside, and a service manager is told: ready, alive,
    stopping. Signs of its `start` end here: they would speak for a loop that hangs."""
    if start is not None:
        start.end()
    tell_systemd("READY=1")
    try:
        async with beside(_beat(file)):
            yield
    finally:
        tell_systemd("STOPPING=1")


async def _beat(file: Path) -> None:
    while True:
        is_alive(file)
        await asyncio.sleep(BEAT_S)


def is_alive(file: Path) -> None:
    """One such sign, for whoever has no event loop yet: `file` is touched and systemd is told."""
    with suppress(OSError):  # a file that grows old says so itself
        os.utime(file)
    tell_systemd("WATCHDOG=1")


def tell_systemd(word: str) -> None:
    """sd_notify(3): one datagram to the socket that systemd names; nothing where it names none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:  # its watchdog notices silence
        to.sendto(word.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
