"""One round's arithmetic for one slab: weighted mean, sign, server step.

The caller weighs the cohort once (`weigh`), makes the state's vectors from `slots` before the first round, and calls
`aggregate_slab` for each slab of the model in turn, on the device where the model's slab lies. Where the mean is made
elsewhere, as under secure aggregation, `silo_wire.server_step.apply_mean` is the rest of it.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from lorica_coordinator.aggregation.streaming_sum import Scratch, weighted_mean
from lorica_coordinator.aggregation.weighting import CohortWeights
from lorica_security.identifiers import SiloName
from silo_wire.server_step.apply_mean import apply_mean
from silo_wire.server_step.server_optimizer import ServerOptimizer


def aggregate_slab(
    model: Tensor,
    deltas: Iterable[tuple[SiloName, Tensor]],
    cohort: CohortWeights,
    optimizer: ServerOptimizer,
    state: Mapping[str, Tensor],
    *,
    step_number: int,
    scratch: Scratch | None = None,
) -> None:
    """Turn a slab of the round model into the next one and advance its optimizer state, both in place.

    `model` and each tensor of `state` are flat float32 slabs of one length on one device; `deltas` yields every silo's
    slab of the same range, in order of silo name. `scratch` is overwritten; it has the slab's length, or is made.
    Raises what `weighted_mean` and `step` raise, before anything changed; and ConfigurationError where the step itself
    leaves float32's range, after it did. A caller writes the slabs to a new file and puts it in place once all are
    done, so that an error half-way harms nothing.
    """
    scratch = scratch or Scratch.of(model.numel(), model.device)
    mean = weighted_mean(deltas, cohort, scratch)
    apply_mean(model, mean, optimizer, state, step_number=step_number, scratch=scratch.product)
