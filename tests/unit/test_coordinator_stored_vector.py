"""Stored vectors: checked before use, but for what this process knows of a file that nobody has touched since."""

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from lorica_coordinator.vectors.stored_vector import StoredVector, VectorReader
from lorica_coordinator.vectors.vector_file import VectorWriter
from lorica_security.errors import IntegrityError
from lorica_security.host.file_mark import FileMark
from silo_wire.manifest import Layout, TensorSpec

LAYOUT = Layout("float32", (TensorSpec("w", (2500,)),))
DATA = bytes(range(250)) * 40
CHUNK_BYTES = 1024
HEAD = b"head"


@pytest.fixture
def vector(tmp_path: Path) -> StoredVector:
    path = tmp_path / "vector"
    with closing(VectorWriter(path, LAYOUT, head=HEAD, chunk_bytes=CHUNK_BYTES)) as writer:
        writer.write(DATA)
        return StoredVector(path, len(HEAD), writer.finish(), writer.mark)


def change(path: Path, *, unseen: bool = False) -> None:
    """Another byte in chunk 3; with `unseen` as no time of modification tells of."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[len(HEAD) + 3 * CHUNK_BYTES] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    moved = 0 if unseen else 1_000_000
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + moved))


def read(vector: StoredVector, *, piece: int) -> bytes:
    whole = bytearray(vector.manifest.total_bytes)
    with closing(VectorReader(vector)) as reader:
        for begin in range(0, len(whole), piece):
            reader.read_into(memoryview(whole)[begin : begin + piece])
    return bytes(whole)


@pytest.mark.parametrize("piece", [1, 700, CHUNK_BYTES, 3000, len(DATA)])
@pytest.mark.parametrize("known", [True, False])
def test_a_vector_is_read_as_it_was_written_in_pieces_of_any_length(
    vector: StoredVector, piece: int, known: bool
) -> None:
    assert read(vector if known else replace(vector, mark=None), piece=piece) == DATA


@pytest.mark.parametrize("piece", [700, CHUNK_BYTES, len(DATA)])
def test_a_change_that_shows_is_found(vector: StoredVector, piece: int) -> None:
    change(vector.path)
    with pytest.raises(IntegrityError, match=f"{vector.path} was damaged: chunk 3"):
        read(vector, piece=piece)
    with pytest.raises(IntegrityError, match="chunk 3"):
        vector.chunk(3)
    assert vector.chunk(2) == DATA[2 * CHUNK_BYTES : 3 * CHUNK_BYTES]


def test_what_this_process_has_written_is_not_digested_again(vector: StoredVector) -> None:
    change(vector.path, unseen=True)
    assert read(vector, piece=700) != DATA, "nobody looked"
    assert vector.chunk(3) != DATA[3 * CHUNK_BYTES : 4 * CHUNK_BYTES]
    elsewhere = replace(vector, mark=None)
    with pytest.raises(IntegrityError, match="chunk 3"):  # a process that has not written it looks
        read(elsewhere, piece=700)
    with pytest.raises(IntegrityError, match="chunk 3"):
        elsewhere.chunk(3)


def test_a_file_that_was_cut_short_is_found_whoever_wrote_it(vector: StoredVector) -> None:
    with vector.path.open("r+b") as file:
        file.truncate(len(HEAD) + 5 * CHUNK_BYTES + 10)
        cut = replace(vector, mark=FileMark.of(file.fileno()))
    with pytest.raises(IntegrityError, match="chunk 5"):
        read(cut, piece=700)


def test_another_file_in_its_place_is_not_taken_for_it(vector: StoredVector) -> None:
    status = vector.path.stat()
    other = vector.path.with_name("other")
    other.write_bytes(HEAD + bytes(len(DATA)))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(vector.path)
    with pytest.raises(IntegrityError, match="chunk 0"):
        read(vector, piece=700)
