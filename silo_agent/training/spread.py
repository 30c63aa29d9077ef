"""Deltas whose numbers are of one size are spread before they are masked, or a sum over few silos could be taken apart.

An optimizer that divides each gradient by its own size, as AdamW does, moves nearly every parameter by plus or minus the same number in
its first steps. A sum over n silos with different weights then has 2^n values, which tell the weights, and at each coordinate the sign
of each silo: its delta. So each number of such a delta is multiplied by one of this silo's own, drawn from the size of a normal variable
and with the mean 1: what is summed is a normal variable then, and the sum tells of a part no more than its share. ADR 16.

Deltas of more steps are spread by themselves, and stay as they are.
"""

from typing import Final

import numpy as np

from security.privacy.noise_streams import BLOCK_ELEMENTS as DRAWN_TOGETHER
from security.privacy.noise_streams import NoiseStream
from silo_agent.task.update import FloatBlock

MOST_ALIKE: Final = 0.25
"""Of a tensor's numbers that are not 0, this share may be of one size: of a normal variable 0.1 are, of AdamW's first step all."""
_SIZE_SHIFT: Final = 20
"""Of float32's bits: sizes that agree in exponent and three more bits are within 12 %; two such classes beside each other count as one size."""
_SAMPLE: Final = 1 << 13
_SIGN: Final = np.uint32(0x7FFF_FFFF)
_SIGMA_BITS: Final = 30
_MEAN_1: Final = float(np.sqrt(np.pi / 2)) / (1 << _SIGMA_BITS)


class Spread:
    """What a delta of one training is spread by. `key` is the silo's own, for this training alone: the same delta comes out again."""

    def __init__(self, key: bytes) -> None:
        self._normal = NoiseStream(key, sigma_bits=_SIGMA_BITS)
        self._drawn: tuple[int, FloatBlock] | None = None

    def over(self, values: FloatBlock, begin: int) -> None:
        """Spread `values`, those of one tensor from element `begin` of the delta on, where too many of them are alike."""
        if alike(values) <= MOST_ALIKE:
            return
        end = begin + len(values)
        for block in range(begin // DRAWN_TOGETHER, -(-end // DRAWN_TOGETHER)):
            first, last = max(block * DRAWN_TOGETHER, begin), min((block + 1) * DRAWN_TOGETHER, end)
            within = slice(first - block * DRAWN_TOGETHER, last - block * DRAWN_TOGETHER)
            values[first - begin : last - begin] *= self._factors(block)[within]

    def _factors(self, block: int) -> FloatBlock:
        """Of a whole block, whatever part of it is needed: fewer would be other ones. Kept for the tensor that goes on in it."""
        if self._drawn is None or self._drawn[0] != block:
            drawn = np.abs(self._normal.block(block, DRAWN_TOGETHER)) * _MEAN_1
            self._drawn = block, drawn.astype(np.float32)
        return self._drawn[1]


def alike(values: FloatBlock) -> float:
    """The largest share of the numbers that are not 0 that is of one size, of many numbers by a sample; 0.0 where all are 0."""
    step = len(values) // _SAMPLE | 1  # odd, so that it goes through all columns of a matrix
    sizes = values[::step].view(np.uint32) & _SIGN
    classes = np.bincount(sizes[sizes != 0] >> _SIZE_SHIFT)
    moved = int(classes.sum())
    return int((classes[:-1] + classes[1:]).max(initial=classes.max(initial=0))) / moved if moved else 0.0
