"""Where a model lies as a folder while it is sent to another host: one at a time, and gone however the sending ends.

A thread that writes cannot be stopped: whoever is cut off while it does leaves it to a task that waits for its end and
deletes what it made. What a killed process leaves, the next one deletes as it starts.
"""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from lorica_security.errors import Conflict, StorageError


class ExportScratch:
    """A folder that nothing else writes to; of one event loop."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._clearing: asyncio.Task[None] | None = None
        self._taken = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written or sent."""
        return not self._taken

    def clear(self) -> None:
        """Delete what a killed process left; raises StorageError."""
        try:
            if self._root.exists():
                shutil.rmtree(self._root)
        except OSError as error:
            raise StorageError(f"{self._root} cannot be cleared: {error.strerror or error}") from error

    @asynccontextmanager
    async def written(self, write: Callable[[Path], None]) -> AsyncIterator[Path]:
        """The folder that `write` makes, in a thread, until the end of the block; raises Conflict while there is
        another."""
        if self._taken:
            raise Conflict("another model is being exported from here: try again when that has ended")
        self._taken = True
        folder = self._root / secrets.token_hex(8)
        writing = asyncio.create_task(asyncio.to_thread(write, folder))
        try:
            await asyncio.shield(writing)
            yield folder
        finally:
            self._clearing = asyncio.create_task(self._give_back(folder, writing))
            await asyncio.shield(self._clearing)

    async def _give_back(self, folder: Path, writing: asyncio.Task[None]) -> None:
        await asyncio.gather(writing, return_exceptions=True)  # what it raises its caller has, or nobody asks any more
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._taken = False
