"""What a silo's update weighs under differential privacy: the reduction of its summed loss, and noise.

S is the sum over all units of min(loss, B), on the model before the round and on the one after it; both are private
already. A unit of several records counts with their mean. One unit changes each S by 0 to B, so S_before - S_after by
at most B. A loss that rose weighs nothing. That holds of exact sums alone: each loss is computed in eval mode and
float32, from its record and the model alone (chunks.py), rounded to a grid, and added as an integer.
"""

import math
from array import array
from fractions import Fraction

import numpy as np
import torch

from lorica_security.noise.discrete_gaussian import SIGMA, draw
from lorica_security.noise.random_words import RandomWords
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.model.model import T5
from silo_agent.training.private.once_among_ranks import require_each_once, share_of, side_by_side
from silo_agent.training.private.per_example.chunks import Chunks
from silo_agent.training.private.per_example.example_losses import example_losses
from silo_agent.training.ranks.ranks import ALONE, Ranks

GRID = 1 << 16
"""Steps of the grid up to the bound B."""


@torch.inference_mode()
def loss_sum(model: T5, examples: EncodedExamples, chunks: Chunks, *, bound: float, ranks: Ranks = ALONE) -> int:
    """S of all examples in steps of bound / GRID; a loss that is not finite counts as one at the bound. Further views
    do not count. Of `ranks` each computes a share of the losses, and all come to the same S, exactly."""
    was_training = model.training
    model.eval()
    steps = np.zeros(len(examples), dtype=np.int64)
    plain, every, computed = examples.plain(), range(len(examples)), array("q")
    try:
        for indices, batch in side_by_side(chunks.of(plain, share_of(plain, every, ranks)), ranks):
            computed.extend(indices)
            losses = (
                example_losses(model, batch)[: len(indices)].double().nan_to_num(nan=bound, posinf=bound, neginf=bound)
            )
            steps[indices] = (losses.clamp(0.0, bound) * (GRID / bound)).round().to(torch.int64).cpu().numpy()
    finally:
        model.train(was_training)
    if ranks.world > 1:
        require_each_once("losses", every, computed, ranks)
        ranks.sum_on_host(torch.from_numpy(steps))
    if examples.units is None:
        return int(steps.sum())
    return sum(int(steps[list(unit)].sum()) // len(unit) for unit in examples.units)


def noised_reduction(
    before: int, after: int, *, bound: float, noise_multiplier: float, cap: float, words: RandomWords
) -> float:
    """What the sum fell by, in units of the loss, with noise of `noise_multiplier` x `bound`, cut to 0 to `cap`."""
    if not noise_multiplier > 0.0 or not math.isfinite(noise_multiplier * bound):
        raise ValueError(f"noise_multiplier is {noise_multiplier}, bound {bound}: both are above 0")
    step = Fraction(noise_multiplier) * Fraction(bound) / SIGMA
    exact = Fraction(bound) * max(0, before - after) / GRID
    noised = float((round(exact / step) + int(draw(words, 1)[0])) * step)
    return min(max(noised, 0.0), cap)
