"""Lines that name each other (security/lorica_security/audit/chain.py), as the rows of a table that is only added to.

The line itself is what counts. Number and digest of the line before stand beside it, so that the table can have no
number twice and no two lines after one: of two that append at once, whoever they are, one finds that it did not.

`newest` is a file of the folder, with the newest line that was seen or added from here: a database of an earlier
instant does not have it. It is never replaced by a line that is not newer, nor by one of rows that lack it.
"""

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
from sqlalchemy import Connection, Row, Select, Table, func, insert, or_, select
from sqlalchemy.exc import IntegrityError as NotUnique
from sqlalchemy.exc import ProgrammingError, SQLAlchemyError

from lorica_coordinator.edges.database.postgresql.newest import SharedNewest
from lorica_coordinator.edges.database.postgresql.server import GaveWay, PostgresqlDatabase
from lorica_security.audit.chain import Head, text, whole_number
from lorica_security.errors import ConfigurationError, IntegrityError, StorageError
from lorica_security.host import files

_log = structlog.get_logger(__name__)

Fence = Callable[[Connection], None]
_BATCH: Final = 1000
_NO_TABLE: Final = "42P01"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_REMEDY: Final = "put a newer one back, or `coordinator settle` says what is to be done about an older one"


@dataclass(frozen=True, slots=True)
class ChainedRow:
    """What a line says of itself, unchecked: its number, its digest and that of the line before. `content` is the line
    as files have it, with its newline."""

    sequence: int
    previous: str
    digest: str
    content: bytes

    @classmethod
    def of(cls, content: bytes, where: str) -> "ChainedRow":
        """Raises IntegrityError naming `where` for what is no line of a chain."""
        try:
            content.decode("ascii")
            value = json.loads(content)
            sequence, previous, digest = whole_number(value["sequence"]), text(value["previous"]), text(value["digest"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise IntegrityError(f"{where} is no entry: it was edited or damaged") from error
        return cls(sequence, previous, digest, content)


class Moved(GaveWay):
    """Somebody else has added to the rows since: what was to be added does not follow them any more."""


class ChainedRows:
    """May be used from several threads. `fence` begins each transaction, and raises where this process may not do it.

    Raises StorageError, IntegrityError naming database and table.
    """

    def __init__(
        self,
        database: PostgresqlDatabase,
        table: Table,
        fence: Fence,
        newest: Path,
        shared: SharedNewest | None = None,
    ) -> None:
        self._database, self._table, self._fence = database, table, fence
        self.newest, self._shared = newest, shared
        self.put_back = False
        """While an older database is settled: what the folder knows is neither held against it, nor changed."""
        self.where = f"{database.name} {table.name}"
        self.in_tries = database.in_tries

    def last(self, count: int) -> list[ChainedRow]:
        """The newest `count`, oldest first."""
        query = select(self._table).order_by(self._table.c.sequence.desc()).limit(count)
        return self.in_tries(partial(self._read, query))[::-1]

    def at(self, sequence: int) -> ChainedRow | None:
        found = self.in_tries(lambda: self._read(select(self._table).where(self._table.c.sequence == sequence)))
        return found[0] if found else None

    def oldest_first(self) -> Iterator[ChainedRow]:
        query = select(self._table).order_by(self._table.c.sequence).limit(_BATCH)
        while found := self.in_tries(partial(self._read, query)):
            yield from found
            query = query.where(self._table.c.sequence > found[-1].sequence)

    def telling(self, *words: str) -> Iterator[ChainedRow]:
        """Those whose line has one of `words`, newest first."""
        query = select(self._table).where(or_(*(func.strpos(self._table.c.line, one) > 0 for one in words)))
        query = query.order_by(self._table.c.sequence.desc()).limit(_BATCH)
        while found := self.in_tries(partial(self._read, query)):
            yield from found
            query = query.where(self._table.c.sequence < found[-1].sequence)

    def append(self, rows: Sequence[ChainedRow], *, newest: ChainedRow | None) -> None:
        """Durable when this returns, all or none; `newest` is what the folder is to have of them, if anything: rows
        that are there count also where it cannot have it.

        Raises Moved where they do not follow what is there, IntegrityError where what the folder knows is not there.
        After another error they may be there, or come to be.
        """
        if not rows:
            return
        if newest is not None and self._shared is not None:
            self._shared.prepare()
        known = () if newest is None else tuple(self._known())  # first: others may add, and make it known, meanwhile
        try:
            with self.transaction() as connection:
                end = self._require_end(connection, rows[0])
                self._require(known, connection, end)
                connection.execute(
                    insert(self._table),
                    [{"sequence": row.sequence, "previous": row.previous, "line": _text(row)} for row in rows],
                )
        except NotUnique as error:
            raise self._moved() from error
        if newest is not None:
            self.make_known(newest)

    def make_known(self, row: ChainedRow) -> None:
        """`remember`, of a row that counts also where its file cannot be written: that is told."""
        try:
            self.remember(row)
        except (ConfigurationError, StorageError) as error:
            _log.error(
                "the newest entry is kept in the database alone: put back to before it, it is not found out",
                rows=self.where,
                entry=row.sequence,
                error=str(error),
            )

    def kept(self) -> ChainedRow | None:
        """What the folder knows to be the newest; None where it knows nothing, or is not held against the rows."""
        return None if self.put_back else self._folders()

    def all_known(self) -> list[ChainedRow]:
        """What this folder and one that several see know, the newest last; also while an older database is settled."""
        return sorted((row for _, row in self._everywhere()), key=lambda row: row.sequence)

    def mark(self, name: str) -> None:
        """Have the folder, and one that several see, know `name`, a digest, for good."""
        path = self._marks / name
        if not files.is_there(path):
            files.make_private_folder(self.newest.parent)
            files.make_private_folder(self._marks)
            files.mark(path)
        if self._shared is not None:
            self._shared.mark(name)

    def marks(self) -> frozenset[str]:
        names = {path.name for path in self._marks.iterdir()} if self._marks.is_dir() else set()
        own = set(filter(_DIGEST.fullmatch, names))
        return frozenset(own if self._shared is None else own | self._shared.marks())

    @property
    def _marks(self) -> Path:
        return self.newest.with_name("plans")

    def remember(self, row: ChainedRow) -> None:
        """Have the folder know `row`, which is there and goes on from what it knows, unless it knows a newer one."""
        if self.put_back:
            return
        try:
            files.make_private_folder(self.newest.parent)
            with _alone_with(self.newest):
                kept = self.kept()
                if kept is None or kept.sequence < row.sequence:
                    files.write_private(self.newest, row.content)
        finally:  # one that cannot be told keeps the other from nothing
            if self._shared is not None:
                self._shared.keep(row.sequence, row.digest, row.content)

    def forget(self) -> None:
        """What the folder knew: the rows were settled, and are what it knows from now on."""
        self.newest.unlink(missing_ok=True)
        if self._shared is not None:
            self._shared.forget()
        self.put_back = False

    def check_newest(self) -> None:
        """Raises IntegrityError where the rows have not what the folder has of them: they are of an earlier instant, or
        others."""
        for by, known in self._known():
            self.require(known, self.at(known.sequence), by=by)

    def require(self, known: ChainedRow, found: ChainedRow | None, *, by: str) -> None:
        """Raises IntegrityError unless `known`, which `by` has, is what was `found` under its number."""
        if found is None:
            raise IntegrityError(
                f"{self.where} has no entry {known.sequence}, which {by} has: rows were deleted, or the database was "
                f"put back to an earlier instant; {_REMEDY}"
            )
        if found != known:
            raise IntegrityError(
                f"{self.where} has another entry {known.sequence} than {by}: rows were replaced; {_REMEDY}"
            )

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Begun with the fence."""
        try:
            with self._database.engine.begin() as connection:
                self._fence(connection)
                yield connection
        except NotUnique:
            raise
        except SQLAlchemyError as error:
            if isinstance(error, ProgrammingError) and getattr(error.orig, "sqlstate", "") == _NO_TABLE:
                raise StorageError(
                    f"{self._database.name} has not the table {self._table.name}: `coordinator upgrade` makes it, or "
                    "in a new database the first `coordinator serve`"
                ) from error
            raise self._database.failed(error) from error

    def _read(self, query: Select[Any]) -> list[ChainedRow]:
        with self.transaction() as connection:
            found = connection.execute(query).all()
        return [self._row(row) for row in found]

    def _row(self, found: Row[Any]) -> ChainedRow:
        """Number and predecessor stand in the line as well, whose digest is over them."""
        row = ChainedRow.of(f"{found.line}\n".encode(), f"{self.where} row {found.sequence}")
        if (row.sequence, row.previous) != (found.sequence, found.previous):
            raise IntegrityError(f"{self.where} row {found.sequence} is not what its line says: it was edited")
        return row

    def _require_end(self, connection: Connection, first: ChainedRow) -> ChainedRow | None:
        """The newest row that is there."""
        newest = self._one(connection, select(self._table).order_by(self._table.c.sequence.desc()).limit(1))
        end = Head() if newest is None else Head(newest.sequence, newest.digest)
        if (end.sequence + 1, end.digest) != (first.sequence, first.previous):
            raise self._moved()
        return newest

    def _require(self, known: Sequence[tuple[str, ChainedRow]], connection: Connection, end: ChainedRow | None) -> None:
        for by, row in known:
            if end is not None and row.sequence == end.sequence:  # as a rule, and saves a round trip
                found: ChainedRow | None = end
            else:
                found = self._one(connection, select(self._table).where(self._table.c.sequence == row.sequence))
            self.require(row, found, by=by)

    def _one(self, connection: Connection, query: Select[Any]) -> ChainedRow | None:
        found = connection.execute(query).one_or_none()
        return None if found is None else self._row(found)

    def _known(self) -> Iterator[tuple[str, ChainedRow]]:
        """What rows are held against."""
        if not self.put_back:
            yield from self._everywhere()

    def _everywhere(self) -> Iterator[tuple[str, ChainedRow]]:
        """What this folder knows, and what others have made known where several coordinators see it."""
        if (row := self._folders()) is not None:
            yield str(self.newest), row
        for path, line in () if self._shared is None else self._shared.known():
            yield str(path), ChainedRow.of(line, str(path))

    def _folders(self) -> ChainedRow | None:
        return ChainedRow.of(files.read_private(self.newest), str(self.newest)) if self.newest.exists() else None

    def _moved(self) -> Moved:
        return Moved(f"{self.where}: somebody else has added to it since")


@contextmanager
def _alone_with(path: Path) -> Iterator[None]:
    """Of all processes that compare `path` and write it. Raises StorageError."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.PRIVATE_FILE_MODE)
    except OSError as error:
        raise StorageError(f"{lock} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _text(row: ChainedRow) -> str:
    return row.content.decode("ascii").removesuffix("\n")
