"""Target `trainer`: the real train_privately, and an attacker who sees the model after every step of it."""

import copy
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from lorica.privacy_audit.attack.canaries import (
    AdamWReader,
    Decoder,
    Truths,
    Vector,
    evidence,
    examples_of,
    section_for,
    trained,
)
from lorica_security.noise.random_words import RandomWords
from silo_agent.training.model.model import T5
from silo_agent.training.private.private_trainer import PrivateSchedule, train_privately
from silo_wire.plans.privacy import PrivacySection


def attack_trainer(
    model: T5, decoder: Decoder, included: Truths, privacy: PrivacySection, *, noise: bool, key: bytes
) -> Vector:
    """The evidence for each canary that a training of `privacy` gives
    away, without its noise where `noise` is false.
    """
    model = copy.deepcopy(model)
    parameters = trained(model)
    section = section_for(privacy.expected_batch_size)
    models = [_flat(parameters)]
    train_privately(
        model,
        parameters,
        examples_of(included),
        section,
        PrivateSchedule(
            sampling_rate=privacy.sampling_rate,
            steps=privacy.steps,
            expected_batch_size=privacy.expected_batch_size,
            noise_multiplier=privacy.noise_multiplier if noise else 0.0,
            max_grad_norm=section.max_grad_norm,
            loss_bound=privacy.loss_bound,
            loss_noise_multiplier=None,
            weight_cap=privacy.weight_cap,
        ),
        backend="ghost",
        words=RandomWords(key),
        on_progress=lambda fraction: models.append(_flat(parameters)),
        should_stop=lambda: False,
    )
    reader = AdamWReader(section.learning_rate)
    scale = privacy.expected_batch_size / section.max_grad_norm
    total = np.zeros(len(included))
    for before, after in pairwise(models):
        estimates, deviations = decoder.estimates(reader.read(after - before) * scale)
        total += evidence(estimates, deviations, privacy.sampling_rate)
    return total


def _flat(parameters: Sequence[nn.Parameter]) -> Vector:
    flat: Vector = torch.cat([parameter.detach().flatten() for parameter in parameters]).double().numpy()
    return flat
