"""Noise within float32's own steps, without which a masked sum of deltas tells what each silo put into it.

A parameter of float32 moves by whole multiples of its step, the distance to its neighbour: a delta is a small integer
times a number that everybody knows from the round's model. The sum over n silos with weights w is then a lattice of n
dimensions in the steps, which reduction of lattices takes apart: one sum told the weights and each silo's delta. So
each number has noise of about a step. ADR 18.

Numbers that did not move have it as well: where one silo alone moved a row, its weight was seen by what is missing
between 0 and a step. And all silos' noise is of one size in the sum, whatever they weigh: where nobody moved anything,
the size of the noise would tell it. So noise that were whole multiples of anything would be so in the sum as well, of
the same for all silos, and gone from what is left over: it is finer than any masked vector can tell.
"""

from typing import Final

import numpy as np

from lorica_security.noise.noise_streams import bound_key
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, Words, Workspace
from silo_agent.rounds.update import BLOCK_ELEMENTS, FloatBlock

_UNIFORM: Final = 4
"""Numbers, each uniform within one step, whose sum is the noise. One leaves the edges of its steps to be seen, which a
few smooth away."""
_BITS: Final = 16
"""Of each uniform number."""
_FINE_BITS: Final = 32
"""Of one more, uniform within the last bit of the others."""
_MEAN: Final = _UNIFORM * ((1 << _BITS) - 1) // 2
_STEP: Final = 2.0 ** -(23 + _BITS)
"""Of float32 between 1 and 2, in the last bit of a uniform number."""
_EXPONENT: Final = np.uint32(0x7F80_0000)


def binade(one: FloatBlock, other: FloatBlock, out: FloatBlock) -> None:
    """The power of two at or below the larger of `one` and `other`, by size; 0 where that is too small to be a normal
    number."""
    exponents = out.view(np.uint32)
    np.bitwise_and(one.view(np.uint32), _EXPONENT, out=exponents)
    np.maximum(exponents, other.view(np.uint32) & _EXPONENT, out=exponents)


class StepNoise:
    """Of one training. `key` has 32 bytes and is used for nothing else: the same noise comes out again.

    The sum has the delta times `share`, which is above 0 and at most 1.
    """

    def __init__(self, key: bytes, share: float) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"a share of {share} is not above 0 and at most 1")
        self._key, self._scale = key, _STEP / share
        self._words: Words = np.empty(3 * BLOCK_ELEMENTS, dtype="<u4")
        self._opening = Workspace()

    def of(self, binades: FloatBlock, begin: int) -> FloatBlock:
        """Noise with the mean 0, which in the sum has a standard deviation of 0.58 steps of `binades` and is at most 2
        steps.

        They are the delta's from element `begin` on, which is a multiple of BLOCK_ELEMENTS, and no more than as many.
        """
        if begin % BLOCK_ELEMENTS or len(binades) > BLOCK_ELEMENTS:
            raise ValueError(f"{len(binades)} elements from {begin} on are not one block of {BLOCK_ELEMENTS}")
        # By the way of mask streams, which is the faster one to the same words: they are most of what this takes.
        count, key = len(binades), Secret(bound_key(self._key, begin.to_bytes(8, "big")))
        try:
            KeyStream(key).words_into(self._words[: 3 * count], 0, self._opening)
        finally:
            self._opening.erase()
            key.erase()
        drawn = self._words[2 * count : 3 * count].astype(np.float64)
        drawn *= 2.0**-_FINE_BITS
        drawn += self._words[: 2 * count].view(np.uint16).reshape(_UNIFORM, -1).sum(axis=0, dtype=np.int32)
        drawn -= _MEAN + 0.5
        drawn *= self._scale
        noise: FloatBlock = drawn.astype(np.float32)
        with np.errstate(invalid="ignore"):  # of a parameter that is not finite, which ends the training
            noise *= binades
        return noise
