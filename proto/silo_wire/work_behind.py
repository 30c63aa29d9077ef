"""Work on the chunks of one transfer, done in order in another thread while the next ones arrive.

The event loop is not woken for each piece of work that is done: on a busy machine that costs as much as the work
itself.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Final

MOST_WAITING: Final = 3
"""How many pieces may wait; then `put` waits as well. With chunks of 1 MiB, these and the pieces on their way are less
than the 8 MiB that may be sent twice."""
_TOGETHER: Final = 2
"""How many pieces a thread is woken for: to wake it for each one costs more."""


class WorkBehind:
    """Belongs to one task on one event loop."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], object]] = deque()
        self._running = False
        self._error: BaseException | None = None
        self._changed: asyncio.Future[None] | None = None

    async def put(self, work: Callable[[], object]) -> None:
        """Have `work` done after what was put before. Raises what earlier work raised, after which none is done."""
        while (change := self._take(work)) is not None:
            await change

    async def done(self) -> None:
        """Wait until all is done; raises what any of it raised."""
        while (change := self._finish()) is not None:
            await change
        if self._error is not None:
            raise self._error

    async def settle(self) -> None:
        """As `done`, but nobody hears of an error."""
        with suppress(Exception):
            await self.done()

    def _take(self, work: Callable[[], object]) -> "asyncio.Future[None] | None":
        with self._lock:
            if self._error is not None:
                raise self._error
            if len(self._waiting) >= MOST_WAITING:
                return self._change()
            self._waiting.append(work)
            self._begin(_TOGETHER)
            return None

    def _finish(self) -> "asyncio.Future[None] | None":
        with self._lock:
            self._begin(1)
            return self._change() if self._running else None

    def _begin(self, least: int) -> None:
        if not self._running and len(self._waiting) >= least:
            self._running = True
            self._threads.submit(self._run)

    def _change(self) -> "asyncio.Future[None]":
        if self._changed is None or self._changed.done():
            self._changed = self._loop.create_future()
        return self._changed

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    self._tell()
                    return
                work = self._waiting.popleft()
                if len(self._waiting) <= MOST_WAITING // 2 and self._changed is not None:
                    self._tell()
            try:
                work()
            except BaseException as error:  # noqa: BLE001  # raised where the next work is put, or the end awaited
                with self._lock:
                    self._error = error
                    self._waiting.clear()
            del work  # a chunk

    def _tell(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            with suppress(RuntimeError):  # the loop was closed: nobody waits
                self._loop.call_soon_threadsafe(_resolve, changed)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
