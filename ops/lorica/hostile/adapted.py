"""An attack for the rule at hand: it tries what the rule makes of many deltas, and sends the worst."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from lorica.hostile.alie import deviations
from lorica.hostile.attack import MOST, Attack, Exact, Known

FACTORS: Final = (0.5, 1.0, 2.0, 4.0, 16.0, 1e6)


def candidates(known: Known) -> Iterator[Exact]:
    """The directions of Shejwalkar and Houmansadr, from the honest mean, each at several lengths."""
    mean, spread = known.mean, known.spread
    length = float(np.linalg.norm(mean))
    signs = np.sign(mean) * (float(np.linalg.norm(spread)) / max(float(np.sqrt(mean.size)), 1.0))
    for factor in FACTORS:
        yield mean - factor * mean
        yield mean - factor * spread
        yield mean - factor * signs
    if length:
        yield mean - deviations(known.silos, known.hostile) * spread


def worst(known: Known) -> Exact:
    """The candidate with which the rule goes least far along the honest mean; all hostile silos send it."""
    mean = known.mean

    def gained(candidate: Exact) -> float:
        row = np.clip(candidate, -MOST, MOST).astype(np.float32)
        return float(known.made(np.repeat(row[np.newaxis], known.hostile, axis=0)) @ mean)

    return min(candidates(known), key=gained)


ADAPTED: Final = Attack(
    name="adapted",
    meaning="of many deltas along three directions that one with which this very rule goes least far along the honest "
    "mean",
    source="Fang, Cao, Jia and Gong, USENIX Security 2020; Shejwalkar and Houmansadr, NDSS 2021",
    delta=worst,
)
