"""The discrete Gaussian on the integers, without a float between the random words and the sample, a block at a time.

The scale is a power of two, sigma = 2^b: what is noised is first rounded to a grid of which the noise's
standard deviation is 2^30 steps, or fewer where integers have to be short. No floating point number, whose
gaps would tell what was added (Mironov 2012), comes near a sample.

A size m = edge + rest is drawn from a staircase that nowhere lies below the curve: sigma has 128 stairs (or
sigma, if that is fewer), each of the height at its edge, drawn by a table of chances of 128 bits. It is
kept with probability exp(-(m^2 - edge^2) / (2 sigma^2)), an event that integers decide exactly (Canonne,
Kamath and Steinke 2020, algorithm 1), and that fails for one size in 300. What is left out is the curve
beyond 14 sigma and what is rounded in chances: 2^-120 of it all.
"""

from decimal import Context, Decimal
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lorica_security.noise.chance_table import ONE, ChanceTable
from lorica_security.noise.random_words import RandomWords, Words64

SIGMA_BITS = 30
SIGMA = 1 << SIGMA_BITS

Integers = NDArray[np.int64]
Truths = NDArray[np.bool_]

LEAST_SIGMA_BITS = 4
_MOST_STAIRS_BITS = 7
_REACH = 14
_DIGITS = Context(prec=60)


def draw(words: RandomWords, count: int, *, sigma_bits: int = SIGMA_BITS) -> Integers:
    """`count` independent samples of mean 0 and variance 2^(2 `sigma_bits`)."""
    if not LEAST_SIGMA_BITS <= sigma_bits <= SIGMA_BITS:
        raise ValueError(f"a scale of 2^{sigma_bits} was asked for: allowed are 2^{LEAST_SIGMA_BITS} to 2^{SIGMA_BITS}")
    samples = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        left = count - done
        some = _some(words, left + left // 32 + 16, sigma_bits)[:left]
        samples[done : done + len(some)] = some
        done += len(some)
    return samples


def _some(words: RandomWords, candidates: int, sigma_bits: int) -> Integers:
    """What is kept of so many candidates: nearly all."""
    stairs_bits = min(sigma_bits, _MOST_STAIRS_BITS)
    width_bits = np.uint64(sigma_bits - stairs_bits)
    stairs = _stairs(stairs_bits).draw(words, candidates)
    drawn = words.words64(candidates)
    rest = drawn & (np.uint64(1) << width_bits) - np.uint64(1)
    edges = stairs << width_bits
    sizes = edges + rest
    edges += sizes
    edges *= rest  # m^2 - edge^2, below 2^58
    kept = happens(words, edges, one_bits=2 * sigma_bits + 1)
    signs = (drawn >> np.uint64(63)).view(np.int64)
    zeros = np.flatnonzero(sizes == 0)
    kept[zeros[signs[zeros] == 1]] = False  # zero has one sign
    samples = sizes.view(np.int64)
    samples ^= -signs
    samples += signs
    return samples[kept]


@lru_cache
def _stairs(stairs_bits: int) -> ChanceTable:
    """Stair j begins at j / 2^stairs_bits of sigma."""
    heights = [
        _DIGITS.exp(_DIGITS.divide(Decimal(-stair * stair), Decimal(2 << 2 * stairs_bits)))
        for stair in range(_REACH << stairs_bits)
    ]
    total = Decimal(0)
    for height in heights:
        total = _DIGITS.add(total, height)
    chances = [int(_DIGITS.divide(_DIGITS.multiply(height, Decimal(ONE)), total)) for height in heights]
    chances[0] += ONE - sum(chances)
    return ChanceTable(chances)


def happens(words: RandomWords, exponents: Words64, *, one_bits: int) -> Truths:
    """For each n of `exponents`, at most 2^one_bits: whether what has probability exp(-n / 2^one_bits) happens.

    A chain of events of probability n / (2^one_bits k), k = 1, 2, ..., ends at the first that does not
    happen; that k is odd with just the probability that is wanted.
    """
    shift = np.uint64(64 - one_bits)
    happened: Truths = words.words64(len(exponents)) >> shift >= exponents
    left = np.flatnonzero(~happened)
    exponents = exponents[left]
    k = 2
    while left.size:
        goes_on = words.words64(left.size) >> shift < exponents
        goes_on &= words.below(k, left.size) == 0
        if k % 2:
            happened[left[~goes_on]] = True
        left, exponents = left[goes_on], exponents[goes_on]
        k += 1
    return happened
