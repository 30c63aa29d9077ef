"""The coordinator's releases as rows of its database: entries of the ledger, closed plans, and the root that noise is
made from, sealed (sealing/root_seal.py): a coordinator elsewhere makes the same noise for the same sum."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError as NotUnique

from lorica_coordinator.edges.database.postgresql.chained_rows import ChainedRow, ChainedRows, Moved
from lorica_coordinator.edges.database.round_tables import closed_plans, release_root
from lorica_coordinator.edges.database.sealing.root_seal import RootSeal
from lorica_security.errors import IntegrityError, StorageError
from lorica_security.privacy.ledger import Entry, read_ledger
from silo_wire.canonical import Digest

R = TypeVar("R")
_ROW = 1


class ReleaseRows:
    """A KeptReleases; `rows` are the ledger's."""

    def __init__(self, rows: ChainedRows, seal: RootSeal) -> None:
        self.rows, self._seal = rows, seal
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
        for plan in {entry.plan for entry in entries}:
            self.rows.mark(plan)  # before: a database that is put back does not tell of it

        def append() -> None:
            try:
                self.rows.append(rows, newest=rows[-1] if rows else None)
            except Moved as error:  # another process's, or this one's whose answer was lost: it is looked at anew
                raise StorageError(f"{error}: nothing is released before the ledger was read again") from error

        self.rows.in_tries(append)
        if rows:
            self._knows(rows[-1])
            self.entries()  # a database that swallows a row, or takes it out again as it is committed, releases nothing

    def marked(self) -> frozenset[Digest]:
        """The plans that sums were released of, as folders outside the database know it."""
        return frozenset(map(Digest, self.rows.marks()))

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
        self._closed |= listed  # whatever the database made of it

    def _knows(self, row: ChainedRow) -> None:
        if self._newest is None or self._newest.sequence < row.sequence:
            self._newest = row

    def began(self) -> bool:
        """Raises as `entries`: a ledger that is taken out for as long as this asks makes no new root."""
        return bool(self.entries())

    def root(self) -> bytes | None:
        query = select(release_root.c.sealed)
        sealed = self._in_transaction(lambda connection: connection.execute(query).scalar_one_or_none())
        return None if sealed is None else self._seal.open(bytes(sealed), f"{self.rows.where}: release_root")

    def keep_root(self, root: bytes) -> None:
        def keep(connection: Connection) -> None:
            if connection.execute(select(release_root.c.id)).first() is None:
                connection.execute(insert(release_root).values(id=_ROW, sealed=self._seal.seal(root)))

        self._in_transaction(keep)

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
