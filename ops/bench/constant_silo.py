"""The silo agent's own command, but with a constant in the place of local training: `python -m ops.bench.constant_silo start ...`.

Everything else is what runs at a silo: the round model is downloaded, verified and loaded into a T5, the delta is taken,
encoded, written, digested, signed, journaled and uploaded.
"""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from silo_agent.cli import main
from silo_wire.messages import TrainingSummary

STEP = 2.0**-10
"""What each round adds to each parameter of every silo's model, and so to the global model's under FedAvg."""


def add_a_constant(_model: object, parameters: Sequence[nn.Parameter], *_: Any, **__: Any) -> TrainingSummary:
    """As `silo_agent.training.local_trainer.train_locally`, at the cost of one pass over the parameters."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(STEP)
    return TrainingSummary(
        examples=100, loss_max=2.0, loss_min=1.0, loss_first=2.0, loss_last=1.0, optimizer_steps=1, seconds=0.0
    )


if __name__ == "__main__":
    with patch("silo_agent.training.silo_trainer.train_locally", add_a_constant):
        main()
