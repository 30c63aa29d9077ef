"""The one thread in which an agent trains, masks and evaluates."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lorica_security.errors import LoricaError
from silo_agent.service.ports import WorkCancelled

T = TypeVar("T")


class WorkerThread:
    """Calls that block, one after the other, away from the loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")

    def close(self) -> None:
        """Once nothing runs in it any more."""
        self._thread.shutdown()

    async def run(self, call: Callable[[Callable[[], bool]], T]) -> T:
        """`call(cancelled)` in the worker thread; when this task is cancelled, `cancelled` says so and the thread is
        waited for."""
        stop = threading.Event()
        running = asyncio.get_running_loop().run_in_executor(self._thread, call, stop.is_set)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            stop.set()
            while not running.done():
                try:
                    await asyncio.wait({running})
                except asyncio.CancelledError:
                    continue  # the thread is on its way out already
            error = running.exception()
            if error is not None and not isinstance(error, WorkCancelled | LoricaError):
                raise error from None
            raise


async def finished(earlier: asyncio.Task[None]) -> None:
    """Return then, also when cancelled: what begins after this one waits for this one alone."""
    cancelled: asyncio.CancelledError | None = None
    while not earlier.done():
        try:
            await asyncio.wait({earlier})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
