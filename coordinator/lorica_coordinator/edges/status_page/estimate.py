"""How long a plan still takes, by how long its last rounds took. An estimate: no promise, and no deadline."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

RECENT: Final = 5
"""Rounds that count: those before may have had other silos, or another machine."""
LONGEST_S: Final = 10 * 365 * 86_400.0
_AT_WORK: Final = ("gathering", "collecting", "masking", "aggregating", "evaluating")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The first attempt at a round: when it was opened, and when the round came to a model, in Unix seconds of the
    coordinator's clock. That clock may be set at any time, so that the differences may be anything."""

    round: int
    opened_unix_s: float
    done_unix_s: float | None


def seconds_left(openings: Sequence[Opening], *, phase: str, rounds: int, now: float) -> float | None:
    """About how long until the last round is over; None where nothing runs, or no round was done yet.

    `openings` in order of rounds. A round lasts until the next one opens, which counts evaluation, gathering and
    attempts that were repeated; the newest one until its model. The median of RECENT of them leaves out a pause, and a
    clock that was set.
    """
    if phase not in _AT_WORK:
        return None
    real = [opening for opening in openings if opening.round > 0]
    lengths = [length for before, after in _pairs(real) if 0.0 < (length := _length(before, after)) <= LONGEST_S]
    if not lengths:
        return None
    typical = median(lengths[-RECENT:])
    newest = real[-1]
    if newest.done_unix_s is not None:
        return typical * max(0, rounds - newest.round)
    running = min(typical, max(0.0, now - newest.opened_unix_s))
    return max(0.0, typical * (rounds - newest.round + 1) - running)


def _pairs(openings: Sequence[Opening]) -> list[tuple[Opening, Opening | None]]:
    return list(zip(openings, [*openings[1:], None], strict=False))  # without any there is no last one


def _length(opening: Opening, after: Opening | None) -> float:
    """0 where it is not known."""
    end = after.opened_unix_s if after is not None else opening.done_unix_s
    return 0.0 if end is None else end - opening.opened_unix_s
