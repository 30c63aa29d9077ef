"""Opacus' DPOptimizer around a local optimizer, with noise that protects.

Clipping (clipping.py) has left the sum of clipped gradients in `summed_grad` of each parameter, of any number of physical batches,
or None where the sample was empty. A step adds noise to it once, divides by the plan's expected batch size, which is public, and
lets the optimizer do as it would: what it makes of a private gradient is post-processing.
"""

from collections.abc import Callable

import torch
from opacus.optimizers import DPOptimizer

from security.privacy.random_words import RandomWords
from silo_agent.training.private.exact_noise import add_noise


class PrivateOptimizer(DPOptimizer):  # type: ignore[misc]
    """`step` is one release. `step_hook`, if attached, is called after noise was added and before anything depends on it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int,
        words: RandomWords,
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
        )
        self._words = words

    @property
    def accumulated_iterations(self) -> int:
        """Physical batches were added up, not averaged."""
        return 1

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        self.add_noise()
        self.scale_grad()
        if self.step_hook:
            self.step_hook(self)
        return True

    def add_noise(self) -> None:
        deviation = self.noise_multiplier * self.max_grad_norm
        for parameter in self.params:
            total = parameter.summed_grad
            if total is None:
                total = torch.zeros_like(parameter)
            if deviation > 0.0:
                noised = total.detach().cpu().contiguous()
                add_noise(noised.view(-1).numpy(), deviation=deviation, words=self._words)
                total.copy_(noised)
            parameter.grad = total
            parameter.summed_grad = None
