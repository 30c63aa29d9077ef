"""How far the server's step goes beside the mean delta: as far as it is long, or as FedExP finds.

FedExP (Jhunjhunwala, Wang and Joshi, FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023) goes

    max(1, (sum of p_i |delta_i|^2) / (2 |mean|^2))        mean = sum of p_i delta_i

times the mean, where the paper's p_i are all 1 / M. The more silos' deltas differ, the shorter their mean is beside
them, and the further the step goes. The paper adds a constant to the denominator, which keeps the step finite; who
chooses it has to know how long deltas are. Here it is at most 1 / (2 sum of p_i^2), half the silos where all weigh the
same: what deltas of one length at right angles give. Without a bound two silos that send opposite deltas make the step
as long as they like, since their mean is zero.

Under masks the sum of squared norms is a number of single silos that no sum has. One more masked coordinate could carry
it; but a silo that checks a chunk of the model would have to know the norm of the whole mean too, which it does not
read. Under silo-level privacy the noise covers the sum of deltas and not the sum of their norms.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from silo_wire.algorithm import Number, Promise

StepLengthName = Literal["fixed", "fedexp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLength:
    """An `Algorithm`."""

    name: StepLengthName
    meaning: str
    needs: frozenset[Number] = frozenset()
    masks: str = ""
    promises: frozenset[Promise]
    passes: int


FIXED: Final = StepLength(
    name="fixed",
    meaning="as far as the mean delta is long",
    masks="the same",
    promises=frozenset({"record", "joint", "silo"}),
    passes=0,
)
FEDEXP: Final = StepLength(
    name="fedexp",
    meaning="the further, the more deltas differ",
    needs=frozenset({Number.DELTA_NORM}),
    promises=frozenset({"record"}),
    passes=1,
)
STEP_LENGTHS: Final = (FIXED, FEDEXP)


def fedexp(shares: Sequence[float], norms: Sequence[float], squared_norm_of_mean: float) -> float:
    """How many times the mean the step goes, 1 or more. `shares` sum to 1, `norms` are those of the deltas, in the same
    order."""
    most = max(1.0, 0.5 / math.fsum(share * share for share in shares))
    squares = math.fsum(share * norm * norm for share, norm in zip(shares, norms, strict=True))
    if squares >= 2.0 * most * squared_norm_of_mean:
        return most
    return max(1.0, squares / (2.0 * squared_norm_of_mean))
