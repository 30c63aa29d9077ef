"""The coordinator's audit log as rows of its database: the same lines as in files (security on_disk/log_file.py), and
the same writer, which another coordinator goes on for.

What the folder has of a log is from before it was kept here. It is taken over once (edges/upkeep/taken_up.py), and
until then nothing is added.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, TypeVar

from lorica_coordinator.edges.database.postgresql.chained_rows import ChainedRow, ChainedRows
from lorica_security.audit.chain import Head
from lorica_security.audit.entry import Entry, Event, entry_from_line
from lorica_security.audit.verification import SEAL_EVERY, Position, Verification
from lorica_security.errors import IntegrityError, StateError
from lorica_security.on_disk.log_file import segments
from lorica_security.on_disk.log_place import Line

R = TypeVar("R")
_TAIL: Final = 2 * SEAL_EVERY
"""Among so many rows there is a seal, or the log begins."""


class LogRows:
    """A LogPlace. `folder` is the coordinator's audit folder."""

    def __init__(self, rows: ChainedRows, folder: Path) -> None:
        self.rows, self.folder = rows, folder
        self._alone = Lock()
        self._position: Position | None = None
        self._known = Head()  # the newest that this process knew to be there

    @property
    def where(self) -> str:
        return self.rows.where

    def lines(self) -> Iterator[Line]:
        return (self._line(row) for row in self.rows.oldest_first())

    def telling(self, text: str) -> Iterator[Line]:
        return (self._line(row) for row in self.rows.telling(text))

    def in_tries(self, work: Callable[[], R]) -> R:
        return self.rows.in_tries(work)

    @contextmanager
    def alone(self) -> Iterator["_RowsEnd"]:
        """In this process; what others add meanwhile is found when something is written."""
        with self._alone:
            if self._position is None:
                self._position = self._end()
                self._known = self._position.head
            yield _RowsEnd(self, self._position)

    def write(self, entries: Sequence[Entry], position: Position) -> None:
        """Behind the end, which is held alone."""
        self._position = None  # until it is known to be written
        rows = [ChainedRow.of(entry.line(), self.where) for entry in entries]
        sealed = [row for row, entry in zip(rows, entries, strict=True) if entry.event is Event.SEALED]
        self.rows.append(rows, newest=sealed[-1] if sealed else None)
        self._position, self._known = position, position.head

    def _end(self) -> Position:
        """Where the newest rows stand, checked from a seal on."""
        lines = [self._line(row) for row in self.rows.last(_TAIL)]
        self._require_known()
        if not lines:
            if segments(self.folder):
                raise StateError(
                    f"{self.where} is empty, and {self.folder} has a log, which goes on there: `coordinator serve` "
                    "takes it over"
                )
            return Position()
        entries = [entry_from_line(line.content, line.where) for line in lines]
        seals = [number for number, entry in enumerate(entries) if entry.event is Event.SEALED]
        begin = seals[-1] if seals else -1
        if not seals and entries[0].sequence != 1:
            raise IntegrityError(f"{self.where} has no seal in its newest {len(lines)} entries: they were put in")
        at = None
        if seals:
            seal = entries[begin]
            at = Position(head=seal.head, at=seal.at, sealed=seal.sequence)
        walk = Verification(at=at)
        for line in lines[begin + 1 :]:
            walk.take(line.content, line.where)
        return walk.position

    def _require_known(self) -> None:
        if not self._known.sequence:
            return
        row = self.rows.at(self._known.sequence)
        if row is None or row.digest != self._known.digest:
            raise IntegrityError(
                f"{self.where} has not the entry {self._known.sequence} that this process knows: rows were deleted or "
                "replaced, or the database was put back to an earlier instant; start again to be told what to do"
            )

    def _line(self, row: ChainedRow) -> Line:
        return Line(row.content, f"{self.where} row {row.sequence}")


@dataclass(frozen=True, slots=True)
class _RowsEnd:
    log: LogRows
    position: Position

    def is_full_with(self, size: int) -> bool:
        """A table has one part."""
        return False

    def write(self, entries: Sequence[Entry], position: Position) -> None:
        self.log.write(entries, position)
