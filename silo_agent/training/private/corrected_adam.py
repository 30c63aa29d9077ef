"""Adam whose second moment is freed of the noise that privacy adds: DP-AdamBC
(Tang, Shpilevskiy and Lecuyer 2024, algorithm 1).

A private gradient is the gradient and noise of known variance s^2. Adam's mean of squares estimates
the gradient's square plus s^2, and where noise is most of it, each parameter moves by its gradient
over one and the same s, as in gradient descent. Here s^2 is taken off again. s is a number of the
plan, and nothing but noised gradients is read: post-processing.

Moments are kept of gradients over s, so that no scale of gradients leaves
float32's range: the noise's variance is 1 then.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

BETA1, BETA2 = 0.9, 0.999
"""Those of torch's AdamW."""


class CorrectedAdam(torch.optim.Optimizer):
    """p -= lr * (weight_decay * p + m / sqrt(max(v - s^2, floor * s^2))), m
    and v without the bias of their beginning at 0.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        noise_deviation: float,
        floor: float,
    ) -> None:
        """`noise_deviation` is s, in units of the gradient; `floor` is in units of
        s^2. Raises ValueError unless both are above 0.
        """
        for name, value in (("noise_deviation", noise_deviation), ("floor", floor)):
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} is {value}: without noise there is nothing to correct; give a number above 0")
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self._noise_deviation, self._floor = noise_deviation, floor

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Takes no closure: a private gradient is made once."""
        assert closure is None, "a private gradient is made once"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, lr=group["lr"], weight_decay=group["weight_decay"])

    def _move(self, parameter: nn.Parameter, *, lr: float, weight_decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0.0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient = parameter.grad / self._noise_deviation
        state["step"] += 1.0
        first = state["exp_avg"].lerp_(gradient, 1 - BETA1)
        second = state["exp_avg_sq"].mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        square = (second / (1 - BETA2 ** state["step"])).sub_(1.0).clamp_(min=self._floor)
        parameter.mul_(1 - lr * weight_decay)
        parameter.addcdiv_(first, square.sqrt_(), value=-lr / (1 - BETA1 ** state["step"]))
