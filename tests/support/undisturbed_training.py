"""Local training by the agents' own trainer that nobody watches, stops or resumes."""

from collections.abc import Sequence

import torch
from torch import nn

from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.local_trainer import train_locally
from silo_agent.training.loss_reduction import drawn_sample
from silo_agent.training.model.model import T5
from silo_wire.messages import TrainingSummary
from silo_wire.plans.sections.training import TrainingSection


def train_undisturbed(
    model: T5,
    parameters: Sequence[nn.Parameter],
    examples: EncodedExamples,
    section: TrainingSection,
    *,
    seed: int,
    round_parameters: Sequence[torch.Tensor] | None = None,
) -> TrainingSummary:
    """Train `model` in place, as `train_locally` does."""
    return train_locally(
        model,
        parameters,
        examples,
        section,
        seed=seed,
        sample=drawn_sample(len(examples), seed) if section.loss_reduction == "evaluated" else None,
        round_parameters=round_parameters,
        checkpoint=None,
        on_progress=lambda fraction, loss: None,
        should_stop=lambda: False,
        clock=lambda: 0.0,
    )
