"""Gaussian noise on a clipped sum, from the operating system's randomness and without floating point's gaps.

The sum is rounded to a grid of which the noise's standard deviation is SIGMA = 2^30 steps, discrete Gaussian noise is added as
integers, and only the result becomes a float again, which is post-processing. torch.randn would neither be secret nor safe: the
floats that it can give differ from place to place, and tell what it was added to.
"""

import numpy as np
from numpy.typing import NDArray

from security.privacy.discrete_gaussian import SIGMA, draw
from security.privacy.random_words import RandomWords

_BLOCK = 1 << 16

FloatBlock = NDArray[np.float32]


def add_noise(values: FloatBlock, *, deviation: float, words: RandomWords) -> None:
    """Noise of standard deviation `deviation`, above 0, on each of the finite `values` (flat), in place."""
    step = deviation / SIGMA
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        steps = np.rint(block.astype(np.float64) / step)
        noised = steps.astype(np.int64) + draw(words, len(block))
        block[:] = noised * step
