"""What a number of right guesses proves: the epsilon that an (epsilon, dp_delta)-private release would have had to exceed.

Each canary is in the data or not by a fair coin of its own. Two theorems bound how often guesses about the coins are right:

    one release for all canaries    P[right >= v] <= P[W >= v] + 2 m dp_delta max over i of P[v > W >= v - i] / i, where W is
                                    binomial of the r guesses made, each right with probability e^epsilon / (1 + e^epsilon)
                                    (Steinke, Nasr and Jagielski 2023, theorem 5.2; r of the m canaries are guessed, fixed before)
    a release of its own for each   P[right >= v] <= P[W >= v] with probability (e^epsilon + dp_delta) / (1 + e^epsilon), by
                                    the definition of privacy alone

An epsilon under which what was seen has a probability below 1 - confidence is refuted, and the largest such one is the lower
bound. The neighbouring relation is add_or_remove_one.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from security.errors import ConfigurationError

LARGEST = 40.0
"""Epsilons above this are of no interest, and e^-epsilon is still exact."""


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


def p_value(guesses: Guesses, *, epsilon: float, dp_delta: float) -> float:
    """At most this probable are as many right guesses where the release is (epsilon, dp_delta)-private."""
    extra = dp_delta if guesses.alone else 0.0
    wrong = max(0.0, 1.0 - extra) / (1.0 + math.exp(epsilon))
    probabilities = _binomial(guesses.made, wrong)[::-1]  # of 0, 1, ... guesses being right
    v = guesses.correct
    p = float(probabilities[v:].sum())
    if not guesses.alone and v:
        below = np.cumsum(probabilities[:v][::-1])  # P[v > W >= v - i] for i = 1, 2, ..., v
        p += 2 * guesses.canaries * dp_delta * float((below / np.arange(1, v + 1)).max())
    return min(p, 1.0)


def lower_bound(guesses: Guesses, *, dp_delta: float, confidence: float) -> float:
    """The largest epsilon that is refuted with `confidence`, to within 10^-6 below it; 0 where none is."""
    if not 0.0 < confidence < 1.0:
        raise ConfigurationError(f"confidence is {confidence}: set it above 0 and below 1")

    def refuted(epsilon: float) -> bool:
        return p_value(guesses, epsilon=epsilon, dp_delta=dp_delta) < 1.0 - confidence

    low, high = 0.0, LARGEST
    if not refuted(low):
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def ceiling(guesses: Guesses, *, dp_delta: float, confidence: float) -> float:
    """What the lower bound would be had all guesses been right: this audit cannot refute a claim above it."""
    best = Guesses(canaries=guesses.canaries, made=guesses.made, correct=guesses.made, alone=guesses.alone)
    return lower_bound(best, dp_delta=dp_delta, confidence=confidence)


def _binomial(trials: int, probability: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """P[k] for k from 0 to `trials`; `probability` is above 0 and below 1."""
    k = torch.arange(trials + 1, dtype=torch.float64)
    n = torch.tensor(float(trials), dtype=torch.float64)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    logarithm = ways + k * math.log(probability) + (n - k) * math.log1p(-probability)
    result: np.ndarray[tuple[int], np.dtype[np.float64]] = logarithm.exp().numpy()
    return result
