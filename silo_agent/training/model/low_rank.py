"""A low-rank change beside chosen weights of a model, trained in their place and then added to them (LoRA: Hu et al.,
ICLR 2022): W + 2 B A, with A of `rank` rows and B of `rank` columns.

These are no adapters of a plan, which stay apart for their whole life and leave the silo.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import sqrt

import torch
from torch import nn
from torch.nn.utils import parametrize

from lorica_security.errors import ConfigurationError
from silo_agent.training.model.model import T5

LAYERS = ("q", "v")
_SCALE = 2.0
"""Of the change: LoRA's alpha over its rank."""


class _Change(nn.Module):
    """Stands for W + 2 B A wherever the model reads the weight W, of shape (out, in)."""

    def __init__(self, weight: torch.Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        out_features, in_features = weight.shape
        bound = 1.0 / sqrt(in_features)
        right = torch.rand((rank, in_features), generator=generator) * (2 * bound) - bound
        self.right = nn.Parameter(right.to(weight.device))
        self.left = nn.Parameter(torch.zeros((out_features, rank), device=weight.device))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + _SCALE * (self.left @ self.right)


@contextmanager
def low_rank_changes(model: T5, *, rank: int, seed: int) -> Iterator[Sequence[nn.Parameter]]:
    """The parameters of a change of each query and value projection, zero at first; all else of `model` is frozen
    meanwhile. In the end each change is added to its weight, in place.

    A is drawn on the CPU from `seed` alone. Raises ConfigurationError for a rank that no projection has room for.
    """
    chosen = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in LAYERS
    ]
    most = min(min(module.weight.shape) for module in chosen)
    if rank > most:
        raise ConfigurationError(
            f"[personal] adapter_rank is {rank}, and the smallest projection of this model has {most}: take {most} or "
            "less"
        )
    generator = torch.Generator().manual_seed(seed)
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    changes = [_Change(module.weight, rank, generator) for module in chosen]
    for module, change in zip(chosen, changes, strict=True):
        parametrize.register_parametrization(module, "weight", change)
    try:
        yield [parameter for change in changes for parameter in (change.right, change.left)]
    finally:
        for module in chosen:
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
        for parameter in frozen:
            parameter.requires_grad_()
