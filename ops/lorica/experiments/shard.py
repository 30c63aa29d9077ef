"""A part of a study's runs: that of one job of a Slurm array, or of one index of a Kubernetes Indexed Job.

Shards of a study share a folder. Each takes every n-th run, and appends to a file of results of its own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from lorica_security.errors import ConfigurationError

MOST: Final = 10_000
_FORM: Final = re.compile(r"([1-9][0-9]{0,4})/([1-9][0-9]{0,4})")

_One = TypeVar("_One")


@dataclass(frozen=True, slots=True)
class Shard:
    """The `number`-th of so many, counted from 1."""

    number: int
    of: int

    @classmethod
    def from_text(cls, text: str) -> "Shard":
        """`3/16`; raises ConfigurationError."""
        found = _FORM.fullmatch(text)
        shard = None if found is None else cls(*map(int, found.groups()))
        if shard is None or not shard.number <= shard.of <= MOST:
            raise ConfigurationError(f"--shard {text[:40]!r} is no I/N with I from 1 to N, N at most {MOST}: 3/16, say")
        return shard

    @property
    def suffix(self) -> str:
        """Of the names of files that this shard has to itself; a study that is not divided has their plain names."""
        return "" if self.of == 1 else f"-{self.number}"

    def of_all(self, runs: Sequence[_One]) -> list[_One]:
        """Those of `runs` that are this shard's. Each is of one shard, and shards have as many but for one."""
        return list(runs[self.number - 1 :: self.of])


WHOLE: Final = Shard(1, 1)
"""A study that is not divided."""
