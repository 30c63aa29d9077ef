"""The discrete Gaussian on the integers, exactly, a block at a time (Canonne, Kamath and Steinke 2020, algorithms 1 to 3).

The scale is a power of two, sigma = 2^b: what is noised is first rounded to a grid of which the noise's standard deviation is
2^30 steps, or fewer where integers have to be short. Every probability that is needed is then exp(-n / 2^(2b + 1)) for an integer
n, and all arithmetic is that of 64-bit integers: no floating point number, whose gaps would tell what was added (Mironov 2012),
comes near a sample.

A sample is that of a discrete Laplace distribution of scale sigma, kept with probability exp(-(|y| - sigma)^2 / (2 sigma^2)).
"""

import numpy as np
from numpy.typing import NDArray

from security.privacy.random_words import RandomWords, Words64

SIGMA_BITS = 30
SIGMA = 1 << SIGMA_BITS

Integers = NDArray[np.int64]
Truths = NDArray[np.bool_]

LEAST_SIGMA_BITS = 4
_MOST_TAILS = 1 << 15
"""Of the Laplace distribution, in units of sigma; more come with probability exp(-32768), and are drawn anew: no test and no
adversary can tell."""


def draw(words: RandomWords, count: int, *, sigma_bits: int = SIGMA_BITS) -> Integers:
    """`count` independent samples of mean 0 and variance 2^(2 `sigma_bits`), to within what floats can tell."""
    if not LEAST_SIGMA_BITS <= sigma_bits <= SIGMA_BITS:
        raise ValueError(f"a scale of 2^{sigma_bits} was asked for: allowed are 2^{LEAST_SIGMA_BITS} to 2^{SIGMA_BITS}")
    sampler = _Sampler(words, sigma_bits)
    samples = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        some = sampler.some(2 * (count - done) + 64)[: count - done]
        samples[done : done + len(some)] = some
        done += len(some)
    return samples


class _Sampler:
    def __init__(self, words: RandomWords, bits: int) -> None:
        self._words = words
        self._bits = np.uint64(bits)
        self._sigma = np.uint64(1 << bits)
        self._low = np.uint64((1 << bits) - 1)
        self._one_bits = np.uint64(2 * bits + 1)
        self._one = np.uint64(1 << (2 * bits + 1))
        """Exponents are fractions of this: 2 sigma^2."""

    def some(self, candidates: int) -> Integers:
        """What is kept of so many candidates: about half."""
        drawn = self._words.words64(candidates)
        drawn = drawn[self._happens((drawn & self._low) << (self._bits + np.uint64(1)))]  # exp(-u / sigma)
        rest, negative = drawn & self._low, drawn >> np.uint64(63) == 1
        tails = self._tails(len(drawn))
        kept = self._kept(rest, tails) & ~(negative & (rest == 0) & (tails == 0))  # zero has one sign
        size: Integers = ((tails << self._bits) + rest)[kept].astype(np.int64)
        np.negative(size, out=size, where=negative[kept])
        return size

    def _tails(self, count: int) -> Words64:
        """How often in a row something of probability exp(-1) happens."""
        tails = np.zeros(count, dtype=np.uint64)
        left = np.arange(count)
        while left.size:
            left = left[self._happens(np.full(left.size, self._one))]
            tails[left] += np.uint64(1)
            if left.size and int(tails[left[0]]) >= _MOST_TAILS:
                tails[left] = 0
        return tails

    def _kept(self, rest: Words64, tails: Words64) -> Truths:
        """Whether what has probability exp(-(size - sigma)^2 / (2 sigma^2)) happens, size = tails * sigma + rest.

        With k = tails - 1 the exponent is (k^2 2^(2b) + k rest 2^(b + 1) + rest^2) / 2^(2b + 1). Whole parts are taken out one by one,
        so that no sum reaches 2^64; for tails of 0, k is -1 and the whole a square of sigma - rest.
        """
        near = tails == 0
        beyond = np.where(near, np.uint64(0), tails - np.uint64(1))
        offset = np.where(near, self._sigma - rest, rest)
        product = beyond * offset  # below 2^45
        fraction = ((beyond * beyond) & np.uint64(1)) << np.uint64(2 * int(self._bits))
        fraction += (product & self._low) << (self._bits + np.uint64(1))
        fraction += offset * offset
        whole = (beyond * beyond >> np.uint64(1)) + (product >> self._bits) + (fraction >> self._one_bits)
        kept = self._happens(fraction & (self._one - np.uint64(1)))
        left = np.flatnonzero(kept & (whole > 0))
        whole = whole[left]
        while left.size:
            happened = self._happens(np.full(left.size, self._one))
            kept[left[~happened]] = False
            left, whole = left[happened], whole[happened] - np.uint64(1)
            left, whole = left[whole > 0], whole[whole > 0]
        return kept

    def _happens(self, exponents: Words64) -> Truths:
        """For each n of `exponents`, at most 2^(2b + 1): whether what has probability exp(-n / 2^(2b + 1)) happens.

        A chain of events of probability n / (2^(2b + 1) k), k = 1, 2, ..., ends at the first that does not happen; that k is odd with
        just the probability that is wanted.
        """
        happened = np.zeros(len(exponents), dtype=np.bool_)
        left = np.arange(len(exponents))
        k = 1
        while left.size:
            goes_on = self._words.words64(left.size) >> (np.uint64(64) - self._one_bits) < exponents
            if k > 1:
                goes_on &= self._words.below(k, left.size) == 0
            if k % 2:
                happened[left[~goes_on]] = True
            left, exponents = left[goes_on], exponents[goes_on]
            k += 1
        return happened
