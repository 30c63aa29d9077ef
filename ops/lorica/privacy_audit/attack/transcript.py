"""Target `transcript`: several rounds of the real SiloTrainer, and an attacker
who sees what leaves the silo, and nothing else.

That is each round's update file and the summary beside it, in which the noised scaled loss reduction is. Each
round has one step, and the next round model is the last one with the delta added, as FedAvg of one silo makes
it. Noise comes from the operating system here, as it does at a silo.
"""

import copy
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lorica.privacy_audit.attack.canaries import (
    AdamWReader,
    Decoder,
    Truths,
    Vector,
    Weight,
    evidence,
    examples_of,
    section_for,
    trained,
)
from lorica.privacy_audit.conformity.audited_plan import SILO, bundle_of, data_of, word
from silo_agent.training.data.batches import collate
from silo_agent.training.data.text_to_sql_data import Example, SiloData
from silo_agent.training.device import DeviceSettings
from silo_agent.training.model.model import T5, bind, vector_blocks
from silo_agent.training.private.loss_sums import GRID
from silo_agent.training.private.per_example.example_losses import example_losses
from silo_agent.training.silo_trainer import SiloTrainer
from silo_wire.manifest import manifest_of
from silo_wire.plans.privacy import PrivacySection

LEAST_LOSS_NOISE = 1e-6
"""Of a weight without noise: the function that releases it refuses to do without."""
_LOSSES_AT_ONCE = 256

Floats = NDArray[np.float32]


def attack_transcript(
    model: T5,
    decoder: Decoder,
    included: Truths,
    privacy: PrivacySection,
    *,
    rounds: int,
    noise: bool,
    work: Path,
) -> Vector:
    """The evidence for each canary that `rounds` rounds of one step give away; `work` is an empty folder."""
    if not noise:
        privacy = privacy.model_copy(update={"noise_multiplier": 0.0, "loss_noise_multiplier": LEAST_LOSS_NOISE})
    bundle = bundle_of(model, section_for(privacy.expected_batch_size), privacy, rounds)
    trainer = SiloTrainer(bundle, _data(included), SILO, DeviceSettings(device="cpu", threads=torch.get_num_threads()))
    section = bundle.plan.training
    scale = privacy.expected_batch_size / section.max_grad_norm
    attacked = copy.deepcopy(model)
    vector: Floats = np.frombuffer(b"".join(vector_blocks(bind(model, bundle.layout))), dtype="<f4")
    total = np.zeros(len(included))
    for number in range(1, rounds + 1):
        path, update_path = work / f"model-{number}", work / f"update-{number}"
        path.write_bytes(vector.tobytes())
        update = trainer.train(
            round_number=number,
            model_path=path,
            model=manifest_of(bundle.model_layout, [vector.tobytes()]),
            update_path=update_path,
        )
        delta: Floats = np.fromfile(update_path, dtype="<f4", count=len(vector))
        gradient = AdamWReader(section.learning_rate).read(delta.astype(np.float64)) * scale
        before, vector = vector, vector + delta
        reductions = _losses(attacked, before, included, privacy) - _losses(attacked, vector, included, privacy)
        summary = update.summary
        weight = Weight(
            parts=reductions,
            total=summary.examples * (summary.loss_max - summary.loss_min),
            deviation=math.hypot(
                privacy.loss_noise_multiplier * privacy.loss_bound,
                math.sqrt(len(included)) * privacy.loss_bound / GRID,  # each loss is rounded
            ),
        )
        total += evidence(*decoder.estimates(gradient, weight if weight.total > 0.0 else None), privacy.sampling_rate)
    return total


def _data(included: Truths) -> SiloData:
    return data_of(
        [Example(f"train-{canary}", word(int(canary)), word(int(canary)), SILO) for canary in np.flatnonzero(included)]
    )


@torch.inference_mode()
def _losses(model: T5, vector: Floats, included: Truths, privacy: PrivacySection) -> Vector:
    """Of every canary, in the data or not, under the model that `vector` is."""
    torch.nn.utils.vector_to_parameters(torch.from_numpy(vector.copy()), trained(model))
    examples = examples_of(np.ones_like(included))
    losses = []
    for start in range(0, len(examples), _LOSSES_AT_ONCE):
        indices = range(start, min(start + _LOSSES_AT_ONCE, len(examples)))
        batch = collate(examples, indices, pad=0, device=torch.device("cpu"))
        losses.append(example_losses(model, batch).double().clamp(0.0, privacy.loss_bound).numpy())
    return np.concatenate(losses)
