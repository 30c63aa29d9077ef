"""What a program does beside its work, for as long as that goes on."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def beside(doing: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """`doing` goes on while inside, and has ended after it."""
    task = asyncio.create_task(doing)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
