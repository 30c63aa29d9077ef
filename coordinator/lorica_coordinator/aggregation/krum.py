"""Which deltas Multi-Krum keeps: those whose nearest others are nearest, from squared distances alone."""

import math

import numpy as np
from numpy.typing import NDArray

from lorica_security.errors import StateError


def scores(distances: NDArray[np.float64], hostile: int) -> list[float]:
    """Of each delta the sum of its squared distances from the n - f - 2 others that are nearest to it.

    `distances` is square, symmetric and in the order of the silos. Raises StateError for fewer than 2f + 3.
    """
    silos = len(distances)
    if silos < 2 * hostile + 3:
        raise StateError(f"{silos} silos are too few to choose among with {hostile} hostile ones: abandon the round")
    others = [np.sort(np.delete(row, index)) for index, row in enumerate(distances)]
    return [math.fsum(row[: silos - hostile - 2].tolist()) for row in others]


def kept(distances: NDArray[np.float64], hostile: int) -> list[int]:
    """The places of the n - f deltas of the lowest scores, in order; of equal ones those that come first."""
    found = scores(distances, hostile)
    by_score = sorted(range(len(found)), key=lambda index: (found[index], index))
    return sorted(by_score[: len(found) - hostile])
