"""What releases cost together: epsilon of Gaussian mechanisms, each on
Poisson samples of the records or on all of them.

Of all records (a rate of 1) the composition is a Gaussian mechanism again, and its epsilon has a closed form
(Balle and Wang 2018; Dong, Roth and Su 2019). With sampling, privacy random variables are convolved by
Opacus (Gopi, Lee and Wutschitz 2021), whose upper bound is taken.

Mechanisms and noise multipliers are for adding or removing one unit: noise over the most that one unit adds. To replace
one is to remove one and add another: twice the shift where nothing is sampled, and with sampling the pair of
replaced_unit.py.

Noise that several parties make together is a sum of discrete Gaussians, coarser than what one party makes alone. Shifts
of it are whole numbers, and of a discrete Gaussian that is shifted by whole numbers the moments of whole orders are a
Gaussian's: with or without sampling, Renyi divergences of whole orders are exact. So releases with such noise are
counted by these alone, and so is what is left of it where one maker is.
"""

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from lorica_security.errors import ConfigurationError
from lorica_security.privacy.mechanisms.named import mechanism_named

NeighbouringRelation = Literal["add_or_remove_one", "replace_one"]
UNLIMITED = math.inf
LEAST_NOISE = 0.3
"""Noise multipliers of sampled mechanisms below this overflow the accountant, and promise nothing anyway."""
MOST_NOISE = 1e6
LEAST_DP_DELTA = 1e-12
MOST_STEPS = 200_000
"""Of sampled releases together. More, like smaller rates than LEAST_RATE, take the accountant minutes and gigabytes."""
MOST_EPSILON = 60.0
"""By Renyi's rough bound, which is quick; more promises nothing, and takes the exact accountant minutes, too."""
LEAST_RATE = 1e-6
"""Rates below count as this one, which costs more."""
_LEAST_CONVOLVED_DELTA = 1e-16
_LEAST_ERROR, _ERROR = 0.01, 0.005
"""Of an epsilon, absolutely and in parts of it; what is returned is above the true one by as much at most."""
_ROUGH_ORDERS = (
    1.1,
    1.25,
    1.5,
    2.0,
    2.5,
    3.0,
    4.0,
    5.0,
    6.0,
    8.0,
    10.0,
    12.0,
    16.0,
    20.0,
    24.0,
    32.0,
    48.0,
    64.0,
    128.0,
)


_WHOLE_ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512)
_ROUNDING = 1e-12
"""Above what a divergence of one step is too small by, computed as the logarithm of a sum near 1."""


@dataclass(frozen=True, slots=True)
class GaussianRelease:
    """`steps` releases of a sum over a sample of the units, each with noise of `noise_multiplier` times what one unit
    adds at most.

    `makers` made that noise together, each as much as the others: whoever knows of all parts but one faces a root of
    `makers` less. `part` is whether the noise is such a part.
    """

    noise_multiplier: float
    sampling_rate: float = 1.0
    steps: int = 1
    makers: int = 1
    part: bool = False

    def __post_init__(self) -> None:
        if not (self.noise_multiplier >= 0.0 and math.isfinite(self.noise_multiplier)):
            raise ConfigurationError(f"noise_multiplier is {self.noise_multiplier}: it is 0 or more, and finite")
        if not 0.0 < self.sampling_rate <= 1.0:
            raise ConfigurationError(f"sampling rate is {self.sampling_rate}: it is above 0 and at most 1")
        if self.steps < 0:
            raise ConfigurationError(f"a release has {self.steps} steps: it has none or more")
        if self.makers < 1:
            raise ConfigurationError(f"noise has {self.makers} makers: it has one or more")

    @property
    def alone(self) -> "GaussianRelease":
        """What is left of it where all makers but one work against the units: the noise of that one."""
        if self.makers == 1:
            return self
        return replace(self, noise_multiplier=self.noise_multiplier / math.sqrt(self.makers), makers=1, part=True)

    @property
    def in_coarse_steps(self) -> bool:
        """Whether it counts at whole orders alone."""
        return self.makers > 1 or self.part


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The most that a holder of records ever releases, over all plans.

    `unit` is the key of whom several records belong to, where it holds for all of these together; "": for each record.
    `alone` is the most towards others who make noise together with this holder, if all of them work against it; 0: no
    such noise is counted on.
    """

    epsilon: float
    dp_delta: float
    alone: float = 0.0
    relation: NeighbouringRelation = "add_or_remove_one"
    unit: str = ""

    def relation_over(self, kinds: Iterable[tuple[str, str]]) -> NeighbouringRelation | None:
        """How neighbours differ for releases of these kinds together, each a mechanism and
        its unit; None where one says nothing of this unit.

        Where a release is private for units that have several records, a record more or less changes
        what its unit adds from one vector to another, which is a replacement. A delta of a whole silo
        has noise for that already, and says something of any unit.
        """
        others = {unit for mechanism, unit in kinds if not mechanism_named(mechanism).of_any_unit} - {self.unit}
        if self.unit and others:
            return None
        return "replace_one" if others else self.relation

    def relation_or_own(self, kinds: Iterable[tuple[str, str]]) -> NeighbouringRelation:
        """`relation_over`; the budget's own where that is None: an order has to be
        favoured there too, though none lets anything through.
        """
        return self.relation_over(kinds) or self.relation


def epsilon_of(
    releases: Sequence[GaussianRelease],
    *,
    dp_delta: float,
    relation: NeighbouringRelation = "add_or_remove_one",
) -> float:
    """The epsilon that all of `releases` have together at `dp_delta`; infinite without noise, 0 without releases."""
    check_dp_delta(dp_delta)
    if relation not in get_args(NeighbouringRelation):
        raise ConfigurationError(
            f"neighbouring relation {relation!r} is not one of {', '.join(get_args(NeighbouringRelation))}"
        )
    made = merged(releases)
    if not made:
        return 0.0
    if any(release.noise_multiplier < 1 / MOST_NOISE for release in made):
        return UNLIMITED
    if any(release.in_coarse_steps for release in made):
        return _of_whole_orders(tuple(made), dp_delta, relation)
    if all(release.sampling_rate == 1.0 for release in made):
        mu = math.sqrt(sum(release.steps / release.noise_multiplier**2 for release in made))
        return gaussian_epsilon(mu if relation == "add_or_remove_one" else 2 * mu, dp_delta)
    return _sampled(tuple(made), dp_delta, relation)


def merged(releases: Iterable[GaussianRelease]) -> list[GaussianRelease]:
    """The same with equal mechanisms as one of more steps, which is what an accountant is quick with; none of no
    steps."""
    steps: Counter[GaussianRelease] = Counter()
    for release in releases:
        steps[replace(release, steps=1)] += release.steps
    return [replace(release, steps=count) for release, count in steps.items() if count]


def gaussian_epsilon(mu: float, dp_delta: float) -> float:
    """Of a Gaussian mechanism whose shift is `mu` standard deviations: the
    epsilon at which delta(epsilon) is `dp_delta`.

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu), which falls as epsilon grows.
    """
    if gaussian_delta(mu, 0.0) <= dp_delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(mu, high) > dp_delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(mu, middle) > dp_delta else (low, middle)
    return high


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The smallest delta with which a Gaussian mechanism of shift `mu` is (epsilon, delta)-private."""
    tail = _below(-mu / 2 - epsilon / mu)
    # For great epsilon e^epsilon overflows where the tail is nothing: their logarithms are added.
    scaled = math.exp(epsilon + math.log(tail)) if tail > 0.0 else 0.0
    return _below(mu / 2 - epsilon / mu) - scaled


def _below(value: float) -> float:
    """How much of the standard normal distribution is below `value`; exact in the lower tail, too."""
    return math.erfc(-value / math.sqrt(2)) / 2


def check_dp_delta(dp_delta: float) -> None:
    """Raise ConfigurationError unless it is a probability that promises something."""
    if not 0.0 < dp_delta < 1.0:
        raise ConfigurationError(f"dp_delta is {dp_delta}: set it above 0 and below 1, far below one over the records")


def renyi_divergences(
    release: GaussianRelease, orders: Sequence[int], relation: NeighbouringRelation
) -> tuple[float, ...]:
    """Of one step of `release`, at whole orders; infinite where there is next to no noise, or no number for it.

    Where a unit is replaced under noise of several makers, or a part of it, nothing is gained from sampling: of that
    pair no moment is a Gaussian's.
    """
    return _of_one_step(
        release.noise_multiplier, release.sampling_rate, release.in_coarse_steps, tuple(orders), relation
    )


@lru_cache(maxsize=256)
def _of_one_step(
    noise: float, rate: float, coarse: bool, orders: tuple[int, ...], relation: NeighbouringRelation
) -> tuple[float, ...]:
    if noise < 1 / MOST_NOISE:
        return (UNLIMITED,) * len(orders)
    noise, rate = min(noise, MOST_NOISE), max(rate, LEAST_RATE)
    if (
        rate == 1.0
        or (coarse and relation == "replace_one")
        or noise < LEAST_NOISE  # of so little noise what sampling gains is not worth an integral of any length
    ):
        shift = 1.0 if relation == "add_or_remove_one" else 2.0
        return tuple(order * (shift / noise) ** 2 / 2 for order in orders)
    if relation == "replace_one":
        from lorica_security.privacy.replaced_unit import ReplacedUnit

        return tuple(_safely(ReplacedUnit(noise, rate).renyi(order)) for order in orders)
    # Here, not above: with torch, which not every process that reads a plan has loaded.
    from opacus.accountants.analysis.rdp import compute_rdp

    return tuple(
        _safely(float(cost)) for cost in compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=list(orders))
    )


def _safely(divergence: float) -> float:
    return max(0.0, divergence) + _ROUNDING if math.isfinite(divergence) else UNLIMITED


def _of_whole_orders(releases: tuple[GaussianRelease, ...], dp_delta: float, relation: NeighbouringRelation) -> float:
    each = [(release.steps, renyi_divergences(release, _WHOLE_ORDERS, relation)) for release in releases]
    return min(
        renyi_epsilon(order, sum(steps * costs[i] for steps, costs in each), dp_delta)
        for i, order in enumerate(_WHOLE_ORDERS)
    )


@lru_cache(maxsize=32)  # seconds each; a silo asks for the same before a round, after it and before the next
def _sampled(releases: tuple[GaussianRelease, ...], dp_delta: float, relation: NeighbouringRelation) -> float:
    too_little = any(release.noise_multiplier < LEAST_NOISE for release in releases)
    if too_little or dp_delta < _LEAST_CONVOLVED_DELTA or sum(release.steps for release in releases) > MOST_STEPS:
        return UNLIMITED
    limited = [
        GaussianRelease(
            min(release.noise_multiplier, MOST_NOISE), max(release.sampling_rate, LEAST_RATE), release.steps
        )
        for release in releases
    ]
    cost = _added if relation == "add_or_remove_one" else _replaced
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # log(0) where nothing is sampled, which is meant
        warnings.simplefilter("ignore", UserWarning)  # that the rough one could be less rough
        try:
            return cost(limited, dp_delta)
        except (
            ValueError,
            OverflowError,
            MemoryError,
        ):  # so little noise, or so small a delta, that sums would be rounding errors
            return UNLIMITED


def _added(releases: Sequence[GaussianRelease], dp_delta: float) -> float:
    # Here, not above: with torch, which not every process that reads a plan has loaded.
    from opacus.accountants import PRVAccountant, RDPAccountant

    accountant, rough = PRVAccountant(), RDPAccountant()
    accountant.history = rough.history = [
        (release.noise_multiplier, release.sampling_rate, release.steps) for release in releases
    ]
    roughly = rough.get_epsilon(dp_delta)
    if not roughly <= MOST_EPSILON:
        return UNLIMITED
    return max(0.0, float(accountant.get_epsilon(dp_delta, eps_error=_error(roughly))))


def _replaced(releases: Sequence[GaussianRelease], dp_delta: float) -> float:
    """What Opacus does for one unit more or less, with the privacy loss of a unit that is replaced."""
    from opacus.accountants.analysis.prv import (
        Domain,
        TruncatedPrivacyRandomVariable,
        compose_heterogeneous,
        discretize,
    )

    from lorica_security.privacy.replaced_unit import ReplacedUnit

    losses = [ReplacedUnit(release.noise_multiplier, release.sampling_rate) for release in releases]
    steps = [release.steps for release in releases]
    each = [[loss.renyi(order) for order in _ROUGH_ORDERS] for loss in losses]
    together = [sum(n * one[i] for n, one in zip(steps, each, strict=True)) for i in range(len(_ROUGH_ORDERS))]

    def rough(divergences: Sequence[float], delta: float) -> float:
        return min(renyi_epsilon(a, d, delta) for a, d in zip(_ROUGH_ORDERS, divergences, strict=True))

    roughly = rough(together, dp_delta)
    if not roughly <= MOST_EPSILON:
        return UNLIMITED
    error, delta_error = _error(roughly), dp_delta / 1000
    # Beyond it losses, together and of each step alone, are rarer than delta_error
    # allows (Gopi, Lee and Wutschitz 2021, remark 5.6).
    end = 3 + max(
        error, rough(together, delta_error / 4), *(rough(one, delta_error / (8 * sum(steps))) for one in each)
    )
    domain = Domain.create_aligned(-end, end, error / math.sqrt(sum(steps) * math.log(12 / delta_error) / 2))
    discrete = [discretize(TruncatedPrivacyRandomVariable(loss, domain.t_min, domain.t_max), domain) for loss in losses]
    _, _, above = compose_heterogeneous(dprvs=discrete, num_self_compositions=steps).compute_epsilon(
        dp_delta, delta_error, error
    )
    return max(0.0, float(above))


def _error(roughly: float) -> float:
    return max(_LEAST_ERROR, _ERROR * roughly)


def renyi_epsilon(order: float, divergence: float, dp_delta: float) -> float:
    """The epsilon at `dp_delta` of whatever has this Renyi divergence
    (Canonne, Kamath and Steinke 2020, proposition 12).
    """
    return max(0.0, divergence + math.log1p(-1 / order) - math.log(dp_delta * order) / (order - 1))
