"""int8 vectors, written and read a block at a time as ADR 29 says, with nothing of the project's own."""

import struct

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
LEAST = 2.0**-126


def written(values: Vector) -> bytes:
    out = b""
    for begin in range(0, len(values), 1024):
        block = values[begin : begin + 1024].astype(np.float32)
        scale = np.float32(np.abs(block).max()) / np.float32(127)
        if scale < LEAST:
            scale, steps = np.float32(0), np.zeros(len(block))
        else:
            steps = np.rint(block / scale)
        out += struct.pack("<f", scale) + struct.pack(f"<{len(block)}b", *(int(step) for step in steps))
    return out


def read(data: bytes) -> Vector:
    values = []
    while data:
        block, data = data[:1028], data[1028:]
        (scale,) = struct.unpack("<f", block[:4])
        steps = struct.unpack(f"<{len(block) - 4}b", block[4:])
        values.append(np.array(steps, dtype=np.float32) * np.float32(scale))
    return np.concatenate(values)
