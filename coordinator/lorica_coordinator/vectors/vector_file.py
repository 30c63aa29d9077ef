"""Files that hold a flat vector, written from the first byte to the last in one pass: preallocated, digested, durable.

The whole file is allocated before its first byte, so that a disk that is too small shows at once; the kernel is asked
to write while more comes in, so that the fsync at the end finds little left to do.
"""

import ctypes
import os
from pathlib import Path

from lorica_security.errors import IntegrityError, StorageError
from lorica_security.host import files
from lorica_security.host.file_mark import FileMark
from silo_wire.manifest import CHUNK_BYTES, ChunkDigests, Layout, Manifest

WRITE_BACK_BYTES = 8 << 20
"""How much is written between two calls of `begin_write_back`: large enough for a disk, small beside a model."""

_SYNC_FILE_RANGE_WRITE = 2


def preallocate(descriptor: int, size: int) -> None:
    """Give the file `size` bytes of disk, whatever it held before; raises OSError when there are not as many left."""
    os.posix_fallocate(descriptor, 0, size)
    if os.fstat(descriptor).st_size > size:
        os.ftruncate(descriptor, size)


def begin_write_back(descriptor: int, begin: int, size: int) -> None:
    """Have the kernel begin to write this range to the disk. Only a hint: what is durable, fsync alone says."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, begin, size, _SYNC_FILE_RANGE_WRITE)


def _find_sync_file_range() -> "ctypes._NamedFuncPointer | None":
    try:
        function = ctypes.CDLL(None).sync_file_range  # Linux alone has it
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


_sync_file_range = _find_sync_file_range()


class VectorWriter:
    """A file with `head`, then a vector of `layout` as it comes. `finish` it, and always `close` it.

    What `path` holds is written over: callers write beside the final name and rename. Raises StorageError naming the
    file.
    """

    def __init__(self, path: Path, layout: Layout, *, head: bytes = b"", chunk_bytes: int = CHUNK_BYTES) -> None:
        self._path = path
        self._layout = layout
        self._at = self._written_back = len(head)
        self._end = len(head) + layout.total_bytes
        self._digests = ChunkDigests(chunk_bytes)
        self.mark: FileMark | None = None
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            preallocate(self._descriptor, self._end)
            files.write_at(self._descriptor, head, 0)
        except OSError as error:
            self.close()
            raise self._unwritable(error) from error

    def write(self, block: bytes | bytearray | memoryview) -> None:
        """The next bytes of the vector; raises IntegrityError when they are more than the layout has."""
        view = memoryview(block).cast("B")
        if self._at + len(view) > self._end:
            total = self._layout.total_bytes
            raise IntegrityError(f"a vector of more than {total} bytes was given for a layout of {total} bytes")
        try:
            files.write_at(self._descriptor, view, self._at)
            self._at += len(view)
            if self._at - self._written_back >= WRITE_BACK_BYTES:
                begin_write_back(self._descriptor, self._written_back, self._at - self._written_back)
                self._written_back = self._at
        except OSError as error:
            raise self._unwritable(error) from error
        self._digests.update(view)

    def finish(self) -> Manifest:
        """Make the file durable and return the vector's manifest; raises IntegrityError unless the vector is whole.

        From then on `mark` is the file's.
        """
        manifest = self._digests.manifest(self._layout)
        try:
            os.fsync(self._descriptor)
            self.mark = FileMark.of(self._descriptor)
        except OSError as error:
            raise self._unwritable(error) from error
        return manifest

    def close(self) -> None:
        """May be repeated."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _unwritable(self, error: OSError) -> StorageError:
        return StorageError(f"{self._path} cannot be written: {error.strerror or error}")
