"""The L2 norm of a delta, measured by the coordinator, because a norm that a silo reports caps nothing.

Squares are summed in float64 over blocks that begin at fixed offsets of the delta, however it is cut into slabs, so that the
norm, and with it every bit of the aggregate, does not depend on the slab size.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from security.errors import MalformedMessage
from security.identifiers import SiloName

# Elements per block. PyTorch sums up to 32768 elements on one thread, so the thread count does not matter either.
_BLOCK = 32768


def delta_norm(silo: SiloName, slabs: Iterable[Tensor]) -> float:
    """The L2 norm of the float32 delta that `slabs` (one-dimensional, any lengths) make up in order.

    Raises MalformedMessage, naming the silo, where the delta holds a NaN or an infinity: squares of finite float32 numbers
    cannot overflow a float64, so the sum is finite exactly where every element is.
    """
    sum_of_squares = 0.0
    block: Tensor | None = None
    filled = 0
    for slab in slabs:
        if slab.dtype != torch.float32 or slab.dim() != 1:
            raise MalformedMessage(
                f"the delta of silo {silo} is {slab.dtype} of shape {tuple(slab.shape)}: expected flat float32"
            )
        if block is None:
            block = torch.empty(_BLOCK, dtype=torch.float64, device=slab.device)
        taken = 0
        while taken < slab.numel():
            length = min(_BLOCK - filled, slab.numel() - taken)
            block[filled : filled + length].copy_(slab[taken : taken + length])
            taken += length
            filled += length
            if filled == _BLOCK:
                sum_of_squares += block.square_().sum().item()
                filled = 0
    if block is not None and filled:
        sum_of_squares += block[:filled].square_().sum().item()
    if not math.isfinite(sum_of_squares):
        raise MalformedMessage(
            f"the delta of silo {silo} holds NaN or infinite values: refuse it and leave the silo out"
        )
    return math.sqrt(sum_of_squares)
