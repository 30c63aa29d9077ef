"""The local optimizers and their learning-rate schedule, made anew for every round; what privacy alone has is in
private/."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn
from transformers import Adafactor

from silo_wire.plans.sections.training import TrainingSection

_adafactor: Callable[..., torch.optim.Optimizer] = Adafactor  # its constructor has no types


def local_optimizer(section: TrainingSection, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, plain SGD, or Adafactor as in Zhang et al. 2023: fixed learning rate, no scaling by the parameter's size.

    Raises ValueError for "adam_corrected", which corrects for noise and so is private training's alone.
    """
    if section.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=section.learning_rate, weight_decay=section.weight_decay, fused=True)
    if section.optimizer == "sgd":  # its decay times the rate, as AdamW's is
        return torch.optim.SGD(parameters, lr=section.learning_rate, weight_decay=section.weight_decay, fused=True)
    if section.optimizer == "adam_corrected":
        raise ValueError('[training] optimizer = "adam_corrected" has no noise to correct for here: use "adamw"')
    # torch.optim.Adafactor always scales by the parameter's RMS, so it cannot do this; transformers' can.
    return _adafactor(
        parameters,
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        scale_parameter=False,
        relative_step=False,
        warmup_init=False,
    )


def learning_rate_factor(schedule: Literal["constant", "linear"], step: int, steps: int) -> float:
    """What the learning rate is multiplied by at optimizer step `step` (from 0) of `steps`; linear reaches 0 after the
    last."""
    return 1.0 if schedule == "constant" else (steps - step) / steps
