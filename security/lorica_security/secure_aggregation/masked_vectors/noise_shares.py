"""How much noise each silo adds under its mask, and how fine integers then are: privacy of sums without a trusted
coordinator.

A silo adds discrete Gaussian noise of sigma = 2^b steps to each coordinate of its encoded delta (fixed_point.py), mod
2^32, before it masks. Only the sum comes out, with the noise of every silo in it. Of a sum, `honest` silos surely made
theirs and told nobody: the fewest whose sum comes out, less those who may work against the others.

Concentrated privacy of h discrete Gaussians (Kairouz, Liu and Steinke 2021, theorem 1): where one silo moves the sum by
at most S steps in L2 norm, over d coordinates, the sum is as concentrated as a Gaussian mechanism of noise multiplier 1
/ (S / (sqrt(h) sigma) + tau sqrt(d)), tau = 10 * sum over k < h of exp(-2 pi^2 sigma^2 k / (k + 1)); and like all
discrete noise here it is counted as that Gaussian. From 2^10 steps on tau is nothing that a float can hold; it stays in
the formula.

S is the most that one unit adds, and rounding. Where the unit is a silo, its clipped delta, as a share of the cap, is
at most `levels` long; where it is a record, `levels` are the range of a whole silo's sum, which is `reach` times what
one record adds. Rounding moves each coordinate by less than one step, at random; where the sum was rounded before, by
`grain` of its range, by as much more. So

    S = levels / reach + sqrt(d) (1 + grain levels)
    levels = (sqrt(h) sigma (1 / z - tau sqrt(d)) - sqrt(d)) / (1 / reach + grain sqrt(d))

keep the noise multiplier z, for any cohort and whoever drops out; more survivors than the fewest add more noise than
was promised.

Privacy needs no bound on the noise: a sum that wraps around mod 2^32 follows from the one that does not. Accuracy does.
Largest deltas and TAIL standard deviations of a whole cohort's noise fit below 2^31 together, or the constructor
refuses; a coordinate goes beyond with a probability of 10^-32. Noised integers are never clipped in the silo: the
theorem is about their sum, not about what clipping would leave of each.
"""

import math
from dataclasses import dataclass, field

from lorica_security.errors import ConfigurationError, MalformedMessage
from lorica_security.noise.discrete_gaussian import SIGMA_BITS
from lorica_security.secure_aggregation.masked_vectors.fixed_point import LEAST_LEVELS, SIGNED_MAX, FixedPoint, Ranges

LEAST_BITS = 10
LEAST_MULTIPLIER = 2.0**-100
"""Less is no noise, and levels that it would leave leave the range of floats."""
TAIL = 12
CLIPPED_TO = 1 - 2.0**-16
"""Of the clipping norm: norms are measured to 10^-6 of themselves."""


@dataclass(frozen=True, kw_only=True)
class NoiseShares:
    """Of one cohort. Raises MalformedMessage where 32-bit words cannot hold the promise, ConfigurationError for no
    noise at all."""

    cohort: int
    honest: int
    noise_multiplier: float
    elements: int
    reach: float = 1.0
    grain: float = 0.0
    sigma_bits: int = field(init=False)
    levels: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.noise_multiplier >= LEAST_MULTIPLIER:
            raise ConfigurationError(f"[privacy] noise_multiplier is {self.noise_multiplier}: it makes no noise")
        if not 1 <= self.honest <= self.cohort:
            raise MalformedMessage(
                f"noise of {self.honest} silos in a cohort of {self.cohort}: at least one must make it"
            )
        if not (self.reach >= 1 and math.isfinite(self.reach)):
            raise MalformedMessage(f"the range of a sum is {self.reach:g} times what one unit adds: it is 1 or more")
        if not 0 <= self.grain <= 1:
            raise MalformedMessage(f"a sum was rounded to {self.grain:g} of its range before: that is from 0 to 1")
        for bits in range(SIGMA_BITS, LEAST_BITS - 1, -1):
            levels = self._levels(bits)
            most = self.cohort * (levels + 1) + TAIL * 2.0**bits * math.sqrt(self.cohort)
            if most <= SIGNED_MAX:
                break
        if most > SIGNED_MAX or levels < LEAST_LEVELS:
            raise MalformedMessage(
                f"a noise multiplier of {self.noise_multiplier:g} on {self.elements} parameters of {self.cohort} "
                "silos does not fit into 32-bit words: take fewer rounds, a larger target_epsilon or a smaller model"
                + ("" if self.reach == 1 else ", or a smaller delta_bound")
            )
        object.__setattr__(self, "sigma_bits", bits)
        object.__setattr__(self, "levels", levels)

    def fixed_point(self, ranges: Ranges) -> FixedPoint:
        finest = FixedPoint.of(cohort=self.cohort, ranges=ranges)
        return FixedPoint(
            cohort=self.cohort, levels=self.levels, saturation_limit=finest.saturation_limit, ranges=ranges
        )

    @property
    def sensitivity(self) -> float:
        """The most steps, in L2 norm, by which one unit moves a sum."""
        root = math.sqrt(self.elements)
        return self.levels / self.reach + root * (1 + self.grain * self.levels)

    @property
    def effective_multiplier(self) -> float:
        """Of the Gaussian mechanism as which a sum of the fewest silos counts; never below what was promised."""
        return 1 / (self.sensitivity / self._deviation(self.sigma_bits) + self._tau(self.sigma_bits))

    def _levels(self, bits: int) -> int:
        root = math.sqrt(self.elements)
        spread = self._deviation(bits) * (1 / self.noise_multiplier - self._tau(bits))
        # One less than might be: floats round.
        return math.floor((spread - root) / (1 / self.reach + self.grain * root)) - 1

    def _deviation(self, bits: int) -> float:
        return math.sqrt(self.honest) * 2.0**bits

    def _tau(self, bits: int) -> float:
        """tau times the root of the number of coordinates."""
        variance = 4.0**bits
        tau = 10 * math.fsum(math.exp(-2 * math.pi**2 * variance * k / (k + 1)) for k in range(1, self.honest))
        return tau * math.sqrt(self.elements)
