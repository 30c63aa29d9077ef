"""Norms and sums of the gradients of single examples, without ever making one: from what goes into each layer and the
gradient of what comes out.

For a linear layer, example by example, with activations a (T, in) and output gradients d (T, out), the gradient is d'
a, and

    |d' a|^2 = sum over s, t of <a_s, a_t> <d_s, d_t>    (Goodfellow 2015; Li et al. 2022)

which two products of T x T numbers give. An embedding's gradient adds up the output gradients g of each token, so that
only equal tokens meet. One weight that is both, as in T5 the embedding of encoder, decoder and output, has the
gradients of all its uses added, and the square of that sum has a product of each two of them:

    |G|^2 = sum [id_s = id_t] <g_s, g_t> + sum <d_s, d_t> <a_s, a_t> + 2 sum d_s[id_t] <a_s, g_t>

the embeddings' tokens taken together. The sum of the gradients of a chunk's examples, each times its factor, is one
product of the same a and d (Bu et al. 2022).

Where an example has several views, its gradient is the mean of theirs: the mean of d' a over views is one d' a with the
views one behind the other along t, and d over their number. So nothing above is otherwise.

All of it is computed in float64, whose exponents hold the fourth power of any float32 number. Its rounding is in parts
of what the terms come to when none cancels another, the sum over t of |a_t| |d_t|, called reach here. A gradient is cut
as if its norm were no less than REACH of that: then no more than 2^-13 of the bound is rounded in a norm, by the worst
of roundings, with 2^10 tokens, and 2^-16 in a sum of 2^12 examples. No gradient of an honest model has terms that
cancel so far.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.models.mt5.modeling_mt5 import MT5LayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.umt5.modeling_umt5 import UMT5LayerNorm

from lorica_security.errors import StateError
from silo_agent.training.model.model import T5

REACH = 2.0**-10

LAYER_NORMS = (T5LayerNorm, MT5LayerNorm, UMT5LayerNorm)
COVERED = (nn.Linear, nn.Embedding, *LAYER_NORMS)
"""Module types whose norms tests compare with those of real gradients."""


def check_covered(model: nn.Module) -> None:
    """Raise StateError unless every trainable parameter belongs to modules of COVERED types, used as their norms
    assume."""
    linear: dict[int, str] = {}
    for name, module in model.named_modules():
        own = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        if not own:
            continue
        if type(module) not in COVERED:
            raise StateError(
                f"module {name or 'of the model'} has type {type(module).__name__}, for which no test covers "
                f"gradients per example: freeze it, or train without differential privacy"
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
class Use:
    """Of one weight in one forward pass: what went in, (B, T, in) or token ids (B, ...), and the gradient of what came
    out.

    B are examples. T has the views of an example one behind the other, `views` of them.
    """

    module: nn.Module
    entered: torch.Tensor
    gradient: torch.Tensor
    views: int = 1


class ExampleGradients:
    """Of `size` examples in one forward and backward pass, of `views` rows each; made anew for each."""

    def __init__(self, size: int, device: torch.device, *, views: int = 1) -> None:
        self._size, self._device, self._views = size, device, views
        self._starts: list[
            torch.Tensor
        ] = []  # outputs that gradients must reach for every other one to be passed on the way
        self.uses: list[Use] = []
        """Of all trained weights, in the order of the backward pass; there after it."""

    @contextmanager
    def recording(self, model: T5) -> Iterator[None]:
        """Around a forward pass."""
        modules = [module for module in model.modules() if isinstance(module, COVERED) and module.weight.requires_grad]
        handles = [module.register_forward_hook(self._entered) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def backward(self, losses: torch.Tensor) -> None:
        """Of the sum of examples' losses, each the mean of its rows' `losses`, down to the first of the recorded
        layers; no weight gets a gradient."""
        torch.autograd.grad(losses.sum() / self._views, self._starts, allow_unused=True)
        # whose hooks hold this: such a circle would keep the whole graph until Python looks for circles
        self._starts.clear()

    def leave_out(self, empty: int) -> None:
        """The last so many examples: they have no gradient, and norms and sums of nothing take as long as others."""
        self._size -= empty
        self.uses = [
            Use(use.module, use.entered[: self._size], use.gradient[: self._size], use.views) for use in self.uses
        ]

    def norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each example's norm, and as what it is to be cut: no less than REACH of its reach. Shapes (B,), float64."""
        squares, reaches = (torch.zeros(self._size, dtype=torch.float64, device=self._device) for _ in range(2))
        for uses in self._by_weight().values():
            square, reach = _square_and_reach(uses)
            squares += square
            reaches += reach.square()
        norms = squares.clamp(min=0.0).sqrt()
        return norms, torch.maximum(norms, REACH * reaches.sqrt())

    def add(self, factors: torch.Tensor, sums: Mapping[int, torch.Tensor]) -> None:
        """Add each example's gradient times its factor, shape (B,), to the sum of its weight, by the weight's id;
        float64.

        An example whose factor is 0 adds nothing, also where its numbers are not finite.
        """
        none = factors == 0.0
        some = bool(none.any())
        while self.uses:
            use = self.uses.pop()
            weight: Any = use.module.weight
            entered, gradient = use.entered, use.gradient.double()
            if some:
                gradient[none] = 0.0
                if entered.is_floating_point():
                    entered = entered.clone()
                    entered[none] = 1.0  # of which a layer norm makes a number, whatever its epsilon is
            gradient *= factors.view(-1, *[1] * (gradient.dim() - 1))
            _add(use.module, entered, gradient, sums[id(weight)])

    def _by_weight(self) -> Mapping[int, Sequence[Use]]:
        by_weight: dict[int, list[Use]] = defaultdict(list)
        for use in self.uses:
            weight: Any = use.module.weight
            by_weight[id(weight)].append(use)
        return by_weight

    def _entered(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        entered = inputs[0]
        if not entered.requires_grad:
            self._starts.append(output)
        output.register_hook(partial(self._left, module, entered.detach()))  # type: ignore[no-untyped-call]

    def _left(self, module: nn.Module, entered: torch.Tensor, gradient: torch.Tensor) -> None:
        self.uses.append(Use(module, self._by_example(entered), self._by_example(gradient.detach()), self._views))

    def _by_example(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(self._size, self._views * rows.shape[1], *rows.shape[2:])


def _add(module: nn.Module, entered: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
    match module:
        case nn.Linear():
            total.addmm_(gradient.flatten(0, -2).mT, entered.double().flatten(0, -2))
        case nn.Embedding():
            total.index_add_(0, entered.flatten(), gradient.reshape(-1, gradient.shape[-1]))
        case T5LayerNorm() | MT5LayerNorm() | UMT5LayerNorm():
            total += (gradient * scaled(module, entered)).flatten(0, -2).sum(dim=0)
        case _:
            raise AssertionError(module)


def _square_and_reach(uses: Sequence[Use]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one weight's gradient, example by example: the square of its norm, and its reach. Shapes (B,), float64."""
    if isinstance(uses[0].module, LAYER_NORMS):
        assert len(uses) == 1, "T5 uses each of its layer norms once"
        terms = uses[0].gradient.double() * scaled(uses[0].module, uses[0].entered)
        return terms.sum(dim=1).square().sum(dim=1), terms.norm(dim=2).sum(dim=1)
    linear = [use for use in uses if isinstance(use.module, nn.Linear)]
    looked_up = [use for use in uses if isinstance(use.module, nn.Embedding)]
    assert len(linear) <= 1, "check_covered refuses linear layers that share a weight"
    squares, reaches = [], []
    if looked_up:
        tokens = torch.cat([use.entered.flatten(1) for use in looked_up], dim=1)
        gradient = torch.cat([use.gradient.flatten(1, -2).double() for use in looked_up], dim=1)
        vocabulary: int = looked_up[0].module.num_embeddings  # type: ignore[assignment]
        squares.append(embedding_square(tokens, gradient, vocabulary, views=looked_up[0].views))
        reaches.append(gradient.norm(dim=2).sum(dim=1))
    for use in linear:
        entered, left = use.entered.double(), use.gradient.double()
        square, reach = linear_square_and_reach(entered, left, views=use.views)
        squares.append(square)
        reaches.append(reach)
        if looked_up:
            of_tokens = left.gather(2, tokens[:, None, :].expand(-1, left.shape[1], -1))
            squares.append(2 * _over_both(of_tokens * torch.bmm(entered, gradient.mT), use.views))
    return torch.stack(squares).sum(dim=0), torch.stack(reaches).sum(dim=0)


def linear_square_and_reach(
    entered: torch.Tensor, gradient: torch.Tensor, *, views: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of (B, T, in) and (B, T, out), float64: shapes (B,)."""
    products = torch.bmm(entered, entered.mT) * torch.bmm(gradient, gradient.mT)
    return _over_both(products, views), products.diagonal(dim1=1, dim2=2).clamp(min=0.0).sqrt().sum(dim=1)


def _over_both(products: torch.Tensor, views: int) -> torch.Tensor:
    """The sum over s and t, shape (B,). Views make both so much longer that one is summed up after the other: what is
    rounded at worst grows with the length of a sum."""
    return products.sum(dim=(1, 2)) if views == 1 else products.sum(dim=2).sum(dim=1)


def embedding_square(tokens: torch.Tensor, gradient: torch.Tensor, vocabulary: int, *, views: int = 1) -> torch.Tensor:
    """Of ids (B, T) and (B, T, dim), float64: shape (B,)."""
    batch, size = tokens.shape[0], gradient.shape[-1]
    if vocabulary * size < tokens.shape[1] ** 2:
        made = gradient.new_zeros(batch, vocabulary, size)
        made.scatter_add_(1, tokens[:, :, None].expand_as(gradient), gradient)
        return made.square().sum(dim=(1, 2))
    equal = tokens[:, :, None] == tokens[:, None, :]
    return _over_both(torch.bmm(gradient, gradient.mT) * equal, views)


def scaled(module: Any, entered: torch.Tensor) -> torch.Tensor:
    """What a layer norm multiplies by its weight, float64."""
    entered = entered.double()
    return entered * torch.rsqrt(entered.square().mean(-1, keepdim=True) + module.variance_epsilon)
