"""The client update: delta -> feed back -> clip -> encode. Pure arithmetic on blocks; the last step before bytes may
leave.

Plain updates travel unweighted: the coordinator weights by the summary (DESIGN section 3). A block is a flat array of a
few hundred thousand numbers that stays in the processor's cache while all of this is done to it; results go into the
arrays that are given, so that nothing of a whole model's size is ever made.

bfloat16 with error feedback (Seide et al. 2014; Karimireddy et al. 2019): with residual r, the silo rounds u = delta +
r to b(u), sends that, and r becomes u - b(u). Over rounds what travelled and the last residual add up to the deltas. u
- b(u) has no rounding error of its own: it is the low half of u's significand. int8 goes the same way, whose rounding
is in silo_wire/int8_vectors.

Clipped, the residual is taken of what is left after clipping: what clipping cut off is meant to be lost. Fed back it
would leave in later rounds after all, and pile up without bound where every delta is clipped. Rounding may lift a
clipped norm above the bound, in bfloat16 by the 256th part of it at most: whoever promises privacy for a bound sends
float32.
"""

import math

import numpy as np
from numpy.typing import NDArray

from lorica_security.errors import StateError

FloatBlock = NDArray[np.float32]
BitsBlock = NDArray[np.uint16]
"""bfloat16 numbers: the upper half of each float32."""

BLOCK_ELEMENTS = 1 << 18
"""1 MiB of float32: a few of them stay in the second-level cache."""
_ROW = 1024


class TrainingDiverged(StateError):
    """Local training gave a value that is not finite; nothing of it may leave."""


class TrainingStopped(Exception):
    """Training or evaluation was asked to stop and did; what it had so far is discarded."""


def squared_norm(values: FloatBlock) -> float:
    """The sum of squares, to about 1e-6 of itself; not finite where a value is not, and only there.

    float32 sums over short rows are added up in float64. Where squares overflow, or are too small for float32, all of
    it is computed in float64, which squares of float32 cannot overflow.
    """
    whole = len(values) - len(values) % _ROW
    rows, rest = values[:whole].reshape(-1, _ROW), values[whole:]
    square = float(np.einsum("ij,ij->i", rows, rows).sum(dtype=np.float64)) + float(np.einsum("i,i->", rest, rest))
    if 1e-24 < square < math.inf:
        return square
    return float(np.einsum("i,i->", values, values, dtype=np.float64, casting="safe"))


def clip_factor(norm: float, clipping_norm: float) -> float:
    """What a vector of L2 norm `norm` is multiplied by so that its norm is at most `clipping_norm`; 0 means no
    bound.
    """
    if clipping_norm <= 0 or norm <= clipping_norm:
        return 1.0
    return clipping_norm / norm


def round_to_bfloat16(values: FloatBlock, out: FloatBlock) -> None:
    """The nearest bfloat16 of each finite value, ties to even, as float32; infinite where bfloat16's range ends."""
    bits, rounded = values.view(np.uint32), out.view(np.uint32)
    np.right_shift(bits, 16, out=rounded)
    np.bitwise_and(rounded, 1, out=rounded)
    np.add(rounded, 0x7FFF, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.bitwise_and(rounded, 0xFFFF0000, out=rounded)


def bfloat16_bits(rounded: FloatBlock, out: BitsBlock) -> None:
    """The bits of float32 values that are bfloat16 numbers."""
    np.copyto(out, rounded.view(np.uint16)[1::2])


def from_bfloat16(bits: BitsBlock, out: FloatBlock) -> None:
    """The very same numbers as float32."""
    wide = out.view(np.uint32)
    np.copyto(wide, bits)
    np.left_shift(wide, 16, out=wide)
