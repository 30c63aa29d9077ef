"""What is tracked: one attempt at a round, or one part of a silo in it, with finite numbers alone."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

LONGEST_NAME: Final = 120
_YEAR_10000: Final = 253_402_300_800
_OTHERS: Final = re.compile(r"[^A-Za-z0-9_./-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One plan, as the coordinator or one silo saw it."""

    plan: str
    """Digest, hexadecimal."""
    name: str
    of: str
    """`coordinator`, or `silo NAME`."""
    federation: str

    @property
    def title(self) -> str:
        """For people, and as the name of a folder."""
        return name_of(f"{self.of}-{self.name}-{self.plan[:12]}").replace("/", "_").replace("..", "_")


Key = tuple[str, int, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """`what` is round, or at a silo training and evaluation; `unix_s` when it ended."""

    run: Run
    round: int
    attempt: int
    what: str
    outcome: str
    unix_s: float
    values: Mapping[str, float]

    @property
    def key(self) -> Key:
        """The same for the same point, whoever reads it again."""
        return self.run.plan, self.round, self.attempt, self.what


class Source(Protocol):
    """Where points come from; all that there are, oldest first, at each call."""

    def points(self) -> Sequence[Point]:
        """Raises Unreachable where nobody answers now."""
        ...


class Sink(Protocol):
    """Where points go; a point that is there already is passed over."""

    @property
    def where(self) -> str:
        """For people."""
        ...

    def take(self, points: Sequence[Point]) -> int:
        """How many were new. Raises LoricaError, and goes on at the next call with what is missing."""
        ...


def name_of(text: str) -> str:
    """A name of a value that every tool takes: what others chose is cut, and no separator of theirs stays."""
    return _OTHERS.sub("_", text)[:LONGEST_NAME].strip("._/ ") or "_"


def instant(unix_s: float) -> float:
    """An instant that has a date; 0 for any other."""
    return unix_s if 0 <= unix_s < _YEAR_10000 else 0.0


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Without what is no number: a curve has a gap there."""
    return {name_of(name): float(value) for name, value in values.items() if math.isfinite(value)}
