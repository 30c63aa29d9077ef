"""Flat vectors on disk, read into memory and written from memory that is there already; no copy of a whole one exists.

A round model is checked against its manifest as it is read, unless its mark says that this process has done so before;
a reader uses what it read once the last byte is checked. A written vector's digests are made on the way.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from hmac import compare_digest
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from lorica_security.errors import IntegrityError, StorageError
from lorica_security.host import files
from lorica_security.host.file_mark import FileMark
from lorica_security.secure_aggregation.masked_vectors.mask_stream import Words
from silo_agent.rounds.update import BLOCK_ELEMENTS, BitsBlock, FloatBlock, from_bfloat16
from silo_wire.int8_vectors.rounding import Bytes
from silo_wire.manifest import CHUNK_BYTES, ChunkDigests, Layout, Manifest

_MOST_BUFFERS = 1000
"""In one system call; Linux takes 1024."""
_SKIPPED_BYTES = 1 << 20
"""At a time."""


def blocks(elements: int, begin: int = 0) -> Iterator[tuple[int, int]]:
    """The vector's elements from `begin` on in blocks that stay in cache: first element, and the one after the last.

    Wherever they begin, they end where the blocks of the whole vector do.
    """
    while begin < elements:
        end = min(begin - begin % BLOCK_ELEMENTS + BLOCK_ELEMENTS, elements)
        yield begin, end
        begin = end


class VectorReader:
    """A round model's file, or whole chunks of it, read once from start to end, as float32 whatever it holds.

    Raises IntegrityError for a file that is not what its manifest says, StorageError for one that cannot be read.
    """

    def __init__(
        self, path: Path, manifest: Manifest, layout: Layout, mark: FileMark | None, part: range | None = None
    ) -> None:
        """`mark` is of the file when this process last checked it; None where it never did. `part`: the elements that
        are read, None: all; it begins with a chunk, and ends with one or with the vector."""
        self._path, self._manifest, self._layout = path, manifest, layout
        self._known = mark
        part = range(layout.parameters) if part is None else part
        self._position, self._end = part.start * layout.item_bytes, part.stop * layout.item_bytes
        self._first = self._position // manifest.chunk_bytes
        self._bits: BitsBlock = np.empty(BLOCK_ELEMENTS if layout.dtype == "bfloat16" else 0, dtype=np.uint16)

    def __enter__(self) -> Self:
        self._manifest.check_layout(self._layout)
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error
        self._mark = FileMark.of(self._descriptor)
        self._digests = None if self._mark == self._known else ChunkDigests(self._manifest.chunk_bytes)
        self._checked = 0
        if self._mark.size != self._manifest.total_bytes:
            os.close(self._descriptor)
            raise IntegrityError(
                f"round model {self._path} has {self._mark.size} bytes, its manifest says "
                f"{self._manifest.total_bytes}: fetch it again"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, targets: Sequence[FloatBlock]) -> None:
        """Fill `targets` with the vector's next numbers, in order."""
        if self._layout.dtype == "float32":
            self._read_bytes([_bytes_of(target) for target in targets])
            return
        bits = self._bits[: sum(len(target) for target in targets)]
        self._read_bytes([_bytes_of(bits)])
        for target in targets:
            from_bfloat16(bits[: len(target)], target)
            bits = bits[len(target) :]

    def skip_to(self, element: int | None = None) -> None:
        """Have `element` read next, which is not before any that was read; None: nothing. What lies between is looked
        at only where its digests are to be checked."""
        end = self._end if element is None else element * self._layout.item_bytes
        if self._digests is None:
            self._position = end
            return
        unused: Bytes = np.empty(min(_SKIPPED_BYTES, end - self._position), dtype=np.uint8)
        while self._position < end:
            self._read_bytes([_bytes_of(unused[: end - self._position])])

    def checked(self) -> FileMark:
        """The file's mark, now that every byte that was to be read is found right."""
        if self._digests is not None:
            self._digests.close()
            self._compare(self._digests)
        if self._position != self._end:
            raise IntegrityError(f"{self._position} of {self._end} bytes of a round model were read")
        return self._mark

    def _read_bytes(self, targets: list[memoryview]) -> None:
        try:
            for start in range(0, len(targets), _MOST_BUFFERS):
                self._fill(targets[start : start + _MOST_BUFFERS])
        except OSError as error:
            raise self._unreadable(error) from error

    def _fill(self, targets: list[memoryview]) -> None:
        left = targets
        while left:
            count = os.preadv(self._descriptor, left, self._position)
            if not count:
                raise IntegrityError(f"round model {self._path} was cut off while it was read: fetch it again")
            self._position += count
            while left and count >= len(left[0]):
                count -= len(left[0])
                left = left[1:]
            if count:
                left = [left[0][count:], *left[1:]]
        if self._digests is not None:
            for target in targets:
                self._digests.update(target)
            self._compare(self._digests)

    def _compare(self, digests: ChunkDigests) -> None:
        for index in range(self._checked, len(digests.whole)):
            if not compare_digest(digests.whole[index], self._manifest.chunk_digests[self._first + index]):
                raise IntegrityError(
                    f"round model {self._path}: chunk {self._first + index} does not have the digest in its manifest: "
                    "fetch it again"
                )
        self._checked = len(digests.whole)

    def _unreadable(self, error: OSError) -> StorageError:
        return StorageError(f"round model {self._path} cannot be read ({error.strerror}): fetch it again")


class VectorWriter:
    """Writes a vector into `path`, over what is there: pages and blocks that a file has already cost next to nothing.

    Whatever ends the writing before `finish` leaves a file that nothing may trust. Raises OSError.
    """

    def __init__(self, path: Path, chunk_bytes: int = CHUNK_BYTES, begin: int = 0) -> None:
        """`begin`: the byte of the vector that is written first, with which a chunk begins."""
        self._descriptor = _opened(path)
        self._digests = ChunkDigests(chunk_bytes)
        self._position = begin

    def write(self, values: FloatBlock | BitsBlock | Bytes | Words) -> None:
        data = _bytes_of(values)
        self._digests.update(data)
        self._append(data)

    def _append(self, data: memoryview | bytes) -> None:
        files.write_at(self._descriptor, data, self._position)
        self._position += len(data)

    def manifest(self, layout: Layout) -> Manifest:
        """Of all that was written; raises IntegrityError unless it is as long as a vector of `layout`."""
        return self._digests.manifest(layout)

    def chunk_digests(self) -> Sequence[bytes]:
        """Of what was written, the last chunk ended."""
        self._digests.close()
        return self._digests.whole

    def finish(self, trailer: bytes = b"") -> None:
        """`trailer` after the vector, and nothing after that."""
        self._append(trailer)
        os.ftruncate(self._descriptor, self._position)

    def sync(self) -> FileMark:
        """The file's mark, once what was written is on disk."""
        os.fsync(self._descriptor)
        return self.mark()

    def mark(self) -> FileMark:
        return FileMark.of(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class PieceWriter:
    """Writes pieces of a vector of `layout` into `path`, over what is there, as other processes write others.

    What is on another machine's disk is there for all who open it once all have closed it. Raises OSError.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self._descriptor = _opened(path)
        self._item_bytes = layout.item_bytes
        os.ftruncate(self._descriptor, layout.total_bytes)

    def write(self, begin: int, values: FloatBlock) -> None:
        """`values` from element `begin` on."""
        files.write_at(self._descriptor, _bytes_of(values), begin * self._item_bytes)

    def close(self) -> None:
        os.close(self._descriptor)


class ChunkWriter:
    """Writes a vector of `layout` into `path` as VectorWriter does, chunk by chunk, in any order and from any thread.

    Every chunk is written before `sync`. Raises OSError.
    """

    def __init__(self, path: Path, layout: Layout, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._descriptor = _opened(path)
        self._layout, self._chunk_bytes = layout, chunk_bytes
        self._digests = [b""] * -(-layout.total_bytes // chunk_bytes)

    def write(self, index: int, values: Words) -> None:
        data = _bytes_of(values)
        self._digests[index] = blake3(data).digest()
        files.write_at(self._descriptor, data, index * self._chunk_bytes)

    def manifest(self) -> Manifest:
        return Manifest(self._layout.digest, self._layout.total_bytes, self._chunk_bytes, tuple(self._digests))

    def sync(self) -> FileMark:
        """The file's mark, once what was written is on disk, and nothing after it."""
        os.ftruncate(self._descriptor, self._layout.total_bytes)
        os.fsync(self._descriptor)
        return FileMark.of(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


Writer = TypeVar("Writer", VectorWriter, PieceWriter, ChunkWriter)


def new_vector_file(path: Path, chunk_bytes: int = CHUNK_BYTES, begin: int = 0) -> AbstractContextManager[VectorWriter]:
    """A file to write an update to from byte `begin` on, gone after any error. Raises StorageError naming it."""
    return _new_file(path, lambda path: VectorWriter(path, chunk_bytes, begin))


def new_piece_file(path: Path, layout: Layout) -> AbstractContextManager[PieceWriter]:
    """As `new_vector_file`."""
    return _new_file(path, lambda path: PieceWriter(path, layout))


def new_chunk_file(path: Path, layout: Layout) -> AbstractContextManager[ChunkWriter]:
    """As `new_vector_file`; nobody writes any more when it is left."""
    return _new_file(path, lambda path: ChunkWriter(path, layout))


@contextmanager
def _new_file(path: Path, open_writer: Callable[[Path], Writer]) -> Iterator[Writer]:
    try:
        writer = open_writer(path)
        try:
            yield writer
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            writer.close()
    except OSError as error:
        raise StorageError(
            f"update {path} cannot be written ({error.strerror}): make room or correct permissions"
        ) from error


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.PRIVATE_FILE_MODE)


def _bytes_of(values: NDArray[np.float32] | NDArray[np.uint16] | Bytes | Words) -> memoryview:
    return values.data.cast("B")
