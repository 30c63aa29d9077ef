"""What is tracked: one attempt at a round, or one part of a silo in it, with finite numbers alone."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

LONGEST_NAME: Final = 120
LONGEST_WORDS: Final = 60
MOST_VALUES: Final = 2000
"""Of one point: several of some hundred silos. Its line stays below what JsonLines reads."""
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
        """For people, and as the name of a folder: no two runs have one."""
        whole = "\0".join((self.federation, self.of, self.plan)).encode()
        words = name_of(f"{self.of}-{self.name}").replace("/", "_").replace("..", "_")
        return f"{words[:LONGEST_WORDS]}-{hashlib.sha256(whole).hexdigest()[:16]}"


Key = tuple[str, str, str, int, int, str]


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
        run = self.run
        return run.federation, run.of, run.plan, self.round, self.attempt, self.what


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
    """A name of a value that every tool takes: what others chose is cut, and nothing of it leads up or stands empty
    between separators."""
    parts = [part for part in _OTHERS.sub("_", text)[:LONGEST_NAME].split("/") if part.strip("._ ")]
    return "/".join(parts).strip("._/ ") or "_"


def words_of(text: str) -> str:
    """What others chose to be read by people, cut."""
    return text[:LONGEST_NAME]


def instant(unix_s: float) -> float:
    """An instant that has a date; 0 for any other."""
    return unix_s if 0 <= unix_s < _YEAR_10000 else 0.0


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Without what is no number, where a curve has a gap; and no more than MOST_VALUES."""
    kept = ((name_of(name), float(value)) for name, value in values.items() if math.isfinite(value))
    return dict(islice(kept, MOST_VALUES))
