"""The weighted mean of the deltas, slab by slab, in memory that does not grow with the number of silos.

A slab is the same range of elements of every silo's delta. Silos come in order of name, as `weigh` sorted them, and
each adds its product to one accumulator: the sum does not depend on who uploaded first. Every tensor operation here
rounds once per element (a product, then a sum, never fused into one rounding), so a result does not depend on slab
size, alignment or thread count, not by a bit.

The accumulator is float32, as the deltas, the model and the optimizer's state are. The shares sum to 1, so the error
for n silos is at most about (n + 1) * 2**-24 of the mean absolute delta, far below what float32 training itself leaves;
a float64 accumulator costs twice the memory and, measured on a CPU, twice the time. A delta in bfloat16 becomes float32
first, which is exact.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lorica_coordinator.aggregation.weighting import CohortWeights, SiloWeight
from lorica_security.errors import MalformedMessage, StateError
from lorica_security.identifiers import SiloName
from silo_wire.server_step.finite import extremes

DELTA_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Two flat float32 tensors to compute in, kept from slab to slab: fresh memory costs more than the arithmetic."""

    mean: Tensor
    product: Tensor

    @classmethod
    def of(cls, elements: int, device: torch.device) -> "Scratch":
        return cls(*(torch.empty(elements, dtype=torch.float32, device=device) for _ in range(2)))

    def first(self, elements: int) -> "Scratch":
        """The same memory for a slab of at most as many elements."""
        return Scratch(self.mean[:elements], self.product[:elements])


def weighted_mean(deltas: Iterable[tuple[SiloName, Tensor]], cohort: CohortWeights, scratch: Scratch) -> Tensor:
    """sum(length * share * delta_scale * delta) over the cohort, for one slab: `scratch.mean`, which has the slab's
    elements.

    `deltas` yields each silo's slab once, in order of silo name, float32 or bfloat16, on the device of `scratch`. It is
    consumed one silo at a time: a slab is needed no more when the next is asked for. Raises MalformedMessage, naming
    the silo, for a slab of another type or length or one that holds NaN or infinite values, and StateError for silos
    that are not the cohort's, in its order.
    """
    mean, product = scratch.mean, scratch.product
    ends: list[Tensor] = []
    for member, values in in_order(deltas, cohort, mean.numel()):
        if values.dtype == torch.bfloat16:
            values = product.copy_(values)
        into = product if ends else mean
        ends.append(extremes(values))
        torch.mul(values, cohort.length * member.factor, out=into)
        if into is product:
            mean.add_(product)
    if not ends:
        raise StateError("no silo has a delta to average: close the round as failed instead of aggregating it")
    of_all = torch.stack([*ends, extremes(mean)])  # looked at together: on a GPU each look waits for it
    if not bool(torch.isfinite(of_all).all()):
        require_finite_deltas(of_all[:-1], cohort)
        raise MalformedMessage(
            "the weighted mean of finite deltas leaves the range of float32: set max_delta_norm to bound each delta"
        )
    return mean


def in_order(
    deltas: Iterable[tuple[SiloName, Tensor]], cohort: CohortWeights, elements: int
) -> Iterator[tuple[SiloWeight, Tensor]]:
    """Each silo of the cohort with its slab, which must be flat, float32 or bfloat16, of so many elements; raises as
    `weighted_mean`."""
    arriving = iter(deltas)
    for member in cohort.silos:
        silo, values = next(arriving, (None, None))
        if silo is None or values is None or silo != member.silo:
            raise StateError(
                f"expected the delta of silo {member.silo}, got {silo}: pass one per silo in order of name"
            )
        if values.dtype not in DELTA_DTYPES or values.shape != (elements,):
            raise MalformedMessage(
                f"the delta of silo {silo} is {values.dtype} of shape {tuple(values.shape)}: "
                f"expected flat float32 or bfloat16 of {elements} elements"
            )
        yield member, values
    extra = next(arriving, None)
    if extra is not None:
        raise StateError(f"silo {extra[0]} is not in the cohort that was weighed: pass the deltas of its silos alone")


def require_finite_deltas(ends: Tensor, cohort: CohortWeights) -> None:
    """Raise MalformedMessage naming each silo of the cohort whose `extremes`, a row of `ends`, are not finite."""
    of_deltas = torch.isfinite(ends).all(dim=1).tolist()
    guilty = [member.silo for member, finite in zip(cohort.silos, of_deltas, strict=True) if not finite]
    if guilty:
        raise MalformedMessage(
            f"the delta of silo {', '.join(guilty)} holds NaN or infinite values: refuse it and leave the silo out"
        )
