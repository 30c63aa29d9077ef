"""Coroutines run to their end from code that is none, also where an event loop runs already, as in a notebook."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


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

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(asyncio.run, noted())
        try:
            return done.result()
        except BaseException:
            if not done.done():  # this thread was interrupted, the work was not
                loop, task = begun.result()
                loop.call_soon_threadsafe(task.cancel)
            raise
