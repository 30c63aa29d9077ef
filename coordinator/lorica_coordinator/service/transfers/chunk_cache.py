"""Chunks of models on their way out, kept for a moment: silos of a round fetch the same ones at about the same time.

They are read, checked and put into their messages once for all of them, a few at a time, and the next few while the
present ones are being sent. Nothing is kept when nobody fetches.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from lorica_coordinator.service.ports import ModelStore
from lorica_coordinator.service.threads import Threads
from silo_wire.canonical import Digest
from silo_wire.codecs.chunk_piece import chunk_piece
from silo_wire.manifest import Manifest

MAX_BYTES: Final = 16 << 20
BATCH_BYTES: Final = 2 << 20
"""Read at a time: waking a thread for each chunk costs more."""


class ChunkCache:
    """Used from one event loop alone."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._readers = 0
        self._batches: dict[tuple[Digest, int], asyncio.Future[list[bytes]]] = {}  # oldest first

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a download; chunks are let go when the last one ends."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._batches.clear()

    async def piece(self, models: ModelStore, manifest: Manifest, index: int) -> bytes:
        """Chunk `index` of the model as it is sent (silo_wire.codecs.chunk_piece).

        Raises MalformedMessage for one that it does not have, or what reading raises.
        """
        manifest.chunk_size(index)
        at_once = max(1, BATCH_BYTES // manifest.chunk_bytes)
        number = index // at_once
        wanted = self._read(models, manifest, number, at_once)
        if (number + 1) * at_once < manifest.chunks:
            self._read(models, manifest, number + 1, at_once)
        return (await asyncio.shield(wanted))[index % at_once]

    def _read(self, models: ModelStore, manifest: Manifest, number: int, at_once: int) -> "asyncio.Future[list[bytes]]":
        model = manifest.digest
        key = model, number
        if key not in self._batches:
            while len(self._batches) >= max(2, MAX_BYTES // (at_once * manifest.chunk_bytes)):
                del self._batches[next(iter(self._batches))]
            indices = range(number * at_once, min((number + 1) * at_once, manifest.chunks))
            reading = self._threads.transfer(
                lambda: [chunk_piece(index, models.read_chunk(model, index)) for index in indices]
            )
            reading.add_done_callback(lambda done: self._done(key, done))
            self._batches[key] = reading
        return self._batches[key]

    def _done(self, key: tuple[Digest, int], reading: "asyncio.Future[list[bytes]]") -> None:
        """What could not be read is read anew when it is asked for again."""
        if (reading.cancelled() or reading.exception() is not None) and self._batches.get(key) is reading:
            del self._batches[key]
