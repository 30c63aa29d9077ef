"""The sum of clipped gradients of a step's examples, of which none counts for more than the bound, whatever the model's
weights are.

    ghost   one backward pass for a chunk of examples, norms and sums from what entered each layer and the gradient of
            what left it
    loop    the gradient of one example after the other, as autograd makes it: what the other is compared with

In both, what an example adds follows from the example and the model alone (chunks.py), its norm is taken of that very
addend, and all of it in float64, in which no product of two float32 numbers is too large or too small: the bound does
not rest on weights, or on layers, being as trained models have them.

Where examples have several views (views.py), an example's gradient is the mean over its views, and it is that mean
which is clipped: it adds no more than an example without views, and costs no more of a budget.

An example whose loss or gradient is not finite counts as zero: to leave the step out, or to end, would tell that it is
there.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn

from silo_agent.training.data.batches import Batch
from silo_agent.training.model.model import T5
from silo_agent.training.private.per_example.batched_bias import batched_bias
from silo_agent.training.private.per_example.chunks import unpadded
from silo_agent.training.private.per_example.example_losses import example_losses
from silo_agent.training.private.per_example.ghost_norms import ExampleGradients

Backend = Literal["ghost", "loop"]

MARGIN = 2.0**-10
"""Gradients are clipped to less than the bound by this part of it: for what float64 rounds in norms and in sums of
thousands."""


class Clipping(Protocol):
    def accumulate(self, batch: Batch) -> torch.Tensor:
        """Add the clipped gradients of the batch's examples to `summed_grad` of each parameter, float64; their norms
        before clipping."""


def clipping(backend: Backend, model: T5, parameters: Sequence[nn.Parameter], *, max_grad_norm: float) -> Clipping:
    """For the trainable `parameters` of `model`; gradients are clipped to an L2 norm below `max_grad_norm`."""
    for parameter in parameters:
        parameter.summed_grad = None  # type: ignore[attr-defined]  # Opacus' name for it
    bound = max_grad_norm * (1 - MARGIN)
    return Ghost(model, parameters, bound) if backend == "ghost" else Loop(model, parameters, bound)


class Ghost:
    def __init__(self, model: T5, parameters: Sequence[nn.Parameter], bound: float) -> None:
        self._model, self._parameters, self._bound = model, parameters, bound

    def accumulate(self, batch: Batch) -> torch.Tensor:
        """`batch` is a chunk of chunks.py: its examples have one shape."""
        gradients = ExampleGradients(batch.examples, batch.labels.device, views=batch.views)
        with gradients.recording(self._model), batched_bias(self._model, len(batch.labels)):
            losses = example_losses(self._model, batch)
        gradients.backward(losses)
        if batch.empty:
            gradients.leave_out(batch.empty)
        norms, limits = gradients.norms()
        factors = clip_factors(limits, self._bound)
        sums = {id(parameter): _sum_of(parameter) for parameter in self._parameters}
        gradients.add(factors, sums)
        return norms


class Loop:
    def __init__(self, model: T5, parameters: Sequence[nn.Parameter], bound: float) -> None:
        self._model, self._parameters, self._bound = model, parameters, bound

    def accumulate(self, batch: Batch) -> torch.Tensor:
        return torch.stack(
            [self._add(batch.rows_of(index, index + 1)) for index in range(batch.examples - batch.empty)]
        )

    def _add(self, example: Batch) -> torch.Tensor:
        views = [example_losses(self._model, unpadded(example, view)) for view in range(example.views)]
        loss = torch.cat(views).mean()
        made: Sequence[torch.Tensor | None] = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        gradients = [None if gradient is None else gradient.double() for gradient in made]
        squares = [gradient.square().sum() for gradient in gradients if gradient is not None]
        norm = torch.stack(squares).sum().sqrt()
        factor = float(clip_factors(norm[None], self._bound))
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            total = _sum_of(parameter)
            if gradient is not None and bool(norm.isfinite()):
                total.add_(gradient, alpha=factor)
        return norm


def _sum_of(parameter: Any) -> torch.Tensor:
    if parameter.summed_grad is None:
        parameter.summed_grad = torch.zeros_like(parameter, dtype=torch.float64)
    total: torch.Tensor = parameter.summed_grad
    return total


def clip_factors(norms: torch.Tensor, bound: float) -> torch.Tensor:
    """What each gradient is multiplied by, float64; 0 where the norm is not finite."""
    norms = norms.double()
    return torch.where(norms.isfinite(), (bound / norms.clamp(min=bound)), 0.0)
