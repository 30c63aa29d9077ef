"""What a number of right guesses proves of a Gaussian claim: the epsilon that the release would have had to exceed.

Each canary is in the data or not by a fair coin of its own. A claim is a curve: what a test of level h
reaches at most in power is power(h) = Phi(Phi^-1(h) + mu), as of a Gaussian mechanism that one record moves
by mu deviations (f-DP; Dong, Roth and Su 2019). An epsilon at dp_delta names such a mu, and the other way
round. Two theorems bound how often guesses about coins are right:

    a release of its own for each   each guess is right with probability Phi(mu / 2) at most, whatever became of others
    one release for all canaries    with p[i] the probability that just i of the r guesses about m canaries are right,

        sum over i >= v of (i / m) p[i]  <=  power(sum over i >= v - 1 of ((r - i) / m) p[i])    for each v

The latter is theorem 3.1 of Mahloujifar, Melis and Chaudhuri (2024) for two choices. *Proof.* For one canary,
with the other coins held fixed, let E say that its guess is b and that at least v - 1 others are right, as
far as the guess was made. E is as probable at most under its coin b as `power` of what it is under the other
coin. Under b it is a right guess and at least v right ones; under the other coin a wrong guess and at least
v - 1. Average over b, other coins and canaries; power is concave. QED

Given P[at least c right] >= tau, the tails P[at least i] are least where everything above c is at c and each
inequality holds just so: by induction from above, since both sides are sums of tails. Where they would come to
more than 1, tau is refuted. With tau = 1 - confidence a mu is refuted under which what was seen is less probable
than that, and the largest such mu is the lower bound. It is far above what theorem 5.2 of Steinke, Nasr and
Jagielski (2023) proves, which knows of a claim one epsilon and one dp_delta.

`slack` is for curves that are a Gaussian's but for so much probability, as of sampled steps
(run.py). The neighbouring relation is add_or_remove_one.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from lorica_security.errors import ConfigurationError
from lorica_security.privacy.accounting import gaussian_epsilon

LARGEST = 40.0
"""A mu above is of no interest."""
_NORMAL = NormalDist()
_LEAST = 1e-300
"""Probabilities below are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """About `canaries` coins; `alone` where each has a release of its own that no other canary is in."""

    canaries: int
    made: int
    correct: int
    alone: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.made <= self.canaries or not self.canaries:
            raise ConfigurationError(
                f"{self.correct} right guesses of {self.made} about {self.canaries} canaries: none may exceed the next"
            )


def refuted(guesses: Guesses, *, mu: float, confidence: float, slack: float = 0.0) -> bool:
    """Whether as many right guesses are less probable than 1 -
    `confidence` where the release is Gaussian of shift `mu`.
    """
    if not 0.0 < confidence < 1.0:
        raise ConfigurationError(f"confidence is {confidence}: set it above 0 and below 1")
    if guesses.alone:
        right = min(1.0, _NORMAL.cdf(mu / 2) + slack / 2)
        return _at_least(guesses.correct, guesses.made, right) < 1.0 - confidence
    made, correct = guesses.made, guesses.correct
    if not made:
        return False
    # r and h are sums over i >= v of (i / made) p[i] and ((made - i) / made)
    # p[i]; the curve sees them times made / canaries.
    share = made / guesses.canaries
    r, h = (1.0 - confidence) * correct / made, (1.0 - confidence) * (made - correct) / made
    for right in range(correct - 1, -1, -1):
        needed = _level(r * share, mu, slack) / share
        if needed > h:
            r += right / (made - right) * (needed - h)
            h = needed
        if r + h > 1.0:
            return True
    return False


def lower_bound(guesses: Guesses, *, dp_delta: float, confidence: float, slack: float = 0.0) -> float:
    """The epsilon at `dp_delta` of the largest mu that is refuted, to within 10^-5 of that; 0 where none is."""
    low, high = 0.0, LARGEST
    if not refuted(guesses, mu=low, confidence=confidence, slack=slack):
        return 0.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        if refuted(guesses, mu=middle, confidence=confidence, slack=slack):
            low = middle
        else:
            high = middle
    return gaussian_epsilon(low, dp_delta) if low > 0.0 else 0.0


def ceiling(guesses: Guesses, *, dp_delta: float, confidence: float, slack: float = 0.0) -> float:
    """What the lower bound would be had all guesses been right: this audit cannot refute a claim above it."""
    best = Guesses(canaries=guesses.canaries, made=guesses.made, correct=guesses.made, alone=guesses.alone)
    return lower_bound(best, dp_delta=dp_delta, confidence=confidence, slack=slack)


def gaussian_shift(epsilon: float, dp_delta: float) -> float:
    """The mu of the Gaussian curve that has this epsilon at `dp_delta`, to 10^-7 above it."""
    low, high = 0.0, LARGEST
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_epsilon(middle, dp_delta) < epsilon else (low, middle)
    return high


def _level(power: float, mu: float, slack: float) -> float:
    """The least level at which a test can have this power."""
    if slack:
        return max(0.0, min(_level(power - slack, mu, 0.0), _level(power, mu, 0.0) - slack))
    if power <= _LEAST:
        return 0.0
    if power >= 1.0:
        return 1.0
    return math.erfc((mu - _NORMAL.inv_cdf(power)) / math.sqrt(2)) / 2


def _at_least(correct: int, made: int, probability: float) -> float:
    """How probable it is that as many of `made` are right, each with this `probability`."""
    wrong = 1.0 - probability
    if wrong <= 0.0:
        return 1.0
    log_ways, total = 0.0, 0.0
    for missed in range(made - correct + 1):  # so many wrong
        total += math.exp(log_ways + missed * math.log(wrong) + (made - missed) * math.log(probability))
        log_ways += math.log(made - missed) - math.log(missed + 1) if missed < made else 0.0
    return min(total, 1.0)
