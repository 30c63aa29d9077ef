"""From a mean delta to the next model and optimizer state, for one stretch of elements."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lorica_security.errors import ConfigurationError
from silo_wire.server_step.finite import extremes
from silo_wire.server_step.pseudo_gradient import pseudo_gradient
from silo_wire.server_step.server_optimizer import ServerOptimizer, step


def apply_mean(
    model: Tensor,
    mean: Tensor,
    optimizer: ServerOptimizer,
    state: Mapping[str, Tensor],
    *,
    step_number: int,
    scratch: Tensor,
) -> None:
    """Turn a slab of the round model into the next one and advance its optimizer state, both in place.

    `model`, `mean` (the mean delta), `scratch` and each tensor of `state` are flat float32 of one length on one device;
    `mean` and `scratch` are overwritten. Raises what `step` raises, and ConfigurationError where model or state leave
    float32's range.
    """
    step(optimizer, model, pseudo_gradient(mean), state, step_number=step_number, scratch=scratch)
    ends = torch.stack([extremes(slab) for slab in (model, *state.values())])
    if not bool(torch.isfinite(ends).all()):
        raise ConfigurationError(
            f"a step with learning_rate {optimizer.learning_rate!r} takes the model or the server optimizer's state "
            "out of float32's range: lower learning_rate or set max_delta_norm"
        )
