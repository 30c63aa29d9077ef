"""What an attack is: what a hostile silo trains on, what it sends instead of its delta, and what it claims of itself.

An attacker is omniscient, as the papers assume: it knows the deltas of all honest silos before it sends its own, and
the rule that will be applied to them. No silo of a real federation does; what is shown is the worst case.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]
"""A delta in each row."""
Row = NDArray[np.float32]
Exact = NDArray[np.float64]
Made = Callable[[Rows], Exact]
"""What the rule makes of the honest deltas and these hostile ones."""
MOST = 1e30
"""Of a coordinate of what is sent: a coordinator refuses what is not finite."""


@dataclass(frozen=True, slots=True)
class Known:
    """What a hostile silo knows: the deltas of honest silos, the one that it trained itself, how many silos are
    hostile, and the rule."""

    honest: Rows
    own: Row
    hostile: int
    made: Made

    @property
    def silos(self) -> int:
        return len(self.honest) + self.hostile

    @property
    def mean(self) -> Exact:
        """Of the honest deltas."""
        exact: Exact = self.honest.mean(axis=0, dtype=np.float64)
        return exact

    @property
    def spread(self) -> Exact:
        """The standard deviation of the honest deltas, parameter by parameter."""
        exact: Exact = self.honest.std(axis=0, dtype=np.float64)
        return exact


@dataclass(frozen=True, slots=True)
class Pair:
    """A question of a silo's training data with its SQL."""

    question: str
    query: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a silo tells of itself, times these factors."""

    examples: float
    losses: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """`delta` makes what is sent, `data` what is trained on, `claims` what is told; None: as an honest silo."""

    name: str
    meaning: str
    source: str
    delta: Callable[[Known], Exact] | None = None
    data: Callable[[Sequence[Pair]], Sequence[Pair]] | None = None
    claims: Claims | None = None


def sent(attack: Attack, known: Known) -> Row:
    """What the silo sends, float32 and finite."""
    if attack.delta is None:
        return known.own
    return np.clip(attack.delta(known), -MOST, MOST).astype(np.float32)
