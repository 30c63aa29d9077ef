"""How much of each delta the geometric median is made of: Weiszfeld's iteration on the inner products of deltas alone.

The geometric median lies among the deltas, so it is a mean of them with shares, and its squared distance from each
follows from the shares w and the matrix of inner products G: w G w - 2 (G w)_i + G_ii. So whatever the length of the
deltas, an iteration is of the size of the matrix, and as many are made as are needed.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

SMOOTHING: Final = 1e-6
"""Pillutla et al. smooth distances below nu, 1e-6 in their experiments. Here nu is so much of a distance within which
more than half of the deltas lie of one of them: it means the same whatever the length of deltas."""
MOST_ITERATIONS: Final = 1000
_SETTLED: Final = 1e-10
"""The most that a share changes in the last iteration, of itself: a share of 1e-20 of a delta that long counts too."""


def median_shares(products: NDArray[np.float64]) -> list[float]:
    """The share of each delta in the geometric median; they sum to 1. `products` is square, symmetric and in the order
    of the silos."""
    lengths = np.diagonal(products)
    apart = np.sqrt(np.maximum(lengths[:, np.newaxis] + lengths - 2.0 * products, 0.0))
    near = np.sort(apart, axis=1)[:, len(products) // 2]
    middle = int(near.argmin())
    if near[middle] == 0.0:  # more than half are one and the same, which is the median
        return _listed((apart[middle] == 0.0).astype(np.float64))
    least = SMOOTHING * float(near[middle])
    shares = 1.0 / np.maximum(apart[middle], near[middle])  # from among the honest ones, if these are more than half
    shares /= shares.sum()
    for _ in range(MOST_ITERATIONS):
        along = np.vecdot(products, shares)
        squares = np.maximum(np.vecdot(along, shares) - 2.0 * along + lengths, 0.0)
        following = 1.0 / np.maximum(np.sqrt(squares), least)
        following /= following.sum()
        settled = float((np.abs(following - shares) / following).max()) <= _SETTLED
        shares = following
        if settled:
            break
    return _listed(shares)


def _listed(values: NDArray[np.float64]) -> list[float]:
    return [float(value) for value in values / values.sum()]
