"""What a silo's update weighs: Lorar (Zhang et al., ACL 2023, Algorithm 1), |D_i| * dL_i, its two factors, or nothing of it.

Here, because both sides must agree on it: the coordinator weighs plain updates, a silo weighs its own before it is masked.
"""

from enum import StrEnum
from typing import assert_never


class Weighting(StrEnum):
    LORAR = "lorar"
    SIZE = "size"
    LOSS_REDUCTION = "loss_reduction"
    EQUAL = "equal"


def raw_weight(weighting: Weighting, *, examples: int, loss_reduction: float) -> float:
    """The weight before any cap, of |D_i| = `examples` and dL_i = `loss_reduction`, in natural-log units of the training loss."""
    match weighting:
        case Weighting.LORAR:
            return examples * loss_reduction
        case Weighting.SIZE:
            return float(examples)
        case Weighting.LOSS_REDUCTION:
            return float(loss_reduction)
        case Weighting.EQUAL:
            return 1.0
        case _:
            assert_never(weighting)
