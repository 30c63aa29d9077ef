"""A model in float32 as it is published in bfloat16: each number rounded to the nearest, ties to even.

bfloat16 is float32 without its last 16 bits: the same range, 8 significant bits. The way back is exact.
"""

import torch
from torch import Tensor

from lorica_security.errors import ConfigurationError
from silo_wire.server_step.finite import extremes


def round_to_bfloat16(values: Tensor, out: Tensor) -> None:
    """Write `values` (flat, finite float32) rounded into `out` (flat bfloat16 of the same length, on the same device).

    Raises ConfigurationError where a number rounds to infinity: bfloat16 ends a little below float32.
    """
    out.copy_(values)
    if not bool(torch.isfinite(extremes(out)).all()):
        raise ConfigurationError(
            "a parameter of the model rounds to infinity in bfloat16: lower learning_rate, set max_delta_norm, or set "
            "[wire] model to float32"
        )
