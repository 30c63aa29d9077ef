"""The rounds of every plan, read once: what is settled is kept as it is shown, and only the newest rounds are read
again.

The records of a plan grow by a round at a time, and nothing of an older round changes but that `coordinator gc`
deletes what single silos brought to it. Before anything that was kept is shown, their number in the records is held
against the one that was read: what was deleted is shown no more.
"""

from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Final, Protocol

from lorica_coordinator.edges.status_page.curves import Point, point_json, point_of, silos_json, with_silos_of
from lorica_coordinator.edges.status_page.estimate import Opening
from lorica_coordinator.edges.status_page.rounds_log import Attempt, RoundLine, round_line
from lorica_coordinator.service.callers.lookers import RecordedPlan
from lorica_coordinator.service.records import COMPLETED, RoundRow
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest

MOST_PLANS: Final = 12
"""The newest ones; those before them are counted."""
ROUNDS_LISTED: Final = 8
"""Rounds that are read each time, and listed with their silos."""
ATTEMPTS_LISTED: Final = 4
"""Of each round, its first one and the newest: it may be tried without end."""
MOST_LINES: Final = 2000
SLICE: Final = 25
"""Rounds that are read at a time: the thread that reads them also writes every transition."""


class Records(Protocol):
    """What the page asks of the service about plans."""

    async def recorded_plans(self) -> tuple[RecordedPlan, ...]: ...

    async def rounds_of(
        self, plan: Digest, *, since: int = 0, until: int | None = None, attempts: int = 0
    ) -> tuple[RoundRow, ...]: ...

    async def newest_round_of(self, plan: Digest) -> int | None: ...

    async def details_of(self, plan: Digest, *, through: int) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHistory:
    """A plan with its rounds, oldest first. `read` False: they have not been read yet, and nothing of them is here.

    `pieces` and `curves` are the JSON of `points` and of what silos brought, a piece each round; `silos` names the
    columns of `curves`. `newest` are the last attempts, with their silos. `version` is another one when any of this is.
    """

    plan: RecordedPlan
    read: bool
    points: tuple[Point, ...] = ()
    pieces: tuple[str, ...] = ()
    lines: tuple[RoundLine, ...] = ()
    openings: tuple[Opening, ...] = ()
    silos: tuple[SiloName, ...] = ()
    curves: tuple[str, ...] = ()
    newest: tuple[RoundRow, ...] = ()
    version: str = ""


@dataclass(slots=True)
class _Book:
    """Of the rounds of one plan up to `through`, which are settled."""

    single: bool
    through: int = -1
    details: int = 0
    points: list[Point] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    lines: list[RoundLine] = field(default_factory=list)
    openings: list[Opening] = field(default_factory=list)
    silos: tuple[SiloName, ...] = ()
    curves: list[str] = field(default_factory=list)
    last: Attempt | None = None

    def add(self, row: RoundRow) -> None:
        self.lines.append(round_line(row, single=self.single, after=self.last))
        self.last = row.round, row.attempt
        del self.lines[:-MOST_LINES]
        done = row.closed_unix_s if row.outcome in COMPLETED else None
        if self.openings and self.openings[-1].round == row.round:
            first = self.openings.pop().opened_unix_s
        else:
            first = row.opened_unix_s
        self.openings.append(Opening(round=row.round, opened_unix_s=first, done_unix_s=done))
        if (point := point_of(row)) is None:
            return
        self.points.append(point)
        self.pieces.append(point_json(point))
        if self.single:
            self.silos = with_silos_of(self.silos, row)
            self.curves.append(silos_json(row, self.silos))

    def copy(self) -> "_Book":
        return replace(
            self,
            points=[*self.points],
            pieces=[*self.pieces],
            lines=[*self.lines],
            openings=[*self.openings],
            curves=[*self.curves],
        )


class Histories:
    """`look` at all plans; of the earlier ones one is read at each look, so that none takes long."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._books: dict[Digest, _Book] = {}
        self._left_out = 0

    @property
    def left_out(self) -> int:
        """Plans before those of the last look."""
        return self._left_out

    async def look(self) -> tuple[PlanHistory, ...]:
        """The newest MOST_PLANS plans, the present one last. Raises StorageError."""
        plans = await self._records.recorded_plans()
        shown = plans[-MOST_PLANS:]
        self._left_out = len(plans) - len(shown)
        self._books = {plan.digest: book for plan in shown if (book := self._books.get(plan.digest)) is not None}
        histories, may_read = [], True
        for plan in reversed(shown):
            if plan.present:
                histories.append(await self.of(plan))
                continue
            book = self._books.get(plan.digest)
            if book is not None and await self._is_whole(plan, book):
                histories.append(_history(plan, book, ()))
            elif await self._records.newest_round_of(plan.digest) is None:  # begun, and replaced before a round
                histories.append(PlanHistory(plan=plan, read=True))
            elif may_read:
                histories.append(await self.of(plan))
                may_read = False
            else:
                histories.append(PlanHistory(plan=plan, read=False))
        return tuple(reversed(histories))

    async def of(self, plan: RecordedPlan) -> PlanHistory:
        """One plan as its records are now."""
        newest = await self._records.newest_round_of(plan.digest)
        if newest is None:
            return PlanHistory(plan=plan, read=True)
        through = max(-1, newest - ROUNDS_LISTED) if plan.present else newest
        book = await self._settled(plan, through)
        rows: tuple[RoundRow, ...] = ()
        if plan.present:
            rows = await self._records.rounds_of(plan.digest, since=through + 1, attempts=ATTEMPTS_LISTED)
        return _history(plan, book, rows)

    async def _settled(self, plan: RecordedPlan, through: int) -> _Book:
        book = self._books.get(plan.digest)
        if (
            book is None
            or book.single != plan.shows_single_silos
            or book.through > through
            or await self._records.details_of(plan.digest, through=book.through) != book.details
        ):
            book = _Book(plan.shows_single_silos)
        if book.through < through:
            # Counted before they are read: what is deleted in between is missed at the next look, not shown.
            details = await self._records.details_of(plan.digest, through=through)
            book = book.copy()  # one that fails in the middle leaves the one before
            while book.through < through:
                until = min(through, book.through + SLICE)
                for row in await self._records.rounds_of(
                    plan.digest, since=book.through + 1, until=until, attempts=ATTEMPTS_LISTED
                ):
                    book.add(row)
                book.through = until
            book.details = details
        self._books[plan.digest] = book
        return book

    async def _is_whole(self, plan: RecordedPlan, book: _Book) -> bool:
        """Whether all of an earlier plan was read, as its terms show it."""
        return book.single == plan.shows_single_silos and book.through == await self._records.newest_round_of(
            plan.digest
        )


def _history(plan: RecordedPlan, settled: _Book, newest: tuple[RoundRow, ...]) -> PlanHistory:
    book = settled.copy()
    for row in newest:
        book.add(row)
    fresh = len(newest)
    changing = (*book.pieces[-fresh - 1 :], *book.curves[-fresh - 1 :], *book.silos)
    version = sha256("\n".join((f"{len(book.pieces)} {settled.details if settled.single else 0}", *changing)).encode())
    return PlanHistory(
        plan=plan,
        read=True,
        points=tuple(book.points),
        pieces=tuple(book.pieces),
        lines=tuple(book.lines),
        openings=tuple(book.openings),
        silos=book.silos,
        curves=tuple(book.curves),
        newest=newest,
        version=version.hexdigest()[:16],
    )
