"""The sum of clipped gradients of a batch's examples, in three ways that give the same.

    ghost   norms from activations (ghost_norms.py), then one backward pass of the losses, each times its factor: memory of training;
            of adapters without that second pass
    hooks   Opacus' hooks make the gradient of every example: memory of so many models, quick for few parameters
    loop    one example after the other: what the others are compared with, and no slower than they on a small machine

An example whose loss or gradient is not finite counts as zero: to leave the step out, or to end, would tell that it is there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.utils import register_grad_sampler
from torch import nn
from transformers.models.t5.modeling_t5 import T5LayerNorm

from silo_agent.training.batches import IGNORED, Batch
from silo_agent.training.model import T5
from silo_agent.training.private.batched_bias import batched_bias
from silo_agent.training.private.example_losses import example_losses, losses_of_kept
from silo_agent.training.private.ghost_norms import GhostNorms, are_adapters

Backend = Literal["ghost", "hooks", "loop"]

MARGIN = 2.0**-10
"""Gradients are clipped to less than the bound by this part of it: for what float32 rounds in sums and in norms, and for the grid that
noise is added on (exact_noise.py), on which two neighbouring sums may be further apart by a step in each coordinate."""


class Clipping(Protocol):
    def accumulate(self, batch: Batch) -> torch.Tensor:
        """Add the batch's clipped gradients to `summed_grad` of each parameter; the norms before clipping, shape (B,)."""

    def close(self) -> None:
        """Leave the model as it was."""


def clipping(backend: Backend, model: T5, parameters: Sequence[nn.Parameter], *, max_grad_norm: float) -> Clipping:
    """For the trainable `parameters` of `model`; gradients are clipped to an L2 norm below `max_grad_norm`."""
    for parameter in parameters:
        parameter.summed_grad = None  # type: ignore[attr-defined]  # Opacus' name for it
    bound = max_grad_norm * (1 - MARGIN)
    match backend:
        case "ghost":
            return Ghost(model, parameters, bound)
        case "hooks":
            return Hooks(model, parameters, bound)
        case "loop":
            return Loop(model, parameters, bound)


class Ghost:
    def __init__(self, model: T5, parameters: Sequence[nn.Parameter], bound: float) -> None:
        self._model, self._parameters, self._bound = model, parameters, bound
        self._adapters = are_adapters(model)

    def accumulate(self, batch: Batch) -> torch.Tensor:
        size = len(batch.labels)
        kept = (batch.labels != IGNORED).sum(dim=1).tolist()
        ghost = GhostNorms(kept, batch.labels.device, adapters=self._adapters)
        with ghost.recording(self._model), batched_bias(self._model, size):
            losses = losses_of_kept(self._model, batch)
        torch.autograd.grad(losses.sum(), ghost.starts, retain_graph=not self._adapters, allow_unused=True)
        ghost.starts.clear()  # whose hooks hold `ghost`: such a circle would keep the whole graph until Python looks for circles
        norms = ghost.norms()
        finite = norms.isfinite()
        factors = clip_factors(norms, self._bound)
        if bool(finite.all()) and self._adapters:
            for parameter, total in ghost.clipped_sums(factors):
                parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
            self._keep()
        elif bool(finite.all()):
            (losses * factors.to(losses.dtype)).sum().backward()  # type: ignore[no-untyped-call]
            self._keep()
        elif bool(finite.any()):
            del losses
            self.accumulate(chosen(batch, finite))
        return norms

    def _keep(self) -> None:
        """Further backward passes add to the same memory."""
        for parameter in self._parameters:
            parameter.summed_grad = parameter.grad  # type: ignore[attr-defined]

    def close(self) -> None:
        pass


class Hooks:
    def __init__(self, model: T5, parameters: Sequence[nn.Parameter], bound: float) -> None:
        self._model, self._parameters, self._bound = model, parameters, bound
        self._hooks = GradSampleHooks(model, loss_reduction="sum", batch_first=True, strict=True)

    def accumulate(self, batch: Batch) -> torch.Tensor:
        with batched_bias(self._model, len(batch.labels)):
            example_losses(self._model, batch).sum().backward()  # type: ignore[no-untyped-call]
        gradients: list[Any] = [parameter.grad_sample for parameter in self._parameters]  # type: ignore[attr-defined]
        squares = [gradient.flatten(1).square().sum(dim=1, dtype=torch.float64) for gradient in gradients]
        norms = torch.stack(squares).sum(dim=0).sqrt()
        factors = clip_factors(norms, self._bound)
        whole = bool(norms.isfinite().all())
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if not whole:
                gradient[~norms.isfinite()] = 0.0
            total = torch.einsum("i,i...->...", factors.to(gradient.dtype), gradient)
            kept: Any = parameter
            kept.summed_grad = total if kept.summed_grad is None else kept.summed_grad.add_(total)
            kept.grad_sample = kept.grad = None
        return norms

    def close(self) -> None:
        self._hooks.cleanup()


class Loop:
    def __init__(self, model: T5, parameters: Sequence[nn.Parameter], bound: float) -> None:
        self._model, self._parameters, self._bound = model, parameters, bound

    def accumulate(self, batch: Batch) -> torch.Tensor:
        norms = []
        for index in range(len(batch.labels)):
            norms.append(self._add(unpadded(batch, index)))
        return torch.stack(norms)

    def _add(self, example: Batch) -> torch.Tensor:
        loss = example_losses(self._model, example).sum()
        gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        there = [gradient for gradient in gradients if gradient is not None]
        norm = torch.stack([gradient.square().sum(dtype=torch.float64) for gradient in there]).sum().sqrt()
        if not bool(norm.isfinite()):
            return norm
        factor = float(clip_factors(norm[None], self._bound))
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            kept: Any = parameter
            if kept.summed_grad is None:
                kept.summed_grad = torch.zeros_like(parameter)
            if gradient is not None:
                kept.summed_grad.add_(gradient, alpha=factor)
        return norm

    def close(self) -> None:
        pass


def clip_factors(norms: torch.Tensor, bound: float) -> torch.Tensor:
    """What each gradient is multiplied by; 0 where the norm is not finite."""
    factors = (bound / norms.clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1.0)
    return torch.where(norms.isfinite(), factors, 0.0)


def chosen(batch: Batch, which: torch.Tensor) -> Batch:
    """The examples for which `which`, shape (B,), is true, as they are padded."""
    return Batch(
        input_ids=batch.input_ids[which],
        attention_mask=batch.attention_mask[which],
        labels=batch.labels[which],
        target_tokens=batch.target_tokens,
    )


def unpadded(batch: Batch, index: int) -> Batch:
    """One example of a batch, shape (1, ...), without the padding that the others brought."""
    mask = batch.attention_mask[index : index + 1]
    labels = batch.labels[index : index + 1]
    source = max(1, int(mask.sum()))
    target = max(1, int((labels >= 0).sum()))
    return Batch(
        input_ids=batch.input_ids[index : index + 1, :source],
        attention_mask=mask[:, :source],
        labels=labels[:, :target],
        target_tokens=target,
    )


@register_grad_sampler(T5LayerNorm)  # type: ignore[untyped-decorator]
def _layer_norm_gradients(
    layer: Any, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    entered = activations[0]
    scaled = entered * torch.rsqrt(entered.float().square().mean(-1, keepdim=True) + layer.variance_epsilon)
    return {layer.weight: (backprops * scaled).sum(dim=1)}


@contextmanager
def without_dropout(model: T5) -> Iterator[None]:
    """Training mode, in which Opacus' hooks work, but what eval mode computes."""
    was_training = model.training
    rates = [
        (module, name, getattr(module, name))
        for module in model.modules()
        for name in ("p", "dropout")
        if isinstance(getattr(module, name, None), float)
    ]
    model.train()
    for module, name, _ in rates:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)
        model.train(was_training)
