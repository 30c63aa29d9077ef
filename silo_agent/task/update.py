"""The client update: delta -> clip -> weight -> encode. Pure arithmetic on blocks; the last step before bytes may leave.

A delta comes as consecutive float32 blocks, one per tensor in layout order (all of one block in memory, never all of the
delta). Clipping needs the norm before the first byte, so a delta is a function that yields its blocks each time anew.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from security.errors import StateError
from silo_wire.manifest import Manifest
from silo_wire.messages import TrainingSummary

FloatBlock = NDArray[np.float32]


class TrainingDiverged(StateError):
    """Local training gave a value that is not finite; nothing of it may leave."""


class TrainingStopped(Exception):
    """Training or evaluation was asked to stop and did; what it had so far is discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUpdate:
    """One round's outcome at one silo: the summary, the manifest of the file that holds the update, the delta's L2 norm."""

    summary: TrainingSummary
    manifest: Manifest
    delta_norm: float


def delta_norm(blocks: Iterable[FloatBlock]) -> float:
    """L2 norm over all blocks, summed in float64; raises TrainingDiverged for a value that is not finite."""
    total = 0.0
    for index, block in enumerate(blocks):
        # einsum casts in pieces: no float64 copy of the block. Squares of finite float32 cannot overflow float64.
        square = float(np.einsum("i,i->", block.reshape(-1), block.reshape(-1), dtype=np.float64, casting="safe"))
        if not math.isfinite(square):
            raise TrainingDiverged(
                f"delta tensor {index} has values that are not finite: lower learning_rate in the plan"
            )
        total += square
    return math.sqrt(total)


def clip_factor(norm: float, clipping_norm: float) -> float:
    """What a delta of L2 norm `norm` is multiplied by so that its norm is at most `clipping_norm`; 0 means no bound."""
    if clipping_norm <= 0 or norm <= clipping_norm:
        return 1.0
    return clipping_norm / norm


def encode_update(
    delta: Callable[[], Iterable[FloatBlock]], *, norm: float, clipping_norm: float = 0.0, weight: float = 1.0
) -> Iterator[bytes]:
    """weight * clip(delta) as little-endian float32 bytes, block by block; `norm` is delta_norm of the same blocks.

    In plain mode the weight stays 1: the coordinator weights by the summary (DESIGN section 3).
    """
    if not (math.isfinite(weight) and weight >= 0):
        raise TrainingDiverged(f"weight of this silo's delta is {weight}: it must be finite and not negative")
    factor = np.float32(weight * clip_factor(norm, clipping_norm))
    for block in delta():
        scaled = block if factor == 1 else block * factor
        yield scaled.astype("<f4", copy=False).tobytes()
