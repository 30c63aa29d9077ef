"""The weighted mean of the deltas, slab by slab, in memory that does not grow with the number of silos.

A slab is the same range of elements of every silo's delta. Silos come in order of name, as `weigh` sorted them, and each adds
its product to one accumulator: the sum does not depend on who uploaded first. Every tensor operation here rounds once per
element (a product, then a sum, never fused into one rounding), so a result does not depend on slab size, alignment or
thread count, not by a bit.

The accumulator is float32, as the deltas, the model and the optimizer's state are. The shares sum to 1, so the error for n silos
is at most about (n + 1) * 2**-24 of the mean absolute delta, far below what float32 training itself leaves; a float64
accumulator costs twice the memory and, measured on a CPU, twice the time.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from coordinator.aggregation.weighting import CohortWeights
from security.errors import MalformedMessage, StateError
from security.identifiers import SiloName


def weighted_mean(deltas: Iterable[tuple[SiloName, Tensor]], cohort: CohortWeights, *, device: torch.device) -> Tensor:
    """sum(share * delta_scale * delta) over the cohort, for one slab: a new flat float32 tensor on `device`.

    `deltas` yields each silo's slab once, in order of silo name; slabs may lie on another device. It is consumed one silo at
    a time, beside two tensors of the slab's size. Raises MalformedMessage, naming the silo, for a slab of another type or
    length or one that holds NaN or infinite values, and StateError for silos that are not the cohort's, in its order.
    """
    arriving = iter(deltas)
    mean: Tensor | None = None
    product: Tensor | None = None
    extremes: list[Tensor] = []
    for member in cohort.silos:
        silo, values = next(arriving, (None, None))
        if silo is None or values is None or silo != member.silo:
            raise StateError(
                f"expected the delta of silo {member.silo}, got {silo}: pass one per silo in order of name"
            )
        if values.dtype != torch.float32 or values.dim() != 1 or (mean is not None and values.shape != mean.shape):
            expected = "flat float32" if mean is None else f"flat float32 of {mean.numel()} elements"
            raise MalformedMessage(
                f"the delta of silo {silo} is {values.dtype} of shape {tuple(values.shape)}: expected {expected}"
            )
        values = values.to(device)
        extremes.append(_extremes(values))
        if mean is None:
            mean = torch.mul(values, member.factor)
        else:
            if product is None:
                product = torch.empty_like(mean)
            torch.mul(values, member.factor, out=product)
            mean.add_(product)
    extra = next(arriving, None)
    if extra is not None:
        raise StateError(f"silo {extra[0]} is not in the cohort that was weighed: pass the deltas of its silos alone")
    if mean is None:
        raise StateError("no silo has a delta to average: close the round as failed instead of aggregating it")
    _require_finite(torch.stack([*extremes, _extremes(mean)]), cohort)
    return mean


def _extremes(values: Tensor) -> Tensor:
    """Least and greatest element, NaN if any is: one read that finds every non-finite value and flags no finite one.

    It stays on the device, because fetching it for each silo would stall a GPU.
    """
    if values.numel() == 0:
        return values.new_zeros(2)
    return torch.stack(torch.aminmax(values))


def _require_finite(extremes: Tensor, cohort: CohortWeights) -> None:
    *of_deltas, of_mean = torch.isfinite(extremes).all(dim=1).tolist()
    guilty = [member.silo for member, finite in zip(cohort.silos, of_deltas, strict=True) if not finite]
    if guilty:
        raise MalformedMessage(
            f"the delta of silo {', '.join(guilty)} holds NaN or infinite values: refuse it and leave the silo out"
        )
    if not of_mean:
        raise MalformedMessage(
            "the weighted mean of finite deltas leaves the range of float32: set max_delta_norm to bound each delta"
        )
