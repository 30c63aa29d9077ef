"""How much one silo trains beside another: learning rate x optimizer steps, for the same number of examples.

With |D| examples a silo makes epochs x ceil(|D| / (batch_size x gradient_accumulation)) optimizer steps, or as many as
the plan's `steps` says, whatever it has: such settings differ in their rates alone. Which |D| a silo has is not known,
so two settings are compared at the worst one. For effective batches b < b' it is |D| = b', where the first makes
ceil(b' / b) steps an epoch and the other one: ceil((k + 1) b' / b) <= (k + 1) ceil(b' / b).

A silo moves by its rate x steps at most, by its rate x the root of the steps where they cancel, and by something
between under a schedule that falls. So the ratio of two settings is the larger of two: that of the rates, and that of
rate x steps.

Rates are compared as the decimal numbers that people wrote: 3e-3 is three times 1e-3, not a rounding more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Protocol

MOST_WORK_RATIO: Final = 4.0
"""No silo allows more under masks."""
MOST_SETTINGS: Final = 256
"""Different ones that are compared, each with each."""
COMMON: Final = "[training]"
"""The plan's common values, among those that are compared."""


class WorkSettings(Protocol):
    """`TrainingSection`, for one silo."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def epochs(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def gradient_accumulation(self) -> int: ...


def _steps_of_an_epoch(examples: int, settings: WorkSettings) -> int:
    """It ends with a smaller effective batch where some are left."""
    return -(-examples // (settings.batch_size * settings.gradient_accumulation))


def optimizer_steps(examples: int, settings: WorkSettings) -> int:
    """Of a round's training on `examples` examples."""
    return settings.steps or settings.epochs * _steps_of_an_epoch(examples, settings)


def epochs_begun(examples: int, settings: WorkSettings) -> int:
    """How many times a round's training begins to go over its `examples` examples, of which there is one at least."""
    return -(-settings.steps // _steps_of_an_epoch(examples, settings)) if settings.steps else settings.epochs


@dataclass(frozen=True, slots=True)
class Work:
    """`batch` is the examples of one optimizer step. A number of steps that is the same for all silos counts as so many
    epochs of one."""

    rate: Fraction
    epochs: int
    batch: int

    @classmethod
    def of(cls, settings: WorkSettings) -> "Work":
        if settings.steps:
            return cls(rate=Fraction(repr(settings.learning_rate)), epochs=settings.steps, batch=1)
        return cls(
            rate=Fraction(repr(settings.learning_rate)),
            epochs=settings.epochs,
            batch=settings.batch_size * settings.gradient_accumulation,
        )

    def over(self, other: "Work") -> Fraction:
        """The most that this one is beside `other`, for equal data of any size."""
        return self.rate / other.rate * max(Fraction(1), self._steps_over(other))

    def times(self, other: "Work") -> tuple[Fraction, Fraction]:
        """The least and the most that rate x steps of this one are of the other's, over equal data of any size."""
        rate = self.rate / other.rate
        return rate / other._steps_over(self), rate * self._steps_over(other)

    def _steps_over(self, other: "Work") -> Fraction:
        return Fraction(self.epochs, other.epochs) * max(1, -(-other.batch // self.batch))

    def ratio_to(self, other: "Work") -> Fraction:
        """How far the two are apart, whichever is more; at least 1, which is the very same work."""
        return max(self.over(other), other.over(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class WidestGap:
    """The two whose work is furthest apart, and how far; the names are in no order."""

    ratio: Fraction
    first: str
    second: str


def widest_gap(works: Mapping[str, Work]) -> WidestGap | None:
    """Over every pair of `works`, by name of whom each is; None where they are more different ones than can be
    compared."""
    different: dict[Work, str] = {}
    for name, work in works.items():
        different.setdefault(work, name)
    if len(different) > MOST_SETTINGS:
        return None
    named = list(different.items())
    widest = WidestGap(ratio=Fraction(1), first=named[0][1], second=named[0][1])
    for index, (one, name) in enumerate(named):
        for other, other_name in named[index + 1 :]:
            if (ratio := one.ratio_to(other)) > widest.ratio:
                widest = WidestGap(ratio=ratio, first=name, second=other_name)
    return widest
