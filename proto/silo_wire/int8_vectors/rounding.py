"""Float32 numbers rounded to int8, block by block.

A block's scale is the 127th part of its largest size, as float32 divides, and each number the nearest step, ties to
even. What that cuts off is at most half a step, and float32 holds it exactly: a silo adds it to its next update. A
block whose scale would be below the smallest normal float32 becomes zeros, and all of it is cut off.
"""

import numpy as np
from numpy.typing import NDArray

from silo_wire.int8_vectors.blocks import Floats
from silo_wire.int8_vectors.sizes import (
    BLOCK_BYTES,
    BLOCK_NUMBERS,
    LEAST_SCALE,
    MOST_STEPS,
    SCALE_BYTES,
    bytes_of,
)

Bytes = NDArray[np.uint8]


def round_to_int8(values: Floats, out: Bytes, rounded: Floats) -> float:
    """Write finite `values`, which begin with a block, to `out`, and the numbers that these bytes say to `rounded`.

    `out` has bytes_of(len(values)) bytes and `rounded` the length of `values`. The largest scale: above MOST_SCALE int8
    cannot hold the values, and what was written is of no use.
    """
    whole = len(values) // BLOCK_NUMBERS
    numbers, size = whole * BLOCK_NUMBERS, whole * BLOCK_BYTES
    largest = 0.0
    if whole:
        largest = _round(values[:numbers], out[:size], rounded[:numbers], BLOCK_NUMBERS)
    if numbers < len(values):
        largest = max(largest, _round(values[numbers:], out[size:], rounded[numbers:], len(values) - numbers))
    return largest


def in_int8(values: Floats) -> bytes:
    """A whole vector as its bytes."""
    out: Bytes = np.empty(bytes_of(len(values)), dtype=np.uint8)
    round_to_int8(values, out, np.empty_like(values))
    return out.tobytes()


def _round(values: Floats, out: Bytes, rounded: Floats, width: int) -> float:
    """Blocks of `width` numbers each."""
    rows, steps = values.reshape(-1, width), rounded.reshape(-1, width)
    scales: Floats = np.abs(rows, out=steps).max(axis=1)
    np.divide(scales, np.float32(MOST_STEPS), out=scales)
    scales[scales < LEAST_SCALE] = 0.0
    # Numbers of a block of scale 0 are below 2^-119 and round to 0 as they are.
    np.divide(rows, np.where(scales == 0.0, np.float32(1.0), scales)[:, np.newaxis], out=steps)
    np.rint(steps, out=steps)
    blocks = out.view(np.dtype([("scale", "<f4"), ("steps", "i1", (width,))]))
    assert blocks.itemsize == SCALE_BYTES + width
    blocks["scale"] = scales
    blocks["steps"] = steps.astype(np.int8)
    np.multiply(blocks["steps"], scales[:, np.newaxis], out=steps, dtype=np.float32)
    return float(scales.max())
