"""One round of local training under record-level differential privacy (Abadi et al. 2016), from the round model to the
local one.

Every step sees a Poisson sample of the units, which may be empty: then it is noise alone. A unit is one record, or all
records of one to whom several belong, of which a sampled unit gives one at random: no unit has more than one clipped
gradient in a step. What a step is divided by, how many there are, how much noise they have and when checkpoints are
written, depends on the plan and not on how many records there are.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lorica_security.errors import StateError
from lorica_security.noise.discrete_gaussian import SIGMA
from lorica_security.noise.poisson_sampling import sample
from lorica_security.noise.random_words import RandomWords
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.local_optimizer import learning_rate_factor, local_optimizer
from silo_agent.training.model.model import T5
from silo_agent.training.private.clipping import Backend, Clipping, clipping
from silo_agent.training.private.corrected_adam import CorrectedAdam
from silo_agent.training.private.iterate_average import IterateAverage
from silo_agent.training.private.loss_sums import loss_sum, noised_reduction
from silo_agent.training.private.once_among_ranks import (
    agreed_words,
    require_each_once,
    require_one_sample,
    share_of,
    side_by_side,
)
from silo_agent.training.private.per_example.chunks import Chunks
from silo_agent.training.private.per_example.ghost_norms import check_covered
from silo_agent.training.private.private_optimizer import PrivateOptimizer
from silo_agent.training.ranks.ranks import ALONE, Ranks
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.training import TrainingSection


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateSchedule:
    """Of one round, of public numbers alone.

    `noise_multiplier` is the noise on a sum of gradients over `max_grad_norm`. `loss_noise_multiplier` is the noise on
    the scaled loss reduction over `loss_bound`, and the weight is at most `weight_cap`; None where the round releases
    no weight. `average_decay` is that of the average of iterates which the round ends with; 0 where it ends with the
    last one.
    """

    sampling_rate: float
    steps: int
    expected_batch_size: int
    noise_multiplier: float
    max_grad_norm: float
    loss_bound: float
    loss_noise_multiplier: float | None
    weight_cap: float
    average_decay: float = 0.0


def schedule_of(plan: Plan, section: TrainingSection) -> PrivateSchedule:
    """Of one round under `plan`, whose `[training]` is `section` at this silo."""
    privacy = plan.privacy
    return PrivateSchedule(
        sampling_rate=privacy.sampling_rate,
        steps=privacy.steps,
        expected_batch_size=privacy.expected_batch_size,
        noise_multiplier=privacy.noise_multiplier,
        max_grad_norm=section.max_grad_norm,
        loss_bound=privacy.loss_bound,
        loss_noise_multiplier=privacy.loss_noise_multiplier if plan.weighted else None,
        weight_cap=privacy.weight_cap,
        average_decay=privacy.average_decay,
    )


def train_privately(
    model: T5,
    parameters: Sequence[nn.Parameter],
    examples: EncodedExamples,
    section: TrainingSection,
    schedule: PrivateSchedule,
    *,
    backend: Backend,
    words: RandomWords,
    on_progress: Callable[[float], None],
    should_stop: Callable[[], bool],
    ranks: Ranks = ALONE,
    own_entropy: bytes = b"",
) -> float | None:
    """Train `model` in place; the noised scaled loss reduction where the schedule has one, of the model as it is left.

    `parameters` are those that are trained, `words` a stream of this training's own. `section.batch_size` examples are
    in memory at a time at most. Raises TrainingStopped soon after `should_stop()` turns true, StateError where
    gradients per example are not to be trusted: modules that no test covers, or dropout, whose masks for one example
    would depend on those before it. Nothing that depends on the examples is checked: who sees a check fail learns of
    them.

    `ranks` that train together take the samples, add the noise and come to the weight of one process, whose `words`
    follow from the silo's `own_entropy`, 32 bytes, and from the words of each; that a rank does otherwise is
    StateError (once_among_ranks.py).
    """
    require_no_dropout(model)
    check_covered(model)
    words = agreed_words(words, own_entropy, ranks)
    norm = clipping_norm(schedule, sum(parameter.numel() for parameter in parameters))
    chunks = Chunks(model, most=section.batch_size, whole=ranks.world == 1)
    way = clipping(backend, model, parameters, max_grad_norm=norm)
    model.train()
    take_room(way, chunks, section, views=examples.views)
    weighs = schedule.loss_noise_multiplier is not None
    before = loss_sum(model, examples, chunks, bound=schedule.loss_bound, ranks=ranks) if weighs else 0
    optimizer = PrivateOptimizer(
        _optimizer(section, schedule, parameters),
        noise_multiplier=schedule.noise_multiplier,
        max_grad_norm=schedule.max_grad_norm,
        expected_batch_size=schedule.expected_batch_size,
        words=words,
        ranks=ranks,
    )
    average = IterateAverage(parameters, schedule.average_decay) if schedule.average_decay else None
    try:
        for step in range(schedule.steps):
            optimizer.begin_step()
            drawn, clipped = drawn_examples(examples, schedule.sampling_rate, words), array("q")
            require_one_sample(drawn, optimizer.key, ranks)
            own = chunks.of(examples, share_of(examples, drawn, ranks))
            for indices, batch in side_by_side(own, ranks, should_stop):
                way.accumulate(batch)
                clipped.extend(indices)
            require_each_once("clipped gradients", drawn, clipped, ranks)
            factor = learning_rate_factor(section.learning_rate_schedule, step, schedule.steps)
            for settings in optimizer.param_groups:
                settings["lr"] = section.learning_rate * factor
            optimizer.step()
            optimizer.zero_grad()
            if average is not None:
                average.take()
            on_progress((step + 1) / schedule.steps)
    finally:
        optimizer.close()
        for parameter in parameters:
            parameter.grad = parameter.summed_grad = None  # type: ignore[attr-defined]
    if average is not None:
        average.give()
    if schedule.loss_noise_multiplier is None:
        return None
    return noised_reduction(
        before,
        loss_sum(model, examples, chunks, bound=schedule.loss_bound, ranks=ranks),
        bound=schedule.loss_bound,
        noise_multiplier=schedule.loss_noise_multiplier,
        cap=schedule.weight_cap,
        words=words,
    )


def take_room(way: Clipping, chunks: Chunks, section: TrainingSection, *, views: int) -> None:
    """Where one example takes as much of a GPU's memory as a whole chunk: for the longest that the plan allows, before
    any is looked at. It adds nothing."""
    longest = chunks.longest(source=section.max_input_tokens, target=section.max_output_tokens, views=views)
    if longest is not None:
        way.accumulate(longest)


def _optimizer(
    section: TrainingSection, schedule: PrivateSchedule, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    if section.optimizer != "adam_corrected":
        return local_optimizer(section, parameters)
    return CorrectedAdam(
        parameters,
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        noise_deviation=schedule.noise_multiplier * schedule.max_grad_norm / schedule.expected_batch_size,
        floor=section.variance_floor,
    )


def clipping_norm(schedule: PrivateSchedule, parameters: int) -> float:
    """`max_grad_norm` less what two neighbouring sums may be moved apart by when each of their coordinates is rounded
    to noise's grid.

    Raises StateError where so much noise, on so many parameters, leaves less than half of it.
    """
    rounding = math.sqrt(parameters) * schedule.noise_multiplier / SIGMA
    if rounding > 0.5:
        raise StateError(
            f"noise_multiplier {schedule.noise_multiplier:g} on {parameters:,} parameters is too coarse for "
            "max_grad_norm: nothing is trained; have the operator set a larger target_epsilon, or train fewer "
            "parameters"
        )
    return schedule.max_grad_norm * (1 - rounding)


def require_no_dropout(model: T5) -> None:
    """Raise StateError for a model whose masks for one example would depend on others."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0.0:
            raise StateError(f"module {name} has dropout {module.p:g}: private training wants [training] dropout = 0")


def drawn_examples(examples: EncodedExamples, rate: float, words: RandomWords) -> list[int]:
    """A Poisson sample of the units, one example of each, by index."""
    if examples.units is None:
        alone: list[int] = sample(words, len(examples), rate).tolist()
        return alone
    drawn = [examples.units[index] for index in sample(words, len(examples.units), rate).tolist()]
    fractions = words.words64(len(drawn)).tolist()
    return [unit[fraction * len(unit) >> 64] for unit, fraction in zip(drawn, fractions, strict=True)]
