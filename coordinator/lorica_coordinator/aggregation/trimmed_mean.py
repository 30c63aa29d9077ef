"""The trimmed mean and the median of the silos' values, parameter by parameter, for one slab.

The rows of a slab, one for each silo, are sorted in place by a network of comparators (Batcher 1968, odd-even
merging): which rows it compares follows from their number alone. Every comparator is a minimum and a maximum of two
rows, so no element looks at another column, nothing depends on the order of the silos, on slab size or thread count,
and nothing is needed beside the rows but one more. What is left of the sorted rows is added in float64, from the
smallest to the largest, and rounded to float32 once.

Equal values are one value whichever silo sent them, and a zero has no sign.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from lorica_coordinator.aggregation.streaming_sum import in_order, require_finite_deltas
from lorica_coordinator.aggregation.weighting import CohortWeights
from lorica_security.errors import StateError
from lorica_security.identifiers import SiloName
from silo_wire.server_step.finite import extremes

_BLOCK = 1 << 13
"""Elements of each row that are sorted at a time: those of a few dozen silos stay in a core's cache."""


def gathered(deltas: Iterable[tuple[SiloName, Tensor]], cohort: CohortWeights, rows: Tensor) -> None:
    """Copy a slab of each delta of the cohort into its row of `rows`, float32, scaled where its norm was capped.

    `deltas` is as for `streaming_sum.weighted_mean`. Raises what that raises.
    """
    ends: list[Tensor] = []
    for row, (member, values) in zip(rows, in_order(deltas, cohort, rows.shape[1]), strict=True):
        row.copy_(values)
        ends.append(extremes(row))
        if member.delta_scale != 1.0:
            row.mul_(member.delta_scale)
    require_finite_deltas(torch.stack(ends), cohort)  # no order has a place for NaN


def trimmed_mean(rows: Tensor, trimmed: int, out: Tensor) -> Tensor:
    """Of each column the mean without its `trimmed` smallest and largest values, into `out`; `rows` is overwritten.

    `rows` is float32, finite, a row for each silo; `out` is float32 and as long as a row. Raises StateError unless a
    row is left.
    """
    silos, elements = rows.shape
    if not 0 <= 2 * trimmed < silos:
        raise StateError(f"{trimmed} silos at either end of {silos} leave none to average: abandon the round")
    spare = torch.empty(min(_BLOCK, elements), dtype=torch.float32, device=rows.device)
    total = torch.empty(spare.numel(), dtype=torch.float64, device=rows.device)
    for first in range(0, elements, _BLOCK):
        block = rows[:, first : first + _BLOCK]
        length = block.shape[1]
        kept = _sorted_rows(block, spare[:length])[trimmed : silos - trimmed]
        summed = total[:length].zero_()
        for row in kept:
            summed.add_(row)
        out[first : first + length].copy_(summed.div_(len(kept)))
    return out


def _sorted_rows(block: Tensor, spare: Tensor) -> list[Tensor]:
    """Rows whose every column goes up, in the memory of `block` and `spare`."""
    rows = list(block.unbind(0))
    for low, high in comparators(len(rows)):
        torch.minimum(rows[low], rows[high], out=spare)
        torch.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]
    return rows


@lru_cache(maxsize=8)
def comparators(rows: int) -> tuple[tuple[int, int], ...]:
    """Which pairs of rows to compare, in turn, so that `rows` of them end up sorted."""
    return tuple(_merging_exchanges(rows))


def _merging_exchanges(rows: int) -> Iterator[tuple[int, int]]:
    """Knuth, The Art of Computer Programming, volume 3, section 5.2.2, algorithm M."""
    if rows < 2:
        return
    top = 1 << ((rows - 1).bit_length() - 1)
    span = top
    while span:
        step, offset, distance = top, 0, span
        while True:
            yield from ((low, low + distance) for low in range(rows - distance) if low & span == offset)
            if step == span:
                break
            step, offset, distance = step >> 1, span, step - span
        span >>= 1
