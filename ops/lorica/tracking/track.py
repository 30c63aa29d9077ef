"""From where rounds are known to the tools that are told of them, once or until somebody ends it.

A tool that does not answer is tried again, and keeps no other from its points; nothing that a round needs waits here.
"""

import time
from collections.abc import Callable, Sequence

from lorica.tracking.point import Point, Sink, Source
from lorica_security.errors import Conflict, LoricaError, Unreachable

Say = Callable[[str], None]


def track_once(source: Source, sinks: Sequence[Sink], say: Say) -> None:
    """Raises what the first sink that fails does, after all have had their turn."""
    points = source.points()
    failed: LoricaError | None = None
    for sink in sinks:
        try:
            say(f"{sink.where}: {_told(sink.take(points))}")
        except LoricaError as error:
            say(f"{sink.where}: {error}")
            failed = failed or error
    if failed is not None:
        raise failed


def track_on(source: Source, sinks: Sequence[Sink], say: Say, *, every_s: float) -> None:
    """Until it is interrupted, or the source cannot be read. What stays wrong at a tool is said once."""
    said: dict[str, str] = {}

    def tell(who: str, line: str) -> None:
        if said.get(who) != line:
            said[who] = line
            say(f"{who}: {line}")

    while True:
        points = _points(source, tell)
        for sink in sinks:
            try:
                new = sink.take(points)
            except LoricaError as error:
                tell(sink.where, f"{error}; trying again")
            else:
                if new:
                    said.pop(sink.where, None)
                    say(f"{sink.where}: {_told(new)}")
        time.sleep(every_s)


def _points(source: Source, tell: Callable[[str, str], None]) -> Sequence[Point]:
    try:
        points = source.points()
    except (Unreachable, Conflict) as error:
        tell("rounds", f"{error}; trying again")
        return ()
    tell("rounds", "read")
    return points


def _told(new: int) -> str:
    return f"{new} new {'point' if new == 1 else 'points'}"
