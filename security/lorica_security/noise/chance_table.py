"""Draws from a table of chances that are whole numbers of 2^-128, with one lookup each (Walker 1977).

Each of 2^k slots holds two entries and a threshold between them, and every slot is as likely as
any other. The table is made in whole numbers of any size, so that an entry comes with its chance
exactly: what is rounded is each chance, once, to 128 bits.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lorica_security.noise.random_words import RandomWords, Words64

CHANCE_BITS = 128
ONE = 1 << CHANCE_BITS


class ChanceTable:
    def __init__(self, chances: Sequence[int]) -> None:
        """`chances` of entries 0, 1, ...: whole numbers that add up to ONE, at most 2^16 of them."""
        if sum(chances) != ONE or min(chances) < 0:
            raise ValueError(f"chances come to {sum(chances) / ONE:g}: they have to be 1 together, and none below 0")
        self._slot_bits = max(1, (len(chances) - 1).bit_length())
        thresholds, others = _slots([*chances, *[0] * ((1 << self._slot_bits) - len(chances))])
        self._others: NDArray[np.uint64] = np.array(others, dtype=np.uint64)
        self._first: NDArray[np.uint64] = np.array([each >> 64 for each in thresholds], dtype=np.uint64)
        self._second: NDArray[np.uint64] = np.array([each & (1 << 64) - 1 for each in thresholds], dtype=np.uint64)

    def draw(self, words: RandomWords, count: int) -> Words64:
        """`count` entries. A second word is needed only where the first one ends just at a threshold."""
        drawn = words.words64(count)
        slots = (drawn >> np.uint64(64 - self._slot_bits)).astype(np.intp)
        drawn &= np.uint64((1 << (64 - self._slot_bits)) - 1)
        first = self._first[slots]
        other = drawn >= first
        if (equal := np.flatnonzero(drawn == first)).size:
            other[equal] = words.words64(equal.size) >= self._second[slots[equal]]
        entries: Words64 = np.where(other, self._others[slots], slots.view(np.uint64))
        return entries


def _slots(chances: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each slot, how much of it is the entry of its own number, and which entry has the rest."""
    room = ONE // len(chances)
    left, others = list(chances), list(range(len(chances)))
    thresholds = [room] * len(chances)
    small = [entry for entry, chance in enumerate(left) if chance < room]
    large = [entry for entry, chance in enumerate(left) if chance >= room]
    while small:
        entry, giver = small.pop(), large[-1]
        thresholds[entry], others[entry] = left[entry], giver
        left[giver] -= room - left[entry]
        if left[giver] < room:
            small.append(large.pop())
    return thresholds, others
