"""The rounds of every plan, read once: what is settled is kept as it is shown, and only the newest rounds are read
again.

The records of a plan grow by a round at a time, and nothing of an older round changes but that `coordinator gc`
deletes what single silos brought to it. The records count these deletions: before anything that was kept is shown, the
count is held against the one of when it was read, so that what was deleted is shown no more.

What a look does in the event loop does not grow with the rounds of a plan: what is kept grows at its end, a look has
its length, and rounds become numbers and words in a thread.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, Protocol

from lorica_coordinator.edges.status_page.curves import Pieces, Point, point_json, point_of, silos_json, with_silos_of
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
MOST_OPENINGS: Final = 64
"""The newest ones, which are more than an estimate goes by."""
SLICE: Final = 25
"""Rounds that are read at a time: the thread that reads them also writes every transition."""
ROUNDS_AT_A_LOOK: Final = 500
"""Settled ones of all plans together: whoever looks waits for them, and everybody who looks meanwhile."""


class Records(Protocol):
    """What the page asks of the service about plans."""

    async def recorded_plans(self) -> tuple[RecordedPlan, ...]: ...

    async def rounds_of(
        self, plan: Digest, *, since: int = 0, until: int | None = None, attempts: int = 0
    ) -> tuple[RoundRow, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`done` is the newest round that gave figures, 0 for none; `newest` and `best` are points with a MicroAvg."""

    done: int = 0
    newest: Point | None = None
    best: Point | None = None

    def with_point(self, point: Point) -> "Summary":
        done = max(self.done, point.round)
        if point.micro is None:
            return Summary(done=done, newest=self.newest, best=self.best)
        beaten = self.best is None or self.best.micro is None or point.micro > self.best.micro
        return Summary(done=done, newest=point, best=point if beaten else self.best)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHistory:
    """A plan with its rounds, oldest first. `read` False: some before the newest have not been read yet, and are not
    here.

    `pieces` and `curves` are the JSON of points and of what silos brought, a piece each round; `silos` names the
    columns of `curves`. `newest` are the last attempts, with their silos. `version` is another one when any of this is.
    """

    plan: RecordedPlan
    read: bool
    summary: Summary = field(default_factory=Summary)
    pieces: Pieces = field(default_factory=Pieces)
    lines: tuple[RoundLine, ...] = ()
    openings: tuple[Opening, ...] = ()
    silos: tuple[SiloName, ...] = ()
    curves: Pieces = field(default_factory=Pieces)
    newest: tuple[RoundRow, ...] = ()
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What rounds come to, as they are shown, behind those before them."""

    summary: Summary
    silos: tuple[SiloName, ...]
    last: Attempt | None
    lines: tuple[RoundLine, ...]
    openings: tuple[Opening, ...]
    pieces: tuple[str, ...]
    curves: tuple[str, ...]


@dataclass(slots=True)
class _Book:
    """Of the rounds of one plan up to `through`, which are settled; of when the plan had as many `deletions`. `pieces`
    and `curves` only grow."""

    single: bool
    deletions: int = 0
    through: int = -1
    summary: Summary = field(default_factory=Summary)
    silos: tuple[SiloName, ...] = ()
    last: Attempt | None = None
    lines: tuple[RoundLine, ...] = ()
    openings: tuple[Opening, ...] = ()
    pieces: list[str] = field(default_factory=list)
    curves: list[str] = field(default_factory=list)

    def shown(self, rows: Sequence[RoundRow]) -> _Shown:
        """`rows`, which come next; nothing is changed, so that it can be made in a thread."""
        summary, silos, last, openings = self.summary, self.silos, self.last, [*self.openings]
        lines, pieces, curves = list[RoundLine](), list[str](), list[str]()
        for row in rows:
            lines.append(round_line(row, single=self.single, after=last))
            last = row.round, row.attempt
            again = openings[-1:] and openings[-1].round == row.round
            first = openings.pop().opened_unix_s if again else row.opened_unix_s
            done = row.closed_unix_s if row.outcome in COMPLETED else None
            openings.append(Opening(round=row.round, opened_unix_s=first, done_unix_s=done))
            if (point := point_of(row)) is None:
                continue
            summary = summary.with_point(point)
            pieces.append(point_json(point))
            if self.single:
                silos = with_silos_of(silos, row)
                curves.append(silos_json(row, silos))
        return _Shown(
            summary=summary,
            silos=silos,
            last=last,
            lines=(*self.lines, *lines)[-MOST_LINES:],
            openings=tuple(openings[-MOST_OPENINGS:]),
            pieces=tuple(pieces),
            curves=tuple(curves),
        )

    def settle(self, shown: _Shown, *, through: int) -> None:
        self.summary, self.silos, self.last = shown.summary, shown.silos, shown.last
        self.lines, self.openings = shown.lines, shown.openings
        self.pieces.extend(shown.pieces)
        self.curves.extend(shown.curves)
        self.through = through


class _Budget:
    def __init__(self) -> None:
        self.left = ROUNDS_AT_A_LOOK


class Histories:
    """`look` at all plans, or at one; no look reads more than ROUNDS_AT_A_LOOK settled rounds, the next one goes on."""

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
        budget = _Budget()
        return tuple([await self._of(plan, budget) for plan in reversed(shown)][::-1])

    async def of(self, plan: RecordedPlan) -> PlanHistory:
        """One plan, with its rounds as they are now; raises StorageError."""
        return await self._of(plan, _Budget())

    async def _of(self, plan: RecordedPlan, budget: _Budget) -> PlanHistory:
        newest = plan.newest_round
        if newest is None:  # begun, and perhaps replaced before a round
            return PlanHistory(plan=plan, read=True)
        through = max(-1, newest - ROUNDS_LISTED) if plan.present else newest
        book = await self._settled(plan, through, budget)
        rows: tuple[RoundRow, ...] = ()
        if plan.present:
            rows = await self._records.rounds_of(plan.digest, since=through + 1, attempts=ATTEMPTS_LISTED)
        return await asyncio.to_thread(_history, plan, book, rows, read=book.through == through)

    async def _settled(self, plan: RecordedPlan, through: int, budget: _Budget) -> _Book:
        """Its book, further than before if there is something to read; perhaps not as far as `through`."""
        book = self._books.get(plan.digest)
        if (
            book is None
            or book.single != plan.shows_single_silos
            or book.deletions != plan.deletions
            or book.through > through
        ):
            # The deletions were counted before anything is read: those in between are missed at the next look.
            book = _Book(single=plan.shows_single_silos, deletions=plan.deletions)
        self._books[plan.digest] = book
        while book.through < through and budget.left > 0:
            until = min(through, book.through + min(SLICE, budget.left))
            rows = await self._records.rounds_of(
                plan.digest, since=book.through + 1, until=until, attempts=ATTEMPTS_LISTED
            )
            shown = await asyncio.to_thread(book.shown, rows)
            budget.left -= until - book.through
            book.settle(shown, through=until)
        return book


def _history(plan: RecordedPlan, book: _Book, newest: tuple[RoundRow, ...], *, read: bool) -> PlanHistory:
    fresh = book.shown(newest)
    said = f"{book.single} {book.deletions} {book.through} {len(book.pieces)} {read}"
    changing = (said, *fresh.pieces, *fresh.curves, *fresh.silos)
    return PlanHistory(
        plan=plan,
        read=read,
        summary=fresh.summary,
        pieces=Pieces(book.pieces, len(book.pieces), fresh.pieces),
        lines=fresh.lines,
        openings=fresh.openings,
        silos=fresh.silos,
        curves=Pieces(book.curves, len(book.curves), fresh.curves),
        newest=newest,
        version=sha256("\n".join(changing).encode()).hexdigest()[:16],
    )
