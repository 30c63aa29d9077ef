"""The discrete Gaussian on the integers, exactly, a block at a time (Canonne, Kamath and Steinke 2020, algorithms 1 to 3).

The scale is fixed at SIGMA = 2^30: what is noised is first rounded to a grid of which the noise's standard deviation is 2^30
steps. With a power of two every probability that is needed is exp(-n / 2^61) for an integer n, and all arithmetic is that of
64-bit integers: no floating point number, whose gaps would tell what was added (Mironov 2012), comes near a sample.

A sample is that of a discrete Laplace distribution of scale SIGMA, kept with probability exp(-(|y| - SIGMA)^2 / (2 SIGMA^2)).
"""

import numpy as np
from numpy.typing import NDArray

from security.privacy.random_words import RandomWords, Words64

SIGMA_BITS = 30
SIGMA = 1 << SIGMA_BITS

Integers = NDArray[np.int64]
Truths = NDArray[np.bool_]

_ONE_BITS = 2 * SIGMA_BITS + 1
_ONE = np.uint64(1 << _ONE_BITS)
"""Exponents are fractions of this: 2 SIGMA^2."""
_LOW = np.uint64(SIGMA - 1)
_MOST_TAILS = 1 << 15
"""Of the Laplace distribution, in units of SIGMA; more come with probability exp(-32768), and are drawn anew: no test and no
adversary can tell."""


def draw(words: RandomWords, count: int) -> Integers:
    """`count` independent samples, of mean 0 and variance SIGMA^2 to within 10^-18 of it."""
    samples = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        some = _some(words, 2 * (count - done) + 64)[: count - done]
        samples[done : done + len(some)] = some
        done += len(some)
    return samples


def _some(words: RandomWords, candidates: int) -> Integers:
    """What is kept of so many candidates: about half."""
    drawn = words.words64(candidates)
    drawn = drawn[_happens(words, (drawn & _LOW) << np.uint64(SIGMA_BITS + 1))]  # exp(-u / SIGMA)
    rest, negative = drawn & _LOW, drawn >> np.uint64(63) == 1
    tails = _tails(words, len(drawn))
    kept = _kept(words, rest, tails) & ~(negative & (rest == 0) & (tails == 0))  # zero has one sign
    size: Integers = ((tails << np.uint64(SIGMA_BITS)) + rest)[kept].astype(np.int64)
    np.negative(size, out=size, where=negative[kept])
    return size


def _tails(words: RandomWords, count: int) -> Words64:
    """How often in a row something of probability exp(-1) happens."""
    tails = np.zeros(count, dtype=np.uint64)
    left = np.arange(count)
    while left.size:
        left = left[_happens(words, np.full(left.size, _ONE))]
        tails[left] += np.uint64(1)
        if left.size and int(tails[left[0]]) >= _MOST_TAILS:
            tails[left] = 0
    return tails


def _kept(words: RandomWords, rest: Words64, tails: Words64) -> Truths:
    """Whether what has probability exp(-(size - SIGMA)^2 / (2 SIGMA^2)) happens, size = tails * SIGMA + rest.

    With k = tails - 1 the exponent is (k^2 2^60 + k rest 2^31 + rest^2) / 2^61. Whole parts are taken out one by one, so that no sum
    reaches 2^64; for tails of 0, k is -1 and the whole a square of SIGMA - rest.
    """
    near = tails == 0
    beyond = np.where(near, np.uint64(0), tails - np.uint64(1))
    offset = np.where(near, np.uint64(SIGMA) - rest, rest)
    product = beyond * offset  # below 2^45
    fraction = ((beyond * beyond) & np.uint64(1)) << np.uint64(2 * SIGMA_BITS)
    fraction += (product & _LOW) << np.uint64(SIGMA_BITS + 1)
    fraction += offset * offset
    whole = (beyond * beyond >> np.uint64(1)) + (product >> np.uint64(SIGMA_BITS)) + (fraction >> np.uint64(_ONE_BITS))
    kept = _happens(words, fraction & (_ONE - np.uint64(1)))
    left = np.flatnonzero(kept & (whole > 0))
    whole = whole[left]
    while left.size:
        happened = _happens(words, np.full(left.size, _ONE))
        kept[left[~happened]] = False
        left, whole = left[happened], whole[happened] - np.uint64(1)
        left, whole = left[whole > 0], whole[whole > 0]
    return kept


def _happens(words: RandomWords, exponents: Words64) -> Truths:
    """For each n of `exponents`, at most 2^61: whether what has probability exp(-n / 2^61) happens.

    A chain of events of probability n / (2^61 k), k = 1, 2, ..., ends at the first that does not happen; that k is odd with just
    the probability that is wanted.
    """
    happened = np.zeros(len(exponents), dtype=np.bool_)
    left = np.arange(len(exponents))
    k = 1
    while left.size:
        goes_on = words.words64(left.size) >> np.uint64(64 - _ONE_BITS) < exponents
        if k > 1:
            goes_on &= words.below(k, left.size) == 0
        if k % 2:
            happened[left[~goes_on]] = True
        left, exponents = left[goes_on], exponents[goes_on]
        k += 1
    return happened
