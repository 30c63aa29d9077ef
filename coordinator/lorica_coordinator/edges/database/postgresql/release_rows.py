"""The coordinator's releases as rows of its database: entries of the ledger, closed plans, and which root noise is made
from.

The root itself stays in the folder: it is a key, and whoever has it and the models takes the noise off. Of it the
database has a digest, so that a coordinator elsewhere that makes noise from another root is refused before it makes
any.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError as NotUnique

from lorica_coordinator.edges.database.postgresql.chained_rows import ChainedRow, ChainedRows, Moved
from lorica_coordinator.edges.database.round_tables import closed_plans, release_root
from lorica_security.errors import IntegrityError, StorageError
from lorica_security.privacy.ledger import Entry, read_ledger
from silo_wire.canonical import Digest

R = TypeVar("R")
_ROW = 1


class ReleaseRows:
    """A KeptReleases; `rows` are the ledger's."""

    def __init__(self, rows: ChainedRows) -> None:
        self.rows = rows
        self._newest: ChainedRow | None = None  # that this process knew to be there
        self._closed: frozenset[Digest] = frozenset()

    def entries(self) -> tuple[Entry, ...]:
        """Raises IntegrityError where those are missing that this process or its folder knows: epsilon that was spent
        would be forgotten."""
        known, kept = self._newest, self.rows.kept()  # first: whatever is known by now is found below
        found = list(self.rows.oldest_first())
        entries = read_ledger(b"".join(row.content for row in found), self.rows.where)[0]
        for one, by in ((known, "this process"), (kept, str(self.rows.newest))):
            if one is not None:
                self.rows.require(one, found[one.sequence - 1] if one.sequence <= len(found) else None, by=by)
        if found:
            self._knows(found[-1])
        return entries

    def append(self, entries: Sequence[Entry]) -> None:
        rows = [ChainedRow.of(entry.line(), self.rows.where) for entry in entries]

        def append() -> None:
            try:
                self.rows.append(rows, newest=rows[-1] if rows else None)
            except Moved as error:  # another process's, or this one's whose answer was lost: it is looked at anew
                raise StorageError(f"{error}: nothing is released before the ledger was read again") from error

        self.rows.in_tries(append)
        if rows:
            self._knows(rows[-1])

    def closed(self) -> frozenset[Digest]:
        """Raises IntegrityError where one is missing that this process knows."""
        known = self._closed
        found = self._in_transaction(_closed)
        if lost := sorted(known - found):
            raise IntegrityError(
                f"{closed_plans.name} beside {self.rows.where} has not the plan {lost[0][:16]} any more, which was "
                "closed: rows were deleted; put a newer database back"
            )
        self._closed |= found
        return found

    def close(self, plans: Iterable[Digest]) -> None:
        listed = set(plans)

        def close(connection: Connection) -> None:
            if fresh := sorted(listed - _closed(connection)):
                connection.execute(insert(closed_plans), [{"plan": plan} for plan in fresh])

        self._in_transaction(close)

    def _knows(self, row: ChainedRow) -> None:
        if self._newest is None or self._newest.sequence < row.sequence:
            self._newest = row

    def has_root(self) -> bool:
        return self._root() is not None or bool(self.rows.last(1))

    def hold_root(self, digest: Digest, path: Path) -> None:
        known = self._root()
        if known is None:
            self._in_transaction(lambda connection: _hold_root(connection, digest))
        elif known != digest:
            raise IntegrityError(
                f"{path} is another root than noise was made from by the coordinator whose releases {self.rows.where} "
                "has: a sum would have two noises, and neither hides it; copy the file from that coordinator's folder"
            )

    def _root(self) -> str | None:
        query = select(release_root.c.digest)
        return self._in_transaction(lambda connection: connection.execute(query).scalar_one_or_none())

    def _in_transaction(self, work: Callable[[Connection], R]) -> R:
        def one() -> R:
            try:
                with self.rows.transaction() as connection:
                    return work(connection)
            except NotUnique as error:
                raise Moved(f"{self.rows.where}: another coordinator writes it") from error

        return self.rows.in_tries(one)


def _closed(connection: Connection) -> frozenset[Digest]:
    return frozenset(Digest(plan) for plan in connection.execute(select(closed_plans.c.plan)).scalars())


def _hold_root(connection: Connection, digest: Digest) -> None:
    connection.execute(insert(release_root).values(id=_ROW, digest=digest))
