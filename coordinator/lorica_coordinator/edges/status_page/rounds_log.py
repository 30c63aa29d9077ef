"""What happened in each round, in words: when it began and ended, what came of it, and who took part.

Of a plan whose terms show no single silo a silo has its outcome and why, as `coordinator rounds` says them to viewers,
and no figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lorica_coordinator.edges.status_page.curves import score_of
from lorica_coordinator.edges.status_page.runbook import ROUND_WARNINGS
from lorica_coordinator.edges.status_page.words import figure, iso, percent, span
from lorica_coordinator.service.records import RoundRow, SiloRow

PARTS_LISTED: Final = 120
"""Lines of single silos that the page has room for; those of older rounds are on pages of their own."""

Attempt = tuple[int, int]
"""Its round and its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """`anchor`: of the runbook's section about it, "" where it has none."""

    words: str
    anchor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLine:
    """`silos`: how many of those that were asked to train brought an update, "" where nobody was asked, or the records
    have deleted who. `opened` in ISO 8601; `took` "" while the attempt runs, or where a clock was set back
    meanwhile."""

    id: str
    round: int
    number: str
    outcome: str
    silos: str
    macro: str
    micro: str
    opened: str
    took: str
    model: str
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloPart:
    """One silo's part of an attempt; figures are "" where there are none, or none may be shown."""

    silo: str
    outcome: str
    detail: str
    examples: str = ""
    loss: str = ""
    reduction: str = ""
    weight: str = ""
    share: str = ""
    score: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEntry:
    """A line that unfolds. `parts` is None where its silos are on a page of their own."""

    line: RoundLine
    parts: tuple[SiloPart, ...] | None


def round_line(row: RoundRow, *, single: bool, after: Attempt | None) -> RoundLine:
    """`after` is the attempt that is listed before it, None where there is none: a note says what lies between."""
    asked = [silo for silo in row.silos if silo.outcome != "evaluated"]  # the others told a score alone
    committed = sum(silo.outcome == "committed" for silo in asked)
    took = None if row.closed_unix_s is None else row.closed_unix_s - row.opened_unix_s
    return RoundLine(
        id=f"round-{row.round}-{row.attempt}",
        round=row.round,
        number=f"{row.round}.{row.attempt}",
        outcome=row.outcome,
        silos=f"{committed} of {len(asked)}" if asked else "",
        macro=percent(row.macro_exact_match),
        micro=percent(row.micro_exact_match),
        opened=iso(row.opened_unix_s),
        took="" if took is None or took < 0 else span(took),
        model=row.model[:16],
        notes=(*_notes(row, single=single), *_between(after, row)),
    )


def round_entries(rows: Sequence[RoundRow], *, single: bool) -> tuple[RoundEntry, ...]:
    """`rows` newest first, each with its silos."""
    return tuple(
        RoundEntry(line=line, parts=tuple(_part(silo, single=single) for silo in _by_name(row)))
        for row, line in zip(rows, _lines(rows, single=single), strict=True)
    )


def listed_entries(rows: Sequence[RoundRow], *, single: bool) -> tuple[RoundEntry, ...]:
    """`rows` newest first, each with its silos as long as all of them together are no more than PARTS_LISTED; the
    newest one always."""
    entries: list[RoundEntry] = []
    room = PARTS_LISTED
    for row, line in zip(rows, _lines(rows, single=single), strict=True):
        room -= len(row.silos)
        shown = not entries or room >= 0
        parts = tuple(_part(silo, single=single) for silo in _by_name(row)) if shown else None
        entries.append(RoundEntry(line=line, parts=parts))
    return tuple(entries)


def _by_name(row: RoundRow) -> list[SiloRow]:
    return sorted(row.silos, key=lambda silo: silo.silo)


def _lines(rows: Sequence[RoundRow], *, single: bool) -> list[RoundLine]:
    """`rows` newest first."""
    before = [*((row.round, row.attempt) for row in rows[1:]), None]
    return [round_line(row, single=single, after=after) for row, after in zip(rows, before, strict=False)]


def _notes(row: RoundRow, *, single: bool) -> list[Note]:
    notes = [Note(words=row.detail, anchor=ROUND_WARNINGS.get(row.outcome, ""))] if row.detail else []
    if single:
        notes += [
            Note(words=f"{silo} weighs nothing: its loss did not fall", anchor=ROUND_WARNINGS["weighs nothing"])
            for silo in row.without_weight
        ]
    if row.weight_fallback:
        notes.append(Note(words="all weights were zero, sizes stood in", anchor=ROUND_WARNINGS["zero_weight"]))
    if row.masked is not None and row.masked.saturated:
        words = f"{row.masked.saturated} of {row.masked.coordinates} coordinates beyond their range"
        notes.append(Note(words=words))
    return notes


def _between(before: Attempt | None, row: RoundRow) -> list[Note]:
    """Attempts at the same round that are not listed."""
    left_out = row.attempt - before[1] - 1 if before is not None and before[0] == row.round else 0
    return [Note(words=f"attempts before it that are not listed: {left_out}")] if left_out else []


def _part(silo: SiloRow, *, single: bool) -> SiloPart:
    if not single:
        return SiloPart(silo=silo.silo, outcome=silo.outcome, detail=silo.detail)
    trained = bool(silo.examples)
    return SiloPart(
        silo=silo.silo,
        outcome=silo.outcome,
        detail=silo.detail,
        examples=str(silo.examples) if trained else "",
        loss=f"{figure(silo.loss_max)} to {figure(silo.loss_min)}" if trained else "",
        reduction=figure(silo.loss_reduction) if trained else "",
        weight=figure(silo.weight) if silo.weight else "",
        share=percent(silo.share) if silo.weight else "",
        score=percent(score_of(silo)),
    )
