"""A sum of clipped deltas with noise on it, under silo-level differential privacy: what one silo adds at most, and the
grid of the sum.

    mean = (sum over silos of (w / cap) * clip(delta, C)  +  noise of standard deviation z * C) / nominal_silos

w is the silo's weight, cut at the plan's cap; C is the clipping norm, z the noise multiplier. All of it but w and delta
is public: the sum is divided by a constant, and what the weights come to is released by nothing.

Each silo's part is rounded to a grid of which the noise's standard deviation is 2^30 steps, and everything is added up
in 64-bit integers. A float's sum would depend on its order, and one silo more could change it by more than what that
silo adds. Rounding can lengthen a part by half a step in each coordinate; the norm that deltas are clipped to is that
much below C, and a little more, since norms are measured to about 1e-7 of themselves. So one silo more or less moves
the sum, in steps, by at most C / step.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lorica_security.errors import ConfigurationError
from lorica_security.noise.discrete_gaussian import SIGMA, Integers

FloatBlock = NDArray[np.float32]

LEAST_NOISE = 1e-3
"""A noise multiplier below this promises nothing, and its steps would be too many for 64 bits."""
_MEASURED = 1e-6
"""What a measured norm may be off by, of itself; ten times what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedSum:
    """Public constants of a plan. `weight_cap` is in the unit of the weighting, `divisor` is nominal_silos."""

    clipping_norm: float
    weight_cap: float
    noise_multiplier: float
    divisor: int
    parameters: int

    def __post_init__(self) -> None:
        if not self.noise_multiplier >= LEAST_NOISE:
            raise ConfigurationError(
                f"[privacy] noise_multiplier = {self.noise_multiplier} promises nothing: make the plan with "
                "coordinator plan new"
            )
        if not self.largest_norm > 0:
            raise ConfigurationError(
                f"[privacy] noise_multiplier = {self.noise_multiplier} is so large that rounding {self.parameters} "
                "parameters takes more than max_delta_norm: raise target_epsilon"
            )

    @property
    def step(self) -> float:
        """Of the grid: the noise's standard deviation is 2^30 of them."""
        return self.noise_multiplier * self.clipping_norm / SIGMA

    @property
    def largest_norm(self) -> float:
        """What a delta is clipped to."""
        return self.clipping_norm * (1 - _MEASURED) - self.step * math.sqrt(self.parameters) / 2

    def factor(self, *, weight: float, delta_norm: float) -> float:
        """What a delta of this norm is multiplied with in the sum: its weight's share of the cap, and its clipping; at
        most 1."""
        share = min(weight, self.weight_cap) / self.weight_cap
        return share * min(1.0, self.largest_norm / delta_norm) if delta_norm > 0 else share

    def part(self, delta: FloatBlock, factor: float) -> Integers:
        """What a stretch of one silo's delta adds to the sum, in steps."""
        return np.rint(delta.astype(np.float64) * (factor / self.step)).astype(np.int64)

    def mean(self, noised: Integers, out: FloatBlock) -> None:
        """What a stretch of the noised sum, in steps, comes to as a mean delta."""
        out[:] = noised * (self.step / self.divisor)
