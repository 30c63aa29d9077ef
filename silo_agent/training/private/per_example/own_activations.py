"""Activations computed for one example at a time: beside whole vectors of registers torch takes another function.

What is left over at the end of a tensor is computed number by number, by another exponential, which
rounds some numbers otherwise. Where in a tensor an example ends depends on how many others are in it.
Matrix products, norms and softmax go by rows, and ReLU rounds nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.models.mt5.modeling_mt5 import MT5DenseActDense, MT5DenseGatedActDense
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense
from transformers.models.umt5.modeling_umt5 import UMT5DenseActDense, UMT5DenseGatedActDense

from silo_agent.training.model.model import T5

_DENSE = (
    T5DenseActDense,
    T5DenseGatedActDense,
    MT5DenseActDense,
    MT5DenseGatedActDense,
    UMT5DenseActDense,
    UMT5DenseGatedActDense,
)


@contextmanager
def own_activations(model: T5) -> Iterator[None]:
    """While this is open, what a forward pass of `model` makes of one example has the bits that it has alone."""
    dense: list[Any] = [it for it in model.modules() if isinstance(it, _DENSE)]
    changed = [(module, module.act) for module in dense if not isinstance(module.act, nn.ReLU)]
    for module, act in changed:
        module.act = _Each(act)
    try:
        yield
    finally:
        for module, act in changed:
            module.act = act


class _Each(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self._act = act

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Of shape (B, T, d)."""
        if len(values) == 1:
            made: torch.Tensor = self._act(values)
            return made
        return torch.cat([self._act(one) for one in torch.split(values, 1)])
