"""Chunks of models on their way out, kept for a moment: silos of a round fetch the same ones at about the same time.

Each is read and checked once for all of them, and the next one while the present one is being sent.
"""

import asyncio
from typing import Final

from coordinator.service.ports import ModelStore
from coordinator.service.threads import Threads
from silo_wire.canonical import Digest
from silo_wire.manifest import Manifest

MAX_BYTES: Final = 32 << 20


class ChunkCache:
    """Used from one event loop alone."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._chunks: dict[tuple[Digest, int], asyncio.Task[bytes]] = {}  # oldest first

    async def chunk(self, models: ModelStore, manifest: Manifest, index: int) -> bytes:
        """Chunk `index` of the model, checked; raises MalformedMessage for one that it does not have, or what reading raises."""
        manifest.chunk_size(index)
        model = manifest.digest
        most = max(2, MAX_BYTES // manifest.chunk_bytes)
        wanted = self._read(models, model, index, most)
        if index + 1 < manifest.chunks:
            self._read(models, model, index + 1, most)
        return await asyncio.shield(wanted)

    def _read(self, models: ModelStore, model: Digest, index: int, most: int) -> asyncio.Task[bytes]:
        key = model, index
        if key not in self._chunks:
            while len(self._chunks) >= most:
                del self._chunks[next(iter(self._chunks))]
            task = asyncio.create_task(self._threads.transfer(models.read_chunk, model, index))
            task.add_done_callback(lambda done: self._done(key, done))
            self._chunks[key] = task
        return self._chunks[key]

    def _done(self, key: tuple[Digest, int], task: asyncio.Task[bytes]) -> None:
        """What could not be read is read anew when it is asked for again."""
        if (task.cancelled() or task.exception() is not None) and self._chunks.get(key) is task:
            del self._chunks[key]
