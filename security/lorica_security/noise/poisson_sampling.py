"""Which records a step of training sees: each with the same probability, on its own, whatever becomes of the others.

The accountant's numbers hold for this and nothing else: not for shuffled batches, and
not for a generator whose next draw somebody can guess.
"""

import numpy as np
from numpy.typing import NDArray

from lorica_security.noise.random_words import RandomWords

_BITS = 64
_TOGETHER = 1 << 20
"""Words that are in memory at a time."""

Indices = NDArray[np.int64]


def sample(words: RandomWords, records: int, rate: float) -> Indices:
    """Indices below `records` in ascending order, perhaps none; each
    with probability `rate`, or less by under 2^-64.
    """
    if not 0.0 < rate <= 1.0:
        raise ValueError(f"sampling rate {rate} is not above 0 and at most 1")
    threshold = int(rate * (1 << _BITS))  # exact: a float times a power of two
    if threshold >> _BITS:
        return np.arange(records)
    drawn = [
        begin + np.flatnonzero(words.words64(min(_TOGETHER, records - begin)) < np.uint64(threshold))
        for begin in range(0, records, _TOGETHER)
    ]
    return np.concatenate(drawn) if drawn else np.zeros(0, dtype=np.int64)
