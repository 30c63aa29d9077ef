"""The ballast of a program that runs, looked after beside its work (security/lorica_security/host/ballast.py)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from lorica_security.daemon.beside import beside
from lorica_security.host import ballast

LOOK_S: Final = 30.0


@asynccontextmanager
async def kept_ballast(*folders: Path, every_s: float = LOOK_S) -> AsyncIterator[None]:
    """Have ballast in each of `folders` while inside, where there is room."""

    async def look() -> None:
        while True:
            for folder in folders:
                await asyncio.to_thread(ballast.keep, folder)
            await asyncio.sleep(every_s)

    async with beside(look()):
        yield
