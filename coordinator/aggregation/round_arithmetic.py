"""One round's arithmetic for one slab: weighted mean, sign, server step.

The caller weighs the cohort once (`weigh`), makes the state's vectors from `slots` before the first round, and calls
`aggregate_slab` for each slab of the model in turn, on the device where the model's slab lies. Where the mean is made
elsewhere, as under secure aggregation, `apply_mean` is the rest of it.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from coordinator.aggregation.finite import extremes
from coordinator.aggregation.pseudo_gradient import pseudo_gradient
from coordinator.aggregation.server_optimizer import ServerOptimizer, step
from coordinator.aggregation.streaming_sum import Scratch, weighted_mean
from coordinator.aggregation.weighting import CohortWeights
from security.errors import ConfigurationError
from security.identifiers import SiloName


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

    `model` and each tensor of `state` are flat float32 slabs of one length on one device; `deltas` yields every silo's slab of the
    same range, in order of silo name. `scratch` is overwritten; it has the slab's length, or is made. Raises what `weighted_mean` and `step` raise, before anything changed; and
    ConfigurationError where the step itself leaves float32's range, after it did. A caller writes the slabs to a new file and
    puts it in place once all are done, so that an error half-way harms nothing.
    """
    scratch = scratch or Scratch.of(model.numel(), model.device)
    mean = weighted_mean(deltas, cohort, scratch)
    apply_mean(model, mean, optimizer, state, step_number=step_number, scratch=scratch.product)


def apply_mean(
    model: Tensor,
    mean: Tensor,
    optimizer: ServerOptimizer,
    state: Mapping[str, Tensor],
    *,
    step_number: int,
    scratch: Tensor,
) -> None:
    """`aggregate_slab` of a mean delta that is there already; `mean` and `scratch`, of the slab's length, are overwritten.

    Raises what `step` raises, and ConfigurationError where model or state leave float32's range.
    """
    step(optimizer, model, pseudo_gradient(mean), state, step_number=step_number, scratch=scratch)
    ends = torch.stack([extremes(slab) for slab in (model, *state.values())])
    if not bool(torch.isfinite(ends).all()):
        raise ConfigurationError(
            f"a step with learning_rate {optimizer.learning_rate!r} takes the model or the server optimizer's state out of "
            "float32's range: lower learning_rate or set max_delta_norm"
        )
