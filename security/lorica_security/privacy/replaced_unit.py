"""What replacing one unit does to a noised sum over a Poisson sample: the pair of
distributions that no neighbours differ more than.

A step releases the sum of vectors of norm 1 at most, of each unit with probability q, plus Gaussian noise of standard
deviation s in each direction. Replacing a unit's vector x by x' changes the release from P to Q.

*Claim.* In any dimension, for every threshold a, E_a(P || Q) = sup over sets of P(S) - a Q(S) is at most that of the
pair

    P* = (1 - q) N(0, s^2) + q N(1, s^2)        Q* = (1 - q) N(0, s^2) + q N(-1, s^2)

*Proof.* 1. E_a is jointly convex, so the other units' sample may be given, and is subtracted:
P = (1 - q) N(0) + q N(x), Q the same with x'. (Where a unit's vector is one of several lines, drawn at random, it is
convexity again.)

2. Let a >= 1; for a < 1, E_a(P || Q) = 1 - a + a E_(1/a)(Q || P), and the claim is symmetric. With
a = 1 + q (b - 1) and w = a / b, E_a(P || Q) = q E_b(N(x) || (1 - w) N(0) + w N(x')) (advanced joint convexity: Balle,
Barthe and Gaboardi 2018, theorem 2).

3. Seen from x, that is E[(1 - b L)+] under z ~ N(0, s^2), where L = (1 - w) e(u) + w e(v) with
e(u) = exp(<u, z> / s^2 - |u|^2 / 2 s^2), u = -x and v = x' - x. So L is a sum of exponentials of Gaussians less half
their variances, and (1 - b L)+ is bounded and convex in L. Kahane's convexity inequality (Kahane 1985; Rhodes and
Vargas 2014, theorem 2.1): its expectation does not fall where no covariance falls. (Between covariances A and B, where
F is smooth, d/dt E F(L) = 1/2 sum over i, j of (B_ij - A_ij) E[w_i e_i w_j e_j F''(L)] >= 0.) The covariances are
1 / s^2 times |u|^2 = |x|^2 <= 1, |v|^2 <= (|x| + |x'|)^2 <= 4 and <u, v> = |x|^2 - <x, x'> <= 2, and x = 1, x' = -1
reaches all three at once. QED

Such pairs compose, also adaptively (Zhu, Dong and Wang 2022, theorem 10), which is what a fixed schedule of steps is.
It is the pair that dp-accounting has for REPLACE_ONE.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TAILS = 13.0
"""Standard deviations beyond which a normal distribution has less than 1e-37 of its mass."""
_POINTS = 16
"""Per scale of the integrand: the trapezoidal rule, on a function that is
analytic pi scales around, errs by less than 1e-100.
"""
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@dataclass(frozen=True, slots=True)
class ReplacedUnit:
    """P* and Q* of one step; `noise_multiplier` is s, `sampling_rate` is q."""

    noise_multiplier: float
    sampling_rate: float

    def cdf(self, loss: Floats) -> Floats:
        """How likely the privacy loss, log of P* over Q* at a draw of P*, is `loss` at most.

        It rises with the draw x, and sinh(loss / 2) (1 - q) = q exp(-1 / 2 s^2) sinh(x / s^2 - loss / 2).
        """
        s, q = self.noise_multiplier, self.sampling_rate
        half = np.asarray(loss, dtype=np.float64) / 2
        at = s * (half + np.arcsinh((1 - q) / q * math.exp(1 / (2 * s * s)) * np.sinh(half)))  # x / s
        return np.asarray((1 - q) * _below(at) + q * _below(at - 1 / s))

    def renyi(self, order: float) -> float:
        """The Renyi divergence of `order`, above 1, of P* from Q*; it is the same the other way round."""
        s, q = self.noise_multiplier, self.sampling_rate
        if q == 1.0:
            return 2 * order / s**2
        step = min(s, s * s) / _POINTS
        # Where P* is q N(1) and Q* is q N(-1), the integrand is a Gaussian
        # around 2 order - 1: the farthest that it can be.
        x = np.arange(-1 - _TAILS * s, 2 * order + _TAILS * s, step)
        up, down = (np.logaddexp(math.log1p(-q), math.log(q) + (sign * 2 * x - 1) / (2 * s * s)) for sign in (1, -1))
        log_normal = -(x * x) / (2 * s * s) - math.log(s * math.sqrt(2 * math.pi))
        terms = order * up + (1 - order) * down + log_normal
        most = float(terms.max())
        return (most + math.log(step * float(np.exp(terms - most).sum()))) / (order - 1)


def _below(values: Floats) -> Floats:
    """How much of the standard normal distribution is below each of `values`."""
    return np.asarray(_erfc(-values / math.sqrt(2)) / 2)
