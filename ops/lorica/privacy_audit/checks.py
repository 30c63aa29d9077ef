"""A promise beside what was measured of it, and how far chance alone moves what is measured.

Every check that chance could fail does so once in a million audits at most (FALSE_ALARM):
limits are exact, or bounds that hold for any number of samples.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

FALSE_ALARM = 1e-6
EXACT = 1e-3
"""Relative: how far what is exact may be off, a record's part of a sum, say: by
what floats round, and the steps before moved the model.
"""
NOTHING = 1e-30
"""In place of 0 where something is divided by what ought not to be 0."""

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`measured` has to lie from `lowest` to `highest`; `broken` says in a sentence what is so where it does not."""

    target: Literal["conformity"] = "conformity"
    promise: str
    about: str
    measured: float
    lowest: float
    highest: float
    broken: str

    @property
    def held(self) -> bool:
        return self.lowest <= self.measured <= self.highest  # NaN is not

    @property
    def fault(self) -> str | None:
        if self.held:
            return None
        return (
            f"{self.promise}, {self.about}: {self.broken} ({self.measured:.6g}, allowed are {self.lowest:.6g} to "
            f"{self.highest:.6g})"
        )


def binomial(trials: int, probability: float) -> Vector:
    """P[k] for k from 0 to `trials`."""
    if probability in (0.0, 1.0):
        certain = np.zeros(trials + 1)
        certain[round(trials * probability)] = 1.0
        return certain
    k = torch.arange(trials + 1, dtype=torch.float64)
    n = torch.tensor(float(trials), dtype=torch.float64)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    logarithm = ways + k * math.log(probability) + (n - k) * math.log1p(-probability)
    result: Vector = logarithm.exp().numpy()
    return result


def likely(probabilities: Vector, alarm: float = FALSE_ALARM) -> tuple[int, int]:
    """Of what has these probabilities of 0, 1, ...: from where to where it is
    but for a chance of `alarm`, half on either side.
    """
    below = np.cumsum(probabilities)
    above = np.cumsum(probabilities[::-1])[::-1]
    inside = np.flatnonzero((below > alarm / 2) & (above > alarm / 2))
    return int(inside[0]), int(inside[-1])


def rare(expected: float, alarm: float = FALSE_ALARM) -> tuple[float, float]:
    """From where to where a count of many rare, independent cases is
    (Bernstein), and a twentieth of it to either side.
    """
    x = math.log(2 / alarm)
    return 0.95 * (expected - math.sqrt(2 * expected * x)), 1.05 * (expected + math.sqrt(2 * expected * x) + x)


def sizes_spread(units: int, rate: float, steps: int) -> tuple[float, Vector]:
    """The centre c, and the probabilities of 0, 1, ... for the sum over `steps` samples of (size - c)^2."""
    centre = round(units * rate)
    one = np.zeros(max(centre, units - centre) ** 2 + 1)
    for size, probability in enumerate(binomial(units, rate)):
        one[(size - centre) ** 2] += probability
    length = steps * (len(one) - 1) + 1
    of_all = np.fft.irfft(np.fft.rfft(one, 2 * length) ** steps, 2 * length)[:length]
    probabilities: Vector = of_all.clip(min=0.0)
    return centre, probabilities


def spread_limits(samples: int, alarm: float = FALSE_ALARM) -> tuple[float, float]:
    """Of the mean square of so many standard normal numbers (Laurent and Massart 2000, lemma 1)."""
    x = math.log(2 / alarm)
    root = 2 * math.sqrt(x / samples)
    return max(0.0, 1 - root), 1 + root + 2 * x / samples


def correlation_limit(samples: int, pairs: int, alarm: float = FALSE_ALARM) -> float:
    """The largest mean product, of either sign, in `pairs` pairs of so many independent standard normal numbers each.

    By Bernstein: a product has a logarithm of E exp(t x y) of -log(1 - t^2) / 2, at most t^2 / 2 / (1 - t).
    """
    x = math.log(2 * pairs / alarm)
    return math.sqrt(2 * x / samples) + x / samples


def distance_from_normal(values: NDArray[np.float32]) -> float:
    """Kolmogorov's distance of the values' distribution from the standard normal one."""
    ordered = torch.from_numpy(np.sort(values)).double()
    normal = torch.special.ndtr(ordered).numpy()
    ranks = np.arange(len(values) + 1) / len(values)
    return float(max((ranks[1:] - normal).max(), (normal - ranks[:-1]).max()))


def distance_limit(samples: int, tests: int, alarm: float = FALSE_ALARM) -> float:
    """Of `distance_from_normal`, in `tests` tests (Massart 1990)."""
    return math.sqrt(math.log(2 * tests / alarm) / (2 * samples))


def mean_products(rows: NDArray[np.float64] | NDArray[np.float32]) -> Vector:
    """Of each two rows, by torch, whose threads wait for each other less
    than numpy's; a row's with itself counts as 0.
    """
    tensor = torch.from_numpy(rows)
    products: Vector = ((tensor @ tensor.T) / rows.shape[1]).double().numpy()
    np.fill_diagonal(products, 0.0)
    return products


def beyond(deviations: float) -> float:
    """How probable a normal number is that far from its mean, on either side."""
    return math.erfc(deviations / math.sqrt(2))


def worst(values: Sequence[float] | Vector) -> tuple[int, float]:
    """Index and value of what is furthest from 0."""
    flat = np.abs(np.asarray(values, dtype=np.float64))
    at = int(np.nanargmax(flat)) if len(flat) else 0
    return at, float(values[at]) if len(flat) else 0.0


def none(promise: str, about: str, wrong: Sequence[str], broken: str) -> Check:
    """Where there must be no case at all; the first are named."""
    named = f"{broken}: {', '.join(wrong[:3])}{' and more' if len(wrong) > 3 else ''}" if wrong else broken
    return Check(promise=promise, about=about, measured=len(wrong), lowest=0, highest=0, broken=named)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner` has `value` under `name` while this is open."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
