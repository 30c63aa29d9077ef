"""The robust reducers that a plan may name: what each assumes of hostile silos, and how many silos it needs.

A robust reducer looks at single deltas and bounds what hostile silos do to the mean, whatever these send. It believes
nothing that a silo tells of itself, so every silo counts the same. How each computes is the coordinator's
(coordinator/lorica_coordinator/edges/sums/reducers), where its source is cited.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Final, Literal, Protocol

MEAN: Final = "mean"
"""The weighted mean: no robust reducer."""


class RobustSettings(Protocol):
    """`[aggregation]` of a plan, as far as a robust reducer looks at it."""

    @property
    def trimmed_share(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustRule:
    """`key`, where there is one, is the key of `[aggregation]` that only this rule reads, and `key_is` what it says.

    `least_silos` is the quorum below which the rule holds nothing off. `withstood` says in words what hostile silos
    cannot do, in a round of so many silos.
    """

    name: str
    meaning: str
    key: str | None = None
    key_is: str = ""
    least_silos: Callable[[RobustSettings], int]
    why_so_many: str
    withstood: Callable[[RobustSettings, int], str]


def trimmed_silos(share: float, silos: int) -> int:
    """How many a trimmed mean leaves out on each side: share x silos, rounded down, of the decimal number that people
    wrote."""
    return int(Fraction(str(share)) * silos)


def median_trims(silos: int) -> int:
    """The same for the median: all but the middle one, or the middle two."""
    return (silos - 1) // 2


def _within(hostile: int) -> str:
    return f"up to {hostile} hostile silos leave each parameter's change within what honest silos sent"


TRIMMED_MEAN: Final = RobustRule(
    name="trimmed_mean",
    meaning="of each parameter the mean without trimmed_share of the silos at either end",
    key="trimmed_share",
    key_is="the share of silos left out on each side, above 0 and below 0.5",
    least_silos=lambda settings: ceil(1 / Fraction(str(settings.trimmed_share))),
    why_so_many="with fewer it leaves out nobody",
    withstood=lambda settings, silos: _within(trimmed_silos(settings.trimmed_share, silos)),
)

MEDIAN: Final = RobustRule(
    name="median",
    meaning="of each parameter the median",
    least_silos=lambda settings: 3,
    why_so_many="the median of fewer is their mean",
    withstood=lambda settings, silos: _within(median_trims(silos)),
)

ROBUST_RULES: Final = (TRIMMED_MEAN, MEDIAN)

_BY_NAME: Final = {rule.name: rule for rule in ROBUST_RULES}

if TYPE_CHECKING:
    ReducerName = str
else:
    ReducerName = Literal[(MEAN, *_BY_NAME)]
    """The type of a plan's key: pydantic takes these words and no others."""


def robust_rule(name: ReducerName) -> RobustRule | None:
    """None for the mean."""
    return _BY_NAME.get(name)
