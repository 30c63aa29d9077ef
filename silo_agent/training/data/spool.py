"""Records of bytes that are written once and then read in any order: in memory while they are few, else in a file
without a name.

The file has no name from the moment it is made (O_TMPFILE), so nobody can open, change or forget it: it is gone when
its reader is, also after kill -9. What stays in memory is 4.5 bytes a record. Reads are pread and not a map of memory,
so that a disk that fails is an error and not the end of the process, and so that pages that were read are not this
process's own.
"""

import os
import secrets
import tempfile
import weakref
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lorica_security.errors import StorageError
from lorica_security.host.files import make_private_folder

MEMORY_BYTES: Final = 64 << 20
"""Of one spool, before it becomes a file."""
MOST_RECORD_BYTES: Final = (1 << 31) - 1
_BLOCK_BYTES: Final = 1 << 20
_GROUP: Final = 16
"""Records whose place is found by adding up lengths from a place that is kept."""


@dataclass(frozen=True, slots=True)
class SpoolPlace:
    """Where spools become files: `folder`, which is made with mode 0700 if it is not there, or the system's folder for
    temporary files. A spool of at most `memory_bytes` stays in memory."""

    folder: Path | None = None
    memory_bytes: int = MEMORY_BYTES


class Records:
    """What a spool holds, by number. Safe for several threads at once, and behind a fork."""

    def __init__(self, lengths: "array[int]", begins: "array[int]", held: bytearray | int, shown: str) -> None:
        """`lengths` of each record; `begins` of each _GROUP-th; `held` the bytes, or the descriptor of their file,
        which is closed when nothing refers to this any more."""
        self._lengths: NDArray[np.uint32] = np.asarray(lengths, dtype=np.uint32)
        self._begins: NDArray[np.int64] = np.asarray(begins, dtype=np.int64)
        self._held, self._shown = held, shown
        if isinstance(held, int):
            weakref.finalize(self, os.close, held)

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def in_file(self) -> bool:
        return isinstance(self._held, int)

    @property
    def total_bytes(self) -> int:
        """Of all records together."""
        return int(self._lengths.sum(dtype=np.int64))

    def length(self, number: int) -> int:
        """Bytes of a record; nothing is read for it."""
        return int(self._lengths[number])

    def __getitem__(self, number: int) -> bytes:
        """Raises IndexError for a number that is not from 0 to below `len`, StorageError where the disk does not give
        the record back."""
        if not 0 <= number < len(self._lengths):
            raise IndexError(number)
        group = number // _GROUP
        begin = int(self._begins[group]) + int(self._lengths[group * _GROUP : number].sum(dtype=np.int64))
        return self._read(begin, int(self._lengths[number]))

    def __iter__(self) -> Iterator[bytes]:
        """In order, in large pieces: _GROUP records at a time."""
        for group, begin in enumerate(self._begins.tolist()):
            lengths = self._lengths[group * _GROUP : (group + 1) * _GROUP].tolist()
            content, at = self._read(begin, sum(lengths)), 0
            for length in lengths:
                yield content[at : at + length]
                at += length

    def _read(self, begin: int, size: int) -> bytes:
        if isinstance(self._held, bytearray):
            return bytes(self._held[begin : begin + size])
        parts, left = list[bytes](), size
        try:
            while left:
                parts.append(os.pread(self._held, left, begin + size - left))
                left -= len(parts[-1])
                if not parts[-1]:
                    raise OSError(0, f"{left} bytes are missing")
        except OSError as error:
            raise StorageError(
                f"{self._shown} could not be read back at byte {begin} ({error.strerror}): check that disk, and start "
                "the agent again"
            ) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Spool:
    """Takes records; `finish` gives them back. `what` they are, for errors: "tokens of the train split"."""

    def __init__(self, place: SpoolPlace, what: str) -> None:
        self._place, self._what = place, what
        self._lengths, self._begins = array("I"), array("q")
        self._buffer = bytearray()
        self._size = 0
        self._file: int | None = None
        self._failed = False
        self._closing: weakref.finalize[[int], Spool] | None = None

    def append(self, record: bytes) -> None:
        """Raises StorageError where the disk has no room; what was written is given back to it then, and nothing more
        can be appended."""
        self._require_whole()
        if len(record) > MOST_RECORD_BYTES:
            raise StorageError(f"{self._what}: one has {len(record)} bytes, more than {MOST_RECORD_BYTES}: shorten it")
        if len(self._lengths) % _GROUP == 0:
            self._begins.append(self._size)
        self._lengths.append(len(record))
        self._size += len(record)
        self._buffer += record
        if len(self._buffer) > (self._place.memory_bytes if self._file is None else _BLOCK_BYTES):
            self._write()

    def finish(self) -> Records:
        """Nothing can be appended any more. Raises StorageError, also for a spool that failed before."""
        self._require_whole()
        if self._file is None:
            return Records(self._lengths, self._begins, self._buffer, self._what)
        self._write()
        assert self._closing is not None
        self._closing.detach()
        return Records(self._lengths, self._begins, self._file, f"{self._what} in {self._folder}")

    def _require_whole(self) -> None:
        """The number of a descriptor that is closed may be another file's by now."""
        if self._failed:
            raise StorageError(f"{self._what} were not taken whole by {self._folder}: read them anew")

    @property
    def _folder(self) -> Path:
        return self._place.folder or Path(tempfile.gettempdir())

    def _write(self) -> None:
        try:
            if self._file is None:
                self._file = self._made()
                self._closing = weakref.finalize(self, os.close, self._file)
            left = memoryview(self._buffer)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._failed = True
            if self._closing is not None:
                self._closing()
            raise StorageError(
                f"{self._what} do not fit into memory, and {self._folder} could not take them ({error.strerror}) after "
                f"{self._size - len(self._buffer)} bytes: free some space there; they take about as much as the lines "
                "themselves"
            ) from error
        self._buffer = bytearray()

    def _made(self) -> int:
        """Raises OSError."""
        if self._place.folder is not None and not self._place.folder.is_dir():
            make_private_folder(self._place.folder)
        try:
            return os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:  # a file system without such files, or without room for one, which the next call says
            path = self._folder / f".spool.{secrets.token_hex(8)}.tmp"  # files.sweep deletes what a kill leaves here
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.unlink(path)
            return descriptor
