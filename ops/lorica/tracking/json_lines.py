"""Points as lines of JSON, in a file that only grows."""

import fcntl
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from lorica.tracking.point import Key, Point
from lorica_security.errors import Conflict, IntegrityError, StorageError

MOST_LINE_BYTES: Final = 1 << 20
_BEGINNING: Final = b'{"run": {"plan": "'
"""Of each line: what a killed tracker left of one is known by it, and nobody else's text is cut off."""


class JsonLines:
    """Each point is in the file once: what a killed tracker left of a line is cut off, and lines that are there count.

    Held open, and locked against a second tracker, until `close`.
    """

    def __init__(self, path: Path) -> None:
        """Raises StorageError where the file cannot be written, Conflict where another tracker writes it,
        IntegrityError for lines that are none of ours."""
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise StorageError(f"{path} is no file: choose another")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise Conflict(f"{path} is written by another tracker: end that, or choose another file") from error
        try:
            self._known = self._read()
        except BaseException:
            os.close(self._file)
            raise

    @property
    def where(self) -> str:
        return str(self._path)

    @property
    def known(self) -> frozenset[Key]:
        return frozenset(self._known)

    def take(self, points: Sequence[Point]) -> int:
        """One write and one fsync for all that are new; raises StorageError."""
        new = [point for point in points if point.key not in self._known]
        if not new:
            return 0
        if not os.fstat(self._file).st_nlink:
            raise StorageError(f"{self._path} was taken away: start the tracker again")
        try:
            for point in new:
                _write_all(self._file, _line(point))
            os.fsync(self._file)
        except OSError as error:
            self._known = self._read()
            raise StorageError(f"{self._path} cannot be written: {error.strerror}; free some space") from error
        self._known |= {point.key for point in new}
        return len(new)

    def close(self) -> None:
        os.close(self._file)

    def _read(self) -> set[Key]:
        """The keys of all whole lines; the file ends after them, and the next write begins there."""
        known: set[Key] = set()
        whole = 0
        with open(os.dup(self._file), "rb") as file:  # by its descriptor
            file.seek(0)
            while (line := file.readline(MOST_LINE_BYTES)).endswith(b"\n"):
                known.add(self._key(line, whole))
                whole += len(line)
        if len(line) == MOST_LINE_BYTES or line[: len(_BEGINNING)] != _BEGINNING[: len(line)]:
            raise self._not_ours(whole)
        os.ftruncate(self._file, whole)
        os.lseek(self._file, whole, os.SEEK_SET)
        return known

    def _key(self, line: bytes, at: int) -> Key:
        try:
            read = json.loads(line)
            run = read["run"]
            of = str(run["federation"]), str(run["of"]), str(run["plan"])
            return *of, int(read["round"]), int(read["attempt"]), str(read["what"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise self._not_ours(at) from error

    def _not_ours(self, at: int) -> IntegrityError:
        return IntegrityError(f"{self._path} has a line that no tracker wrote, at byte {at}: choose another file")


def _line(point: Point) -> bytes:
    told = asdict(point) | {"at": datetime.fromtimestamp(point.unix_s, UTC).isoformat(timespec="milliseconds")}
    return json.dumps(told, allow_nan=False).encode() + b"\n"


def _write_all(file: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]
