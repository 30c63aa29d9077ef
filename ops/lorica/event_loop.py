"""Coroutines run to their end from code that is none, also where an event loop runs already, as in a notebook."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, Final, TypeVar

Result = TypeVar("Result")
STARTS_S: Final = 10.0
"""Within which a thread is at work."""


def to_its_end(work: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run. Where this thread runs a loop already, in a thread of its own, which is waited for; an
    interruption cancels the work, and is raised once that has ended; a second one is raised at once."""
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
            loop, task = begun.result(STARTS_S)
            loop.call_soon_threadsafe(task.cancel)
            wait([done])
        raise
