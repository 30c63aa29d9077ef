"""A silo's own rounds, by its audit log: what left in the clear, with its numbers; of what left under masks or privacy
that it did, and no number of training."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from lorica.tracking.point import Key, Point, Run, finite, instant
from lorica_security.audit.entry import Entry, Event
from lorica_security.on_disk.reading import read_log
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.service.audited import PLAIN

_LOSSES: Final = re.compile(r"(max|min|first|last) (-?[0-9.e+-]+|nan|inf|-inf)")


class OfSilo:
    """Of the agent whose folder it is, whether that runs or not."""

    def __init__(self, folder: Path) -> None:
        self._folder = SiloFolder(folder)

    def points(self) -> Sequence[Point]:
        """Raises StateError where there is no audit log, IntegrityError for one that is not whole."""
        return tuple(points_of(read_log(self._folder.audit).entries))


def points_of(entries: Sequence[Entry]) -> Iterator[Point]:
    """One for what left in each attempt at a round, as it left first, and one for each part of a round of which nothing
    did."""
    names: dict[str, str] = {}
    in_the_clear: set[str] = set()
    seen: set[Key] = set()

    def new(entry: Entry, what: str, outcome: str, values: Iterable[tuple[str, float]] = ()) -> Iterator[Point]:
        plan = entry.text("plan")
        federation, _, silo = entry.who.removeprefix("spiffe://").partition("/silo/")
        point = Point(
            run=Run(plan=plan, name=names.get(plan, ""), of=f"silo {silo}", federation=federation),
            round=entry.number("round"),
            attempt=entry.number("attempt"),
            what=what,
            outcome=outcome,
            unix_s=instant(float(entry.at)),
            values=finite(dict(values)),
        )
        if point.key not in seen:
            seen.add(point.key)
            yield point

    for entry in entries:
        match entry.event:
            case Event.PLAN_RECEIVED:
                names[entry.text("plan")] = entry.text("name")
            case Event.PLAN_ALLOWED if entry.text("promise") == PLAIN:
                in_the_clear.add(entry.text("plan"))
            case Event.UPDATE_LEAVES | Event.MASKED_UPDATE_LEAVES:
                yield from new(entry, "training", "left", _of_update(entry))
            case Event.SCORES_LEAVE if entry.text("plan") in in_the_clear:
                yield from new(entry, "evaluation", "left", _of_scores(entry))
            case Event.ROUND_ENDED:
                yield from new(entry, entry.text("work"), entry.text("outcome"))


def _of_update(entry: Entry) -> Iterator[tuple[str, float]]:
    yield "bytes", entry.number("bytes")
    if entry.event is not Event.UPDATE_LEAVES or entry.text("covered_by") != PLAIN:
        return
    yield "examples", entry.number("examples")
    yield "optimizer_steps", entry.number("optimizer_steps")
    yield from ((f"loss_{which}", float(loss)) for which, loss in _LOSSES.findall(entry.text("losses")))


def _of_scores(entry: Entry) -> Iterator[tuple[str, float]]:
    examples, executed = entry.number("examples"), entry.number("executed")
    if examples:
        yield "score", entry.number("exact_matches") / examples
    if executed:
        yield "execution_accuracy", entry.number("execution_matches") / executed
    yield "loss_per_token", float(entry.text("loss_per_token"))
