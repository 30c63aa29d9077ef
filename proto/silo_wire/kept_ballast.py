"""The ballast of a program that runs, looked after beside its work (security/ballast.py)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from security import ballast

LOOK_S: Final = 30.0


@asynccontextmanager
async def kept_ballast(*folders: Path, every_s: float = LOOK_S) -> AsyncIterator[None]:
    """Have ballast in each of `folders` while inside, where there is room."""

    async def look() -> None:
        while True:
            for folder in folders:
                await asyncio.to_thread(ballast.keep, folder)
            await asyncio.sleep(every_s)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
