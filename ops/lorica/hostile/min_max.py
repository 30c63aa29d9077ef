"""Min-max: as far from the honest mean as no delta is farther from another than two honest ones are."""

import math
from typing import Final

import numpy as np

from lorica.hostile.attack import Attack, Exact, Known, Rows


def longest_apart(rows: Rows) -> float:
    """The longest distance between two rows."""
    exact = rows.astype(np.float64)
    return max(float(np.linalg.norm(exact - one, axis=1).max()) for one in exact)


def within_reach(known: Known) -> Exact:
    """mean - gamma x spread, the paper's inverse standard deviation, with the largest gamma that is allowed.

    The paper halves an interval; each honest delta allows gamma up to the root of a quadratic equation, and the least
    of these is the answer.
    """
    mean, direction = known.mean, -known.spread
    square = float(direction @ direction)
    if square == 0.0:
        return mean
    most = longest_apart(known.honest) ** 2
    gamma = math.inf
    for one in known.honest.astype(np.float64):
        apart = mean - one
        along = float(apart @ direction)
        left = along * along - square * (float(apart @ apart) - most)
        gamma = min(gamma, (-along + math.sqrt(max(left, 0.0))) / square)
    return mean + gamma * direction


MIN_MAX: Final = Attack(
    name="min_max",
    meaning="against the spread of honest deltas, as far as no distance gets longer than the longest between these",
    source="Shejwalkar and Houmansadr, Manipulating the Byzantine, NDSS 2021",
    delta=within_reach,
)
