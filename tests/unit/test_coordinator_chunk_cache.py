"""Chunks on their way out: read once for all who fetch them, never more than the bound, and an error is nobody's for
good."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.service.threads import MAX_TRANSFERS, Threads
from lorica_coordinator.service.transfers import chunk_cache
from lorica_coordinator.service.transfers.chunk_cache import ChunkCache
from lorica_coordinator.vectors import model_file
from lorica_security.errors import IntegrityError, MalformedMessage
from silo_wire.canonical import Digest, digest_of
from silo_wire.codecs.chunk_piece import reader
from silo_wire.manifest import CHUNK_BYTES, Layout, TensorSpec
from silo_wire.v1 import federation_pb2

CHUNKS = 12
READ = reader(federation_pb2.ModelPiece)
LAYOUT = Layout("float32", (TensorSpec("w", (CHUNKS * CHUNK_BYTES // 4,)),))
DATA = bytes(range(120)) * (LAYOUT.total_bytes // 120) + bytes(LAYOUT.total_bytes % 120)


class CountedStore(ModelStore):
    """Notes which chunks are read."""

    def __init__(self, folder: Path) -> None:
        file = folder / "initial.safetensors"
        manifest = model_file.write(file, LAYOUT, [DATA])
        super().__init__(
            folder / "models", layout=LAYOUT, model_layout=LAYOUT, initial=manifest.digest, initial_file=file
        )
        self.reads: list[int] = []
        self.model = self.manifest(self.initial())

    def read_chunk(self, model: Digest, index: int) -> bytes:
        self.reads.append(index)
        return super().read_chunk(model, index)


@pytest.fixture
def models(tmp_path: Path) -> CountedStore:
    return CountedStore(tmp_path)


async def fetch(cache: ChunkCache, models: CountedStore) -> bytes:
    with cache.reading():
        pieces = [await cache.piece(models, models.model, index) for index in range(CHUNKS)]
    read = [READ(piece) for piece in pieces]
    assert [chunk.index for chunk in read] == list(range(CHUNKS))
    return b"".join(chunk.data for chunk in read)


async def test_silos_that_fetch_together_share_every_reading(models: CountedStore) -> None:
    cache = ChunkCache(Threads())
    fetched = await asyncio.gather(*(fetch(cache, models) for _ in range(8)))
    assert fetched == [DATA] * 8
    assert sorted(models.reads) == list(range(CHUNKS))


async def test_no_more_is_kept_than_the_bound(models: CountedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_cache, "MAX_BYTES", 2 * chunk_cache.BATCH_BYTES)
    cache = ChunkCache(Threads())
    with cache.reading():
        assert await fetch(cache, models) == DATA
        assert len(cache._batches) == 2
        assert await fetch(cache, models) == DATA
        assert len(cache._batches) == 2
    assert len(models.reads) == 2 * CHUNKS


async def test_nothing_is_kept_when_nobody_fetches(models: CountedStore) -> None:
    cache = ChunkCache(Threads())
    with cache.reading():
        assert await fetch(cache, models) == DATA
        assert cache._batches
    assert not cache._batches


async def test_what_could_not_be_read_is_tried_again_when_it_is_asked_for_again(
    models: CountedStore, tmp_path: Path
) -> None:
    cache = ChunkCache(Threads())
    (path,) = (tmp_path / "models").glob("*.safetensors")
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        good = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes((good[0] ^ 1,)))
    for _ in range(2):
        with pytest.raises(IntegrityError, match=f"{path} was damaged: chunk {CHUNKS - 1}"):
            await cache.piece(models, models.model, CHUNKS - 1)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(good)
    assert await fetch(cache, models) == DATA


async def test_one_who_gives_up_takes_nothing_from_the_others(models: CountedStore) -> None:
    cache = ChunkCache(Threads())
    one, other = (asyncio.create_task(fetch(cache, models)) for _ in range(2))
    await cache.piece(models, models.model, 0)
    one.cancel()
    assert await other == DATA


@pytest.mark.parametrize("index", [-1, CHUNKS])
async def test_chunk_outside_the_model_is_refused(models: CountedStore, index: int) -> None:
    with pytest.raises(MalformedMessage, match=f"chunk {index} is outside"):
        await ChunkCache(Threads()).piece(models, models.model, index)


async def test_a_transition_waits_behind_no_transfer_and_no_aggregation() -> None:
    threads, release = Threads(), threading.Event()
    waiting: list[asyncio.Future[bool]] = [threads.transfer(release.wait) for _ in range(2 * MAX_TRANSFERS)]
    waiting += [asyncio.create_task(asyncio.to_thread(release.wait)) for _ in range(64)]
    try:
        assert await threads.store(digest_of, b"state") == digest_of(b"state")
    finally:
        release.set()
    await asyncio.gather(*waiting)
