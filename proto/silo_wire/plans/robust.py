"""The robust reducers that a plan may name: what each assumes of hostile silos, and how many silos it needs.

A robust reducer looks at single deltas and bounds what hostile silos do to the mean, whatever these send. It believes
nothing that a silo tells of itself, so every silo counts the same. How each computes is the coordinator's
(coordinator/lorica_coordinator/edges/sums/reducers), where its source is cited.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, sqrt
from typing import TYPE_CHECKING, Final, Literal, Protocol

MEAN: Final = "mean"
"""The weighted mean: no robust reducer."""
CENTRE: Final = "centre"
"""What centred clipping keeps: the mean of the round before."""


class RobustSettings(Protocol):
    """`[aggregation]` of a plan, as far as a robust reducer looks at it."""

    @property
    def trimmed_share(self) -> float: ...
    @property
    def hostile_silos(self) -> int: ...
    @property
    def clipping_radius(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustRule:
    """`key`, where there is one, is the key of `[aggregation]` that this rule reads, and `key_is` what it says.

    `least_silos` is the quorum below which the rule holds nothing off. `withstood` says in words what hostile silos
    cannot do, in a round of so many silos. `carries` names the vectors that it keeps from round to round. `not_masked`
    is why it does not go with masks.
    """

    name: str
    meaning: str
    key: str | None = None
    key_is: str = ""
    least_silos: Callable[[RobustSettings], int]
    why_so_many: str
    withstood: Callable[[RobustSettings, int], str]
    carries: tuple[str, ...] = ()
    not_masked: str = "which compares single deltas, where masks show their sum alone"


def trimmed_silos(share: float, silos: int) -> int:
    """How many a trimmed mean leaves out on each side: share x silos, rounded down, of the decimal number that people
    wrote."""
    return int(Fraction(str(share)) * silos)


def median_trims(silos: int) -> int:
    """The same for the median: all but the middle one, or the middle two."""
    return (silos - 1) // 2


def krum_reach(hostile: int, silos: int) -> float:
    """How far hostile silos bring Multi-Krum's mean from means of honest deltas, over the longest distance between two
    honest ones: coordinator/lorica_coordinator/edges/sums/reducers/multi_krum.py has the proof."""
    return hostile / (silos - hostile) * sqrt((silos - hostile - 2) / (silos - 2 * hostile - 1))


def mixing_reach(hostile: int, silos: int) -> float:
    """How far hostile silos bring the trimmed mean of mixed deltas from the mean of n - f honest ones, over the root of
    the mean squared distance of these from their mean.

    Allouah et al. 2023: lemma 1 with the trimmed mean's constant of their proposition 2.
    """
    ratio = hostile / (silos - 2 * hostile)
    of_trimmed_mean = 6 * ratio * (1 + ratio)
    return sqrt(8 * hostile / (silos - hostile) * (1 + of_trimmed_mean))


def median_reach(hostile: int, silos: int) -> float:
    """How far hostile silos bring the geometric median from any point, over the distance from there to the farthest
    honest delta.

    Minsker, Geometric median and robust estimation in Banach spaces, Bernoulli 2015, lemma 2.1 for a Hilbert space.
    """
    return (silos - hostile) / sqrt(silos * (silos - 2 * hostile))


def _within(hostile: int) -> str:
    return f"with at most {hostile} of them hostile, each parameter's change stays within what honest ones sent"


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

MULTI_KRUM: Final = RobustRule(
    name="multi_krum",
    meaning="the mean without the hostile_silos deltas that have the farthest neighbours",
    key="hostile_silos",
    key_is="how many silos may be hostile, at least 1",
    least_silos=lambda settings: 2 * settings.hostile_silos + 3,
    why_so_many="so that honest neighbours of a delta outnumber hostile ones",
    withstood=lambda settings, silos: (
        f"with at most {settings.hostile_silos} of them hostile, the mean is at most "
        f"{krum_reach(settings.hostile_silos, silos):.2g} times as far from one of honest deltas as two of these are "
        "apart"
    ),
)

CENTRED_CLIPPING: Final = RobustRule(
    name="centred_clipping",
    meaning="the mean of what is within clipping_radius of the last round's mean",
    key="clipping_radius",
    key_is="the L2 norm that deltas may be from the last round's mean",
    least_silos=lambda settings: 3,
    why_so_many="so that one hostile silo is fewer than half",
    withstood=lambda settings, silos: (
        f"each hostile one moves the mean by an L2 norm of at most {settings.clipping_radius / silos:.3g}"
    ),
    carries=(CENTRE,),
    # Silos could cut their own deltas. What they put into a sum has to be the same function in every round: ADR 26.
    not_masked=(
        "whose centre is another one in each round: were silos to cut their own deltas around it, two sums would show "
        "the delta of one that is cut in one of them alone, where max_delta_norm has silos cut around 0 in every round"
    ),
)

NEAREST_NEIGHBOUR_MIXING: Final = RobustRule(
    name="nearest_neighbour_mixing",
    meaning="the trimmed mean of deltas each of which is mixed with its nearest others first",
    key="hostile_silos",
    key_is="how many silos may be hostile, at least 1",
    least_silos=lambda settings: 2 * settings.hostile_silos + 1,
    why_so_many="so that more than half are honest",
    withstood=lambda settings, silos: (
        f"with at most {settings.hostile_silos} of them hostile, the mean is at most "
        f"{mixing_reach(settings.hostile_silos, silos):.2g} times as far from one of honest deltas as these are from "
        "their mean, as a root of mean squares"
    ),
)

GEOMETRIC_MEDIAN: Final = RobustRule(
    name="geometric_median",
    meaning="the point whose distances from all deltas have the smallest sum",
    least_silos=lambda settings: 3,
    why_so_many="so that one hostile silo is fewer than half",
    withstood=lambda settings, silos: (
        f"with at most {median_trims(silos)} of them hostile, it is at most "
        f"{median_reach(median_trims(silos), silos):.2g} times as far from the mean of honest deltas as the farthest "
        "honest one is"
    ),
)

ROBUST_RULES: Final = (
    TRIMMED_MEAN,
    MEDIAN,
    MULTI_KRUM,
    CENTRED_CLIPPING,
    NEAREST_NEIGHBOUR_MIXING,
    GEOMETRIC_MEDIAN,
)

_BY_NAME: Final = {rule.name: rule for rule in ROBUST_RULES}

if TYPE_CHECKING:
    ReducerName = str
else:
    ReducerName = Literal[(MEAN, *_BY_NAME)]
    """The type of a plan's key: pydantic takes these words and no others."""


def robust_rule(name: ReducerName) -> RobustRule | None:
    """None for the mean."""
    return _BY_NAME.get(name)
