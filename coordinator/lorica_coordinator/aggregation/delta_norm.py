"""The L2 norm of a delta, measured by the coordinator, because a norm that a silo reports caps nothing.

It is found chunk by chunk as the chunks arrive: `sum_of_squares` of each, then `norm_of` all of them in order. Rows of
a fixed length are summed in float32, which is accurate to about 1e-7, their sums in float64. Nothing here depends on
the thread count, so the same chunks give the same norm, and with it the same bits of the aggregate.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROW = 4096
"""Elements; few enough that no BLAS gives them to several threads."""
_SMALLEST = 1e-20
"""Below this sum a float32 may have lost squares to underflow."""


def sum_of_squares(chunk: bytes | memoryview, dtype: str) -> float:
    """Of the numbers in one chunk of a flat little-endian vector of `dtype`, "float32" or "bfloat16".

    Finite exactly where every number is: squares of finite float32 cannot overflow a float64.
    """
    if dtype == "float32":
        return _of_floats(_aligned(chunk, "<f4"))
    # A bfloat16 is a float32 without its last 16 bits. Two of them are one word: the upper one is a float32 once the
    # lower is masked out, the lower one is once it is shifted up.
    even = len(chunk) // 4 * 4
    words = _aligned(chunk[:even], "<u4")
    floats = words << np.uint32(16)
    squares = _of_floats(floats.view("<f4"))
    np.bitwise_and(words, np.uint32(0xFFFF0000), out=floats)
    squares += _of_floats(floats.view("<f4"))
    if even < len(chunk):
        squares += _of_floats(np.frombuffer(bytes(2) + chunk[even:], "<f4"))
    return squares


def _aligned(chunk: bytes | memoryview, dtype: str) -> NDArray[Any]:
    """The chunk as an array; copied where it does not begin at a multiple of an item, which costs less than computing
    so."""
    values = np.frombuffer(chunk, dtype=dtype)
    return values if values.flags.aligned else np.frombuffer(bytes(chunk), dtype=dtype)


def _of_floats(values: NDArray[np.float32]) -> float:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        total = _sum_in_rows(values)
        if math.isfinite(total) and total > _SMALLEST:
            return total
        return _sum_in_rows(values.astype(np.float64))


def norm_of(sums: Iterable[float]) -> float:
    """The norm of the vector whose chunks have these sums of squares; their sum is rounded once."""
    return math.sqrt(math.fsum(sums))


def _sum_in_rows(values: NDArray[Any]) -> float:
    whole = len(values) - len(values) % _ROW
    rows, rest = values[:whole].reshape(-1, _ROW), values[whole:]
    return float(np.vecdot(rows, rows).sum(dtype=np.float64)) + float(np.dot(rest, rest))
