"""The norm of each example's gradient, without ever making one: from what goes into each layer and the gradient of what comes out.

For a linear layer, example by example, with activations a (T, in) and output gradients d (T, out), the gradient is d' a, and

    |d' a|^2 = sum over s, t of <a_s, a_t> <d_s, d_t>    (Goodfellow 2015; Li et al. 2022)

which two products of T x T numbers give; where making the gradient itself is cheaper, that is done. An embedding's gradient adds
up the output gradients g of each token, so that only equal tokens meet. One weight that is both, as in T5 the embedding of encoder,
decoder and output, has the gradients of all its uses added, and the square of that sum has a product of each two of them:

    |G|^2 = sum [id_s = id_t] <g_s, g_t> + sum <d_s, d_t> <a_s, a_t> + 2 sum d_s[id_t] <a_s, g_t>

the embeddings' tokens taken together. The output layer sees the tokens of all examples one after the other, without padding, and
each example's are taken out.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.models.t5.modeling_t5 import T5LayerNorm

from security.errors import StateError
from silo_agent.training.model import T5

MOST_RANK = 64
"""A layer that is narrower on one side is an adapter's."""

COVERED = (nn.Linear, nn.Embedding, T5LayerNorm)
"""Module types whose norms tests compare with those of real gradients."""


def check_covered(model: nn.Module) -> None:
    """Raise StateError unless every trainable parameter belongs to modules of COVERED types, used as their norms assume."""
    linear: dict[int, str] = {}
    for name, module in model.named_modules():
        own = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        if not own:
            continue
        if type(module) not in COVERED:
            raise StateError(
                f"module {name or 'of the model'} has type {type(module).__name__}, for which no test covers gradients per "
                f"example: freeze it, or train without differential privacy"
            )
        if isinstance(module, nn.Embedding) and (
            module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        ):
            raise StateError(
                f"embedding {name} has options that change its gradient: train without differential privacy"
            )
        if isinstance(module, nn.Linear):
            if "bias" in dict(module.named_parameters(recurse=False)):
                raise StateError(f"linear layer {name} has a bias, for which no test covers gradients per example")
            if (other := linear.setdefault(id(module.weight), name)) != name:
                raise StateError(f"linear layers {other} and {name} share a weight: train without differential privacy")


@dataclass(frozen=True, slots=True)
class _Use:
    """Of one weight in one forward pass: what went in, and the gradient of what came out."""

    module: nn.Module
    entered: torch.Tensor
    gradient: torch.Tensor


class GhostNorms:
    """Of one forward and backward pass; made anew for each.

    `kept` is how many target tokens each example has: what goes into a layer with no batch dimension is of so many rows each. With
    `adapters`, what the norms are made of is held on to, so that `clipped_sums` needs no second backward pass (Bu et al. 2022): little
    where layers are narrow, and more than the model where they are not.
    """

    def __init__(self, kept: Sequence[int], device: torch.device, *, adapters: bool = False) -> None:
        self._kept = list(kept)
        self._held: list[_Use] | None = [] if adapters else None
        self._squares = torch.zeros(len(kept), dtype=torch.float64, device=device)
        self._shared: dict[int, list[_Use]] = defaultdict(list)
        self._tied: set[int] = set()
        self.starts: list[torch.Tensor] = []
        """Outputs that gradients must reach for every other one to be passed on the way."""

    @contextmanager
    def recording(self, model: T5) -> Iterator[None]:
        """Around a forward pass."""
        modules = [module for module in model.modules() if _trained(module)]
        seen: set[int] = set()
        for module in modules:
            weight = id(module.weight)
            if weight in seen:
                self._tied.add(weight)
            seen.add(weight)
        handles = [module.register_forward_hook(self._entered) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def norms(self) -> torch.Tensor:
        """Shape (B,), float64; after the backward pass."""
        for uses in self._shared.values():
            self._squares += _shared_square(uses, self._kept)
        self._shared.clear()
        return self._squares.sqrt()

    def clipped_sums(self, factors: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Of each adapter's weight the sum of the gradients of all examples, each times its factor, shape (B,)."""
        assert self._held is not None
        for use in self._held:
            weight: Any = use.module.weight
            scaled = use.gradient * factors.to(use.gradient.dtype)[:, None, None]
            yield weight, scaled.flatten(0, 1).mT @ use.entered.flatten(0, 1)
        self._held.clear()

    def _entered(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        entered = inputs[0]
        if not entered.requires_grad:
            self.starts.append(output)
        output.register_hook(partial(self._left, module, entered.detach()))  # type: ignore[no-untyped-call]

    def _left(self, module: Any, entered: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._held is not None:
            self._held.append(_Use(module, entered, gradient))
        if id(module.weight) in self._tied:
            self._shared[id(module.weight)].append(_Use(module, entered, gradient))
        else:
            self._squares += _square(module, entered, gradient, self._kept)


def are_adapters(model: nn.Module) -> bool:
    """Whether all that is trained are layers of a low rank, each used once, on activations that have a batch dimension."""
    trained = [module for module in model.modules() if _trained(module)]
    return all(type(module) is nn.Linear and min(module.weight.shape) <= MOST_RANK for module in trained)


def _trained(module: Any) -> bool:
    return isinstance(module, COVERED) and module.weight.requires_grad


def _square(module: nn.Module, entered: torch.Tensor, gradient: torch.Tensor, kept: list[int]) -> torch.Tensor:
    match module:
        case nn.Linear() if entered.dim() == 2:
            return _square_of_rows(entered, gradient, kept)
        case nn.Linear():
            return linear_square(entered, gradient)
        case nn.Embedding():
            return embedding_square(entered, gradient, module.num_embeddings)
        case T5LayerNorm():
            return layer_norm_square(module, entered, gradient)
    raise AssertionError(module)


def linear_square(entered: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Of (B, T, in) and (B, T, out): shape (B,), float64."""
    tokens, wide, high = entered.shape[1], entered.shape[2], gradient.shape[2]
    if tokens * (wide + high) < wide * high:
        return (torch.bmm(entered, entered.mT) * torch.bmm(gradient, gradient.mT)).sum(dim=(1, 2), dtype=torch.float64)
    return torch.bmm(gradient.mT, entered).square().sum(dim=(1, 2), dtype=torch.float64)


def _square_of_rows(entered: torch.Tensor, gradient: torch.Tensor, kept: list[int]) -> torch.Tensor:
    """Of (K, in) and (K, out), in which the examples have `kept` rows each: shape (B,), float64."""
    each = zip(torch.split(entered, kept), torch.split(gradient, kept), strict=True)
    return torch.cat([linear_square(rows[None], of_rows[None]) for rows, of_rows in each])


def embedding_square(tokens: torch.Tensor, gradient: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Of ids (B, ...) and (B, ..., dim): shape (B,), float64."""
    batch, size = tokens.shape[0], gradient.shape[-1]
    tokens, gradient = tokens.reshape(batch, -1), gradient.reshape(batch, -1, size)
    if vocabulary * size < tokens.shape[1] ** 2:
        made = gradient.new_zeros(batch, vocabulary, size)
        made.scatter_add_(1, tokens[:, :, None].expand_as(gradient), gradient)
        return made.square().sum(dim=(1, 2), dtype=torch.float64)
    equal = tokens[:, :, None] == tokens[:, None, :]
    return (torch.bmm(gradient, gradient.mT) * equal).sum(dim=(1, 2), dtype=torch.float64)


def layer_norm_square(module: Any, entered: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    variance = entered.float().square().mean(-1, keepdim=True)
    scaled = entered * torch.rsqrt(variance + module.variance_epsilon)
    return (gradient * scaled).sum(dim=1).square().sum(dim=1, dtype=torch.float64)


def _shared_square(uses: Sequence[_Use], kept: list[int]) -> torch.Tensor:
    linear = [use for use in uses if isinstance(use.module, nn.Linear)]
    looked_up = [use for use in uses if isinstance(use.module, nn.Embedding)]
    assert len(linear) <= 1, "check_covered refuses linear layers that share a weight"
    squares = []
    if looked_up:
        tokens = torch.cat([use.entered for use in looked_up], dim=1)
        gradient = torch.cat([use.gradient for use in looked_up], dim=1)
        vocabulary: int = looked_up[0].module.num_embeddings  # type: ignore[assignment]
        squares.append(embedding_square(tokens, gradient, vocabulary))
    for use in linear:
        squares.append(_square(use.module, use.entered, use.gradient, kept))
        if looked_up:
            squares.append(2 * _products(use, tokens, gradient, kept))
    return torch.stack(squares).sum(dim=0)


def _products(use: _Use, tokens: torch.Tensor, gradient: torch.Tensor, kept: list[int]) -> torch.Tensor:
    """Of an output layer's gradient with that of the embedding, example by example: shape (B,), float64."""
    each = zip(torch.split(use.entered, kept), torch.split(use.gradient, kept), tokens, gradient, strict=True)
    return torch.stack(
        [
            (of_rows[:, looked_up] * (rows @ of_tokens.mT)).sum(dtype=torch.float64)
            for rows, of_rows, looked_up, of_tokens in each
        ]
    )
