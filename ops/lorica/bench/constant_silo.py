"""The silo agent's own command with numbers that are always the same in the place of local training.

`python -m lorica.bench.constant_silo start ...`

Everything else is what runs at a silo: the round model is downloaded, verified and loaded into a T5, the delta is
taken, encoded, written, digested, signed, journaled and uploaded.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from silo_agent.cli import main
from silo_wire.messages import TrainingSummary

STEP = 2.0**-10
"""The size of what each round adds to a parameter of every silo's model, and so to the global model's under FedAvg."""
_TOGETHER = 65_537
"""A prime: no column of any tensor has the same few numbers again and again, which silos spread, too."""


@cache
def steps() -> torch.Tensor:
    """What a round adds to a tensor, again and again: normal numbers, since silos spread what is all alike (ADR 16)."""
    return STEP * torch.randn(_TOGETHER, generator=torch.Generator().manual_seed(1))


def moved(parameter: torch.Tensor, *, rounds: int = 1) -> torch.Tensor:
    """`parameter`, changed in place by so many rounds."""
    added = rounds * steps()
    for part in torch.split(parameter.view(-1), _TOGETHER):
        part.add_(added[: len(part)].to(part.dtype))
    return parameter


def take_known_steps(_model: object, parameters: Sequence[nn.Parameter], *_: Any, **__: Any) -> TrainingSummary:
    """As `silo_agent.training.local_trainer.train_locally`, at the cost of one pass over the parameters."""
    with torch.no_grad():
        for parameter in parameters:
            moved(parameter)
    return TrainingSummary(
        examples=100, loss_max=2.0, loss_min=1.0, loss_first=2.0, loss_last=1.0, optimizer_steps=1, seconds=0.0
    )


if __name__ == "__main__":
    with patch("silo_agent.training.silo_trainer.train_locally", take_known_steps):
        main()
