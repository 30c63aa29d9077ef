"""How much each silo's delta counts: raw weights, the operator's caps, and shares that sum to 1.

What a silo weighs before any cap is the weighting's (proto/silo_wire/weightings/). Most of the numbers in it are what
the silo says of itself, so the coordinator caps what they can do. The order is fixed:

1. sort by silo name, so that nothing depends on who arrived first;
2. raw weights; where they sum to zero |D_i| stands in, and `fallback` says so;
3. `max_weight` cuts single weights (those of the fallback too, in whatever unit they then have);
4. weights become shares; `max_weight_share` cuts shares and hands the excess to the silos below the cap in proportion
   to their weight, until every share holds. Where those weigh nothing, |D_i| stands in among them, and `fallback` says
   so;
5. `max_delta_norm` scales a delta that is too long; its share stays as it is.

Sums are exactly rounded (math.fsum) and the rest is float64.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from lorica_security.errors import ConfigurationError, Conflict, MalformedMessage, StateError
from lorica_security.identifiers import SiloName
from silo_wire.weightings.weighting import Weighting

# A mean cross-entropy of this size is a fault, not a loss; the bounds also keep every product and sum finite in
# float64.
LARGEST_LOSS_REDUCTION = 1e9
LARGEST_EXAMPLES = 2**63 - 1

# 49 * (1 / 49) is just below 1 in float64: a cap of exactly 1 / n must not be refused for n silos.
_SHARE_TOLERANCE = 1e-9


class Cap(StrEnum):
    """The caps that can cut a silo, by the name of their key."""

    MAX_WEIGHT = "max_weight"
    MAX_WEIGHT_SHARE = "max_weight_share"
    MAX_DELTA_NORM = "max_delta_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloSummary:
    """What is known of one silo's update apart from the delta itself.

    `examples` is |D_i| (at least 1), `loss_reduction` is dL_i (at least 0, natural-log units of the training loss),
    `loss_first` the loss that training began with, where a weighting looks at it;
    `optimizer_steps` is of the round's training; `delta_norm` is the L2 norm of the delta, which the coordinator
    measures itself (delta_norm.py). Raises MalformedMessage, naming the silo, for anything else: all but the norm are
    self-reported.
    """

    silo: SiloName
    examples: int
    loss_reduction: float
    optimizer_steps: int
    delta_norm: float
    loss_first: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.examples <= LARGEST_EXAMPLES:
            raise MalformedMessage(
                f"silo {self.silo} reports {self.examples!r} examples: expected 1 to {LARGEST_EXAMPLES}, leave the "
                "silo out"
            )
        if not 0.0 <= self.loss_reduction <= LARGEST_LOSS_REDUCTION:
            raise MalformedMessage(
                f"silo {self.silo} reports loss reduction {self.loss_reduction!r}: "
                f"expected 0 to {LARGEST_LOSS_REDUCTION:g}, leave the silo out"
            )
        if not 0.0 <= self.loss_first <= LARGEST_LOSS_REDUCTION:
            raise MalformedMessage(
                f"silo {self.silo} reports a first loss of {self.loss_first!r}: "
                f"expected 0 to {LARGEST_LOSS_REDUCTION:g}, leave the silo out"
            )
        if not 0 <= self.optimizer_steps <= LARGEST_EXAMPLES:
            raise MalformedMessage(
                f"silo {self.silo} reports {self.optimizer_steps!r} optimizer steps: "
                f"expected 0 to {LARGEST_EXAMPLES}, leave the silo out"
            )
        if not 0.0 <= self.delta_norm < math.inf:
            raise MalformedMessage(
                f"the delta of silo {self.silo} has norm {self.delta_norm!r}: "
                "expected a finite number of at least 0, leave the silo out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCaps:
    """Upper bounds on what one silo can do; None means no bound.

    `max_weight` is in the unit of the weighting, `max_weight_share` a fraction of the sum in (0, 1],
    `max_delta_norm` an L2 norm. Raises ConfigurationError for values outside these.
    """

    max_weight: float | None = None
    max_weight_share: float | None = None
    max_delta_norm: float | None = None

    def __post_init__(self) -> None:
        for cap, value in ((Cap.MAX_WEIGHT, self.max_weight), (Cap.MAX_DELTA_NORM, self.max_delta_norm)):
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigurationError(f"{cap} is {value!r}: set a finite number above 0, or leave it out for no cap")
        if self.max_weight_share is not None and not 0.0 < self.max_weight_share <= 1.0:
            raise ConfigurationError(
                f"{Cap.MAX_WEIGHT_SHARE} is {self.max_weight_share!r}: "
                "set a fraction above 0 and at most 1, or leave it out for no cap"
            )

    def require_feasible(self, silos: int) -> None:
        """Raise ConfigurationError where `silos` shares under the cap cannot sum to 1.

        Meant for a plan's `min_silos` too, so that a cap that cannot hold is found before the first round.
        """
        if self.max_weight_share is not None and silos * self.max_weight_share < 1.0 - _SHARE_TOLERANCE:
            raise ConfigurationError(
                f"{Cap.MAX_WEIGHT_SHARE} {self.max_weight_share!r} cannot hold for {silos} silos, whose shares sum "
                f"to 1: raise it to at least {1.0 / silos:.6g} or raise min_silos to "
                f"{math.ceil(1.0 / self.max_weight_share)}"
            )


NO_CAPS = WeightCaps()


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloWeight:
    """One silo's part in the weighted mean.

    `raw_weight` is what the weighting gives, `weight` what is left of it (or of the fallback) under `max_weight`,
    `share` its part of the sum, `delta_scale` in (0, 1] what its delta is multiplied with, `caps` the caps that cut it.
    """

    silo: SiloName
    raw_weight: float
    weight: float
    share: float
    delta_scale: float
    caps: frozenset[Cap]

    @property
    def factor(self) -> float:
        """What multiplies this silo's delta in the weighted mean."""
        return self.share * self.delta_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class CohortWeights:
    """The weights of a round, in order of silo name.

    The shares sum to 1 within rounding. `total` is the sum of `weight` over the silos, above 0. `fallback` is true
    where |D_i| stood in for weights that sum to zero: of all silos, or of all those below the share cap. `length` is
    what the weighting multiplies the mean by, from numbers that no cap has cut.
    """

    silos: tuple[SiloWeight, ...]
    total: float
    fallback: bool
    length: float = 1.0


def weigh(summaries: Iterable[SiloSummary], *, weighting: Weighting, caps: WeightCaps = NO_CAPS) -> CohortWeights:
    """Weigh the silos of a round, in any order.

    Raises StateError for no silos at all, Conflict for a silo that appears twice, and ConfigurationError where
    `caps.max_weight_share` cannot hold for so few silos.
    """
    cohort = sorted(summaries, key=lambda summary: summary.silo)
    if not cohort:
        raise StateError("no silo has an update to weigh: close the round as failed instead of aggregating it")
    for one, next_one in itertools.pairwise(cohort):
        if one.silo == next_one.silo:
            raise Conflict(f"silo {one.silo} has two updates in one round: keep the one that was committed first")
    caps.require_feasible(len(cohort))

    examples = [float(summary.examples) for summary in cohort]
    raw_weights = [weighting.raw_weight(summary) for summary in cohort]
    nothing_weighs = math.fsum(raw_weights) == 0.0
    uncapped = examples if nothing_weighs else raw_weights
    weights = [weight if caps.max_weight is None else min(weight, caps.max_weight) for weight in uncapped]
    filled = _fill_shares(weights, examples=examples, cap=caps.max_weight_share)

    silos = []
    for i, summary in enumerate(cohort):
        too_long = caps.max_delta_norm is not None and summary.delta_norm > caps.max_delta_norm
        bit = {
            Cap.MAX_WEIGHT: weights[i] < uncapped[i],
            Cap.MAX_WEIGHT_SHARE: i in filled.capped,
            Cap.MAX_DELTA_NORM: too_long,
        }
        silos.append(
            SiloWeight(
                silo=summary.silo,
                raw_weight=raw_weights[i],
                weight=weights[i],
                share=filled.shares[i],
                delta_scale=(caps.max_delta_norm or 0.0) / summary.delta_norm if too_long else 1.0,
                caps=frozenset(cap for cap, applies in bit.items() if applies),
            )
        )
    return CohortWeights(
        silos=tuple(silos),
        total=math.fsum(weights),
        fallback=nothing_weighs or filled.stood_in,
        length=weighting.length(cohort),
    )


@dataclass(frozen=True, slots=True)
class _FilledShares:
    shares: list[float]
    capped: set[int]
    stood_in: bool


def _fill_shares(weights: list[float], *, examples: list[float], cap: float | None) -> _FilledShares:
    """Shares in proportion to `weights`, none above `cap`: capped ones stay at the cap, the others share the rest.

    Each turn caps at least one silo for good, so there are at most as many turns as silos. A share can only pass the
    cap by the tolerance that `require_feasible` grants to a cap of 1 / n.
    """
    count = len(weights)
    capped: set[int] = set()
    while len(capped) < count:
        free = [i for i in range(count) if i not in capped]
        rest = 1.0 if cap is None else max(0.0, 1.0 - len(capped) * cap)
        stood_in = all(weights[i] == 0.0 for i in free)
        basis = examples if stood_in else weights
        total = math.fsum(basis[i] for i in free)
        share_of_free = {i: rest * (basis[i] / total) for i in free}
        over = {i for i, share in share_of_free.items() if cap is not None and share > cap}
        if not over:
            shares = [share_of_free.get(i, cap or 0.0) for i in range(count)]
            return _FilledShares(shares, capped, stood_in and rest > 0.0)
        capped |= over
    return _FilledShares([1.0 / count] * count, capped, stood_in=False)
