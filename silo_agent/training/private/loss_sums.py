"""What a silo's update weighs under differential privacy: the reduction of its summed loss, and noise.

S_k is the sum over all units of min(loss, B) on the model at point k of the round; the points are the plan's, and the models at
them are private already. A unit of several records counts with their mean. One unit changes each S_k by 0 to B, so max S_k - min S_k by at most B, whatever the number of points.
That holds of exact sums alone: each loss is computed in eval mode and float32, rounded to a grid, and added as an integer.

One record more puts others into other batches, where float32 may round their losses to the neighbouring step of the grid. Losses are
cut at a little less than B, so that there is room for some hundred such records in the noise.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch

from security.privacy.discrete_gaussian import SIGMA, draw
from security.privacy.random_words import RandomWords
from silo_agent.training.batches import EncodedExamples, collate, sorted_batches
from silo_agent.training.model import T5
from silo_agent.training.private.example_losses import example_losses

GRID = 1 << 16
"""Steps of the grid up to the bound B."""
ROOM = 1 << 10
"""Steps, of GRID, that losses are cut below the bound by: records whose losses lie within float32's rounding of a step's edge are one in
a hundred, and move to either side."""


@torch.inference_mode()
def loss_sum(model: T5, examples: EncodedExamples, *, bound: float, batch_size: int, device: torch.device) -> int:
    """S of all examples in steps of bound / GRID; a loss that is not finite counts as one at the bound."""
    was_training = model.training
    model.eval()
    steps = np.zeros(len(examples), dtype=np.int64)
    try:
        for indices in sorted_batches(examples, chosen=range(len(examples)), batch_size=batch_size):
            batch = collate(examples, indices, pad=model.config.pad_token_id, device=device)
            losses = example_losses(model, batch).double().nan_to_num(nan=bound, posinf=bound, neginf=bound)
            rounded = (losses.clamp(0.0, bound) * (GRID / bound)).round().to(torch.int64)
            steps[indices] = rounded.clamp(max=GRID - ROOM).cpu().numpy()
    finally:
        model.train(was_training)
    if examples.units is None:
        return int(steps.sum())
    return sum(int(steps[list(unit)].sum()) // len(unit) for unit in examples.units)


def noised_reduction(
    sums: Sequence[int], *, bound: float, noise_multiplier: float, cap: float, words: RandomWords
) -> float:
    """max - min of `sums`, in units of the loss, with noise of `noise_multiplier` x `bound`, cut to 0 to `cap`."""
    if not noise_multiplier > 0.0 or not math.isfinite(noise_multiplier * bound):
        raise ValueError(f"noise_multiplier is {noise_multiplier}, bound {bound}: both are above 0")
    step = Fraction(noise_multiplier) * Fraction(bound) / SIGMA
    exact = Fraction(bound) * (max(sums) - min(sums)) / GRID
    noised = float((round(exact / step) + int(draw(words, 1)[0])) * step)
    return min(max(noised, 0.0), cap)
