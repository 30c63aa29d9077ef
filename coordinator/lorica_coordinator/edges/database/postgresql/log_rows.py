"""The coordinator's audit log as rows of its database: the same lines as in files (security on_disk/log_file.py), and
the same writer, which another coordinator goes on for.

What the folder has of a log is from before it was kept here. It is taken over once (edges/upkeep/taken_up.py), and
until then nothing is added.

Who can write the database can put rows in, but has not the coordinator's identity key. So each transaction ends with a
seal, and nothing is added behind a newest row that is not one, by that key.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_coordinator.edges.database.postgresql.chained_rows import ChainedRow, ChainedRows
from lorica_security.audit.chain import Head
from lorica_security.audit.entry import Entry, Event, entry_from_line
from lorica_security.audit.verification import Position, Verification
from lorica_security.errors import ConfigurationError, IntegrityError, StateError
from lorica_security.on_disk.log_file import segments
from lorica_security.on_disk.log_place import Line

R = TypeVar("R")


class LogRows:
    """A LogPlace. `folder` is the coordinator's audit folder, `writer` its URI, `key` its identity key: without it
    lines are read alone."""

    def __init__(self, rows: ChainedRows, folder: Path, *, writer: str, key: Ed25519PublicKey | None) -> None:
        self.rows, self.folder, self.writer, self.key = rows, folder, writer, key
        self._alone = Lock()
        self._position: Position | None = None
        self._known = Head()  # the newest that this process knew to be there

    @property
    def where(self) -> str:
        return self.rows.where

    def lines(self) -> Iterator[Line]:
        return (self._line(row) for row in self.rows.oldest_first())

    def telling(self, *texts: str) -> Iterator[Line]:
        return (self._line(row) for row in self.rows.telling(*texts))

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

    def go_on_from(self, position: Position) -> None:
        """Of rows that were put there and checked otherwise, and may end without a seal."""
        with self._alone:
            self._position, self._known = position, position.head

    def write(self, entries: Sequence[Entry], position: Position) -> None:
        """Behind the end, which is held alone."""
        self._position = None  # until it is known to be written
        rows = [ChainedRow.of(entry.line(), self.where) for entry in entries]
        sealed = [row for row, entry in zip(rows, entries, strict=True) if entry.event is Event.SEALED]
        self.rows.append(rows, newest=sealed[-1] if sealed else None)
        self._position, self._known = position, position.head

    def _end(self) -> Position:
        """Where the newest rows stand: behind a seal of the coordinator's, over a row that is none."""
        rows = self.rows.last(2)
        self._require_known()
        self.rows.check_newest()
        if not rows:
            if segments(self.folder):
                raise StateError(
                    f"{self.where} is empty, and {self.folder} has a log, which goes on there: `coordinator serve` "
                    "takes it over"
                )
            return Position()
        if self.key is None:
            raise ConfigurationError(f"the end of {self.where} is not known without the coordinator's identity key")
        before, newest = (entry_from_line(row.content, self._line(row).where) for row in (rows[0], rows[-1]))
        if newest.event is not Event.SEALED or before.event is Event.SEALED:
            raise IntegrityError(
                f"{self.where} ends with entry {newest.sequence} ({newest.event.value}), which no seal of the "
                "coordinator's covers: it was put in by somebody who can write the database and has not its identity "
                "key; find out who, and put back a database of before"
            )
        at = Position(head=before.head, unsealed=1, unsealed_since=before.at, at=before.at)
        walk = Verification(writer=self.writer, keys=[self.key], at=at)
        walk.take(rows[-1].content, self._line(rows[-1]).where)
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
        """A seal ends each transaction: no row is there that nobody signed."""
        return True

    def write(self, entries: Sequence[Entry], position: Position) -> None:
        self.log.write(entries, position)
