"""The loss of one sample of a silo's examples, which a round's loss reduction is evaluated on: at the round model and
again at the local model.

Both times it is the same sample in the same batches, without dropout: the mean over the examples of the mean loss of
each one's target tokens. So an example counts the same however long its query is, and a silo the same however many
optimizer steps it makes.

A plan may have a silo tell a moving average of its reductions over rounds, whatever they are measured by.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Final

import torch

from silo_agent.rounds.update import TrainingDiverged, TrainingStopped
from silo_agent.training.data.batches import EncodedExamples, collate, sorted_batches
from silo_agent.training.device import autocast
from silo_agent.training.draws import Seed, begun
from silo_agent.training.model.model import T5
from silo_agent.training.ranks.ranks import ALONE, Ranks
from silo_agent.training.task_loss import example_means
from silo_wire.messages import TrainingSummary
from silo_wire.plans.sections.training import TrainingSection

MOST_EXAMPLES: Final = 256
"""Of a sample. As many tell the loss to a fifteenth of its spread between examples."""


def drawn_sample(examples: int, seed: Seed) -> list[int]:
    """The indices of a round's sample: all examples where there are no more than a sample has."""
    if examples <= MOST_EXAMPLES:
        return list(range(examples))
    order: list[int] = torch.randperm(examples, generator=begun(torch.Generator(), seed))[:MOST_EXAMPLES].tolist()
    return order


@torch.no_grad()
def sample_loss(
    model: T5,
    examples: EncodedExamples,
    sample: Sequence[int],
    section: TrainingSection,
    *,
    should_stop: Callable[[], bool],
    ranks: Ranks = ALONE,
) -> float:
    """In the plan's precision, as training computes it; the model is left in the mode that it was in. Each rank
    evaluates its share of the batches, and what comes of it is the same with any number of ranks.

    Raises TrainingStopped soon after `should_stop()` turns true, TrainingDiverged for a loss that is not finite.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    batches = list(sorted_batches(examples, chosen=sample, batch_size=section.batch_size))
    means = torch.zeros(len(sample), dtype=torch.float32, device=device)
    begins = [0, *accumulate(map(len, batches))]
    try:
        for row in ranks.rows(range(len(batches))):
            if ranks.any(should_stop()):
                raise TrainingStopped
            if row is None and not ranks.sharded:
                continue
            # What others wait for to compute with is computed with here as well, and does not count.
            indices = batches[row or 0]
            batch = collate(examples, indices, pad=model.config.pad_token_id, device=device)
            with autocast(device, section.precision):
                own = ranks.computed(model, partial(example_means, batch=batch))
            if row is not None:
                means[begins[row] : begins[row + 1]] = own
    finally:
        model.train(was_training)
    # Each number is of one rank, and 0 of the others: the sum is exact.
    losses: list[float] = ranks.sum(means).tolist()
    if not math.isfinite(loss := math.fsum(losses) / len(losses)):
        raise TrainingDiverged(
            f"training diverged: the loss of {len(losses)} examples in evaluation is {loss}: "
            f"lower learning_rate ({section.learning_rate:g}) in the plan"
        )
    return loss


def averaged(summary: TrainingSummary, *, memory: float, told_before: float | None) -> TrainingSummary:
    """With the reduction (1 - memory) x this round's + memory x what was told before; without one, this round's.

    What was told before is an average itself, so that a round's own reduction counts `memory` times as much with each
    round that goes by.
    """
    if told_before is None or not memory:
        return summary
    told = (1 - memory) * summary.loss_reduction + memory * told_before
    return replace(summary, loss_max=summary.loss_min + told)
