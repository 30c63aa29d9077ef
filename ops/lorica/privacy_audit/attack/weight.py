"""Target `weight`: the noised scaled loss reduction alone, with a canary of
the largest influence that one record can have.

The canary's loss counts as the whole bound under the round model and as next to nothing under the
trained one. Each coin has a release of its own; the sums that it is made of, with the canary and
without, are computed once, by the function that silos use.
"""

import copy
import math
from functools import lru_cache

import numpy as np
import torch

from lorica.privacy_audit.attack.canaries import Truths, Vector, canary_model, examples_of, trained
from lorica_security.errors import StateError
from lorica_security.noise.random_words import RandomWords
from silo_agent.training.data.batches import EncodedExamples, collate
from silo_agent.training.model.model import T5
from silo_agent.training.private.loss_sums import GRID, loss_sum, noised_reduction
from silo_agent.training.private.per_example.chunks import Chunks
from silo_agent.training.private.per_example.example_losses import example_losses

BOUND = 1.0
_OTHERS = 63
"""Records beside the canary: so many that no noise takes the reduction below 0, where it is cut."""
_LEARNT, _MOST_STEPS = 0.01, 500
_CPU = torch.device("cpu")


def attack_weight(included: Truths, *, noise_multiplier: float, claimed: float, seed: int, key: bytes) -> Vector:
    """The evidence for each coin; `noise_multiplier` is what is drawn
    with, `claimed` what the attacker reckons with.
    """
    model, learnt = models(seed)
    records = _OTHERS + math.ceil(8 * claimed)
    sums = {there: [_sum(one, records + there) for one in (model, learnt)] for there in (False, True)}
    without, with_canary = ((before - after) * BOUND / GRID for before, after in (sums[False], sums[True]))
    words = RandomWords(key)
    released = np.array(
        [
            noised_reduction(
                *sums[bool(there)],
                bound=BOUND,
                noise_multiplier=noise_multiplier,
                cap=2.0 * BOUND * records,
                words=words,
            )
            for there in included
        ]
    )
    found: Vector = (released - (without + with_canary) / 2) * (with_canary - without) / (claimed * BOUND) ** 2
    return found


@lru_cache(maxsize=1)
def models(seed: int) -> tuple[T5, T5]:
    """Before it learnt the canary, and after: the same for each claim, with noise and without."""
    model = canary_model(1, seed)
    learnt = copy.deepcopy(model)
    _learn(learnt)
    return model, learnt


def _sum(model: T5, records: int) -> int:
    return loss_sum(model, _copies(records), Chunks(model, most=64), bound=BOUND)


def _copies(records: int) -> EncodedExamples:
    row = examples_of(np.array([True])).inputs[0]
    rows = (row,) * records
    return EncodedExamples(inputs=rows, targets=rows, inputs_cut=0, targets_cut=0, targets_with_unknown=0)


def _learn(model: T5) -> None:
    """Until the one record there is has next to no loss."""
    optimizer = torch.optim.AdamW(trained(model), lr=0.05)
    batch = collate(_copies(1), [0], pad=0, device=_CPU)
    for _ in range(_MOST_STEPS):
        loss = example_losses(model, batch).sum()
        if float(loss.detach()) < _LEARNT * BOUND:
            return
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    raise StateError(
        f"the canary of the weight's audit has a loss of {float(loss.detach()):.3g} still: try another seed"
    )
