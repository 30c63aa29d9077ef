"""Reading an int8 vector: what a silo sent is checked once, on its way in, and is numbers from then on."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lorica_security.errors import MalformedMessage
from silo_wire.int8_vectors.sizes import (
    BLOCK_BYTES,
    BLOCK_NUMBERS,
    LEAST_SCALE,
    MOST_SCALE,
    MOST_STEPS,
    SCALE_BYTES,
    numbers_of,
)

Floats = NDArray[np.float32]
Steps = NDArray[np.int8]

_BLOCK = np.dtype([("scale", "<f4"), ("steps", "i1", (BLOCK_NUMBERS,))])


def sum_of_squares(data: bytes | memoryview) -> float:
    """Of the numbers in `data`, which begins with a block; finite, to about 1e-7 of itself, and the same on every
    machine.

    Raises MalformedMessage for bytes that are no blocks, a scale that is neither 0 nor LEAST_SCALE to MOST_SCALE, a
    step of -128, and steps other than 0 beside a scale of 0.
    """
    total = 0.0
    for scales, steps in _parts(data):
        _check_scales(scales)
        if int(steps.min()) < -MOST_STEPS:
            raise MalformedMessage(f"an int8 block has a step of -128: use -{MOST_STEPS} to {MOST_STEPS}")
        wide = steps.astype(np.float32)
        of_steps = np.einsum("ij,ij->i", wide, wide)  # exact: below 2^24 whatever the order
        if of_steps[scales == 0.0].any():
            raise MalformedMessage("an int8 block of scale 0 has steps other than 0: write zeros there")
        exact = scales.astype(np.float64)
        total += float((exact * exact * of_steps).sum(dtype=np.float64))
    return total


def read_into(data: bytes | memoryview, out: Floats) -> None:
    """The numbers in `data`, which begins with a block, was checked before and holds as many as `out`."""
    begin = 0
    for scales, steps in _parts(data):
        there = out[begin : begin + steps.size].reshape(steps.shape)
        np.multiply(steps, scales[:, np.newaxis], out=there, dtype=np.float32)
        begin += steps.size


def as_floats(data: bytes | memoryview) -> Floats:
    """All of a vector that was checked before, as float32."""
    out: Floats = np.empty(numbers_of(len(data)), dtype=np.float32)
    read_into(data, out)
    return out


def _parts(data: bytes | memoryview) -> Iterator[tuple[Floats, Steps]]:
    """Scales, and a row of steps for each: of the whole blocks, and of the last one where that is shorter."""
    whole, rest = divmod(len(data), BLOCK_BYTES)
    if whole:
        blocks = np.frombuffer(data, dtype=_BLOCK, count=whole)
        yield blocks["scale"].astype(np.float32), blocks["steps"]
    if rest:
        if rest <= SCALE_BYTES:
            raise MalformedMessage(f"an int8 vector ends with {rest} bytes, which is a scale at most and no number")
        last = memoryview(data)[whole * BLOCK_BYTES :]
        steps = np.frombuffer(last[SCALE_BYTES:], dtype=np.int8)
        yield np.frombuffer(last[:SCALE_BYTES], dtype="<f4").astype(np.float32), steps[np.newaxis]


def _check_scales(scales: Floats) -> None:
    right = (scales >= LEAST_SCALE) & (scales <= MOST_SCALE) | (scales.view(np.uint32) == 0)
    if not right.all():
        raise MalformedMessage(
            f"an int8 block has the scale {scales[~right][0]:g}: use 0, or {LEAST_SCALE:g} to {MOST_SCALE:g}"
        )
