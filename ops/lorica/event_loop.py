"""Coroutines run to their end from code that is none, also where an event loop runs already, as in a notebook."""

import asyncio
import sys
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import Thread
from typing import Any, Final, TypeVar

Result = TypeVar("Result")
STARTS_S: Final = 10.0
"""Within which a thread is at work."""
STILL_ENDING: Final = "interrupted: what runs is stopped and put away; interrupt once more to leave it to that"
LEFT: Final = "the work was left while it stops: wait until its processes are gone, or restart, before it runs again"


def to_its_end(work: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run. Where this thread runs a loop already, in a thread of its own, which is waited for; an
    interruption cancels the work, and is raised once that has ended. A second one tells so and waits on; a third is
    raised at once, and says that the work is left to end by itself."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return _in_another_thread(work)


def _in_another_thread(work: Coroutine[Any, Any, Result]) -> Result:
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Result]]] = Future()

    async def noted() -> Result:
        task = asyncio.ensure_future(work)
        begun.set_result((asyncio.get_running_loop(), task))
        return await task

    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(asyncio.run(noted()))
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is raised where it is waited for
            done.set_exception(error)

    try:
        Thread(target=run).start()
        return done.result()
    except BaseException:
        if not done.done():  # this thread was interrupted, perhaps while it started the other; the work was not
            _cancelled(begun, done)
        raise


def _cancelled(begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Result]]], done: Future[Result]) -> None:
    """Once the work has ended."""
    for is_last in (False, True):
        try:
            loop, task = begun.result(STARTS_S)
            with suppress(RuntimeError):  # the loop was quicker, and is closed
                loop.call_soon_threadsafe(_cancel_once, task)
            wait([done])
        except KeyboardInterrupt:
            if is_last:
                raise KeyboardInterrupt(LEFT) from None
            print(STILL_ENDING, file=sys.stderr)
        else:
            return


def _cancel_once(task: asyncio.Task[Result]) -> None:
    """Cancelled again, it would not clean up."""
    if not task.cancelling():
        task.cancel()
