"""A weighting as a value: a raw weight from what a silo knows of its training, and what a plan must say to use it.

A new one is a file beside this one, a line in named.py and a test. Both sides must agree on it: the coordinator weighs
plain updates, a silo weighs its own before it is masked. Caps and shares are the coordinator's
(coordinator/lorica_coordinator/aggregation/weighting.py); under masks the silo applies the plan's bounds itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from silo_wire.algorithm import Number, Promise

THE_SAME: Final = "the same"
"""Under masks as without them, but for rounding."""


class Told(Protocol):
    """What is known of one silo's training: |D_i|, dL_i and the first loss in natural-log units of the training loss,
    and the steps."""

    @property
    def examples(self) -> int: ...
    @property
    def loss_reduction(self) -> float: ...
    @property
    def loss_first(self) -> float: ...
    @property
    def optimizer_steps(self) -> int: ...


class Override(Protocol):
    """What one silo has differently."""

    @property
    def learning_rate(self) -> float | None: ...


class Training(Protocol):
    """`[training]` of a plan, as far as a weighting looks at it."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def fedprox_mu(self) -> float: ...
    @property
    def steps(self) -> int: ...
    @property
    def loss_reduction(self) -> str: ...
    @property
    def loss_log_steps(self) -> int: ...
    @property
    def overrides(self) -> Mapping[str, Override]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """A key that does not go with the weighting: what it is, what it must be, and why."""

    key: str
    value: str
    needed: str
    why: str


def _of_one_length(cohort: Sequence[Told]) -> float:
    return 1.0


def _no_clash(training: Training) -> Iterator[Clash]:
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """An `Algorithm` whose `raw_weight` is before any cap.

    `only_weight` is what every silo weighs where all weigh the same, which needs no cap. `first_cap` says in words what
    the largest silo's weight is before a round has shown it; `least_usual_cap` is what nearly every silo reaches that
    trains at all, 0 where there is no such number. `length` is what the weighted mean of a cohort is multiplied by; a
    masked sum is not, since the coordinator has no numbers of single silos there. `clashes` names what `[training]`
    must not say.
    """

    name: str
    meaning: str
    needs: frozenset[Number]
    raw_weight: Callable[[Told], float]
    masks: str = THE_SAME
    promises: frozenset[Promise] = frozenset()
    only_weight: float | None = None
    first_cap: str = ""
    least_usual_cap: float = 0.0
    length: Callable[[Sequence[Told]], float] = _of_one_length
    clashes: Callable[[Training], Iterator[Clash]] = _no_clash

    @property
    def passes(self) -> int:
        """None: what it needs is known before a delta is read."""
        return 0
