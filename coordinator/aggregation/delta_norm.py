"""The L2 norm of a delta, measured by the coordinator, because a norm that a silo reports caps nothing.

It is found chunk by chunk as the chunks arrive: `sum_of_squares` of each, then `norm_of` all of them in order. Rows of a
fixed length are summed in float32, which is accurate to about 1e-7, their sums in float64. Nothing here depends on the
thread count, so the same chunks give the same norm, and with it the same bits of the aggregate.
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


def expanded(chunk: bytes | memoryview, dtype: str) -> NDArray[np.float32]:
    """The numbers of a chunk of a flat little-endian vector of `dtype`, "float32" or "bfloat16", as float32: exactly."""
    if dtype == "float32":
        return np.frombuffer(chunk, dtype="<f4")
    bits = np.frombuffer(chunk, dtype="<u2").astype("<u4")
    bits <<= 16
    return bits.view("<f4")


def sum_of_squares(values: NDArray[np.float32]) -> float:
    """Of one chunk; finite exactly where every element is: squares of finite float32 cannot overflow a float64."""
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
