"""Threads for what may block, apart from each other, so that nothing short waits behind something long.

asyncio's own few threads are left for what takes seconds or minutes: aggregation, plans, deletions.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

MAX_TRANSFERS: Final = 64
"""Chunks that are read or written at once. A thread begins when it is needed first; a silo needs two at most."""

P = ParamSpec("P")
R = TypeVar("R")


class Threads:
    """The round store has a thread of its own: a transition waits behind no transfer. Transfers have one each."""

    def __init__(self) -> None:
        self._store = ThreadPoolExecutor(1, thread_name_prefix="round-store")
        self.transfers = ThreadPoolExecutor(MAX_TRANSFERS, thread_name_prefix="transfer")

    async def store(self, work: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Call a method of the round store."""
        return await asyncio.get_running_loop().run_in_executor(self._store, partial(work, *arguments, **named))

    def transfer(self, work: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> "asyncio.Future[R]":
        """Read or write a part of a model or of an update; it goes on whether or not anybody waits for it."""
        return asyncio.get_running_loop().run_in_executor(self.transfers, partial(work, *arguments, **named))
