"""One round of local training: from the round model in the parameters to the local model in the same parameters.

An effective batch is `gradient_accumulation` batches; what is left of them at an epoch's end makes a smaller effective
batch of its own. The gradient is that of the mean over all target tokens of the effective batch, whatever its size, so
accumulation equals one large batch and nothing is inflated. FedProx's term enters the gradient, before clipping, and no
loss. A correction of drift (silo_wire/drift_correction.py) is added to the gradient after clipping.

The loss reduction is what the loss of one sample of examples fell by, from the round model to the local one, and 0
where it rose (loss_reduction.py). Where a plan takes logged losses instead it is max minus min of these (loss_log.py):
each is the mean over all target tokens of its window, and the last window ends with the last step.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from silo_agent.rounds.update import TrainingDiverged, TrainingStopped
from silo_agent.training.checkpoint import CheckpointFile, TrainingState
from silo_agent.training.data.batches import EncodedExamples, collate, counted_tokens, shuffled_batches
from silo_agent.training.device import autocast, computed_again
from silo_agent.training.draws import Seed, begin_all, begun
from silo_agent.training.local_optimizer import learning_rate_factor, local_optimizer
from silo_agent.training.loss_log import LossLog
from silo_agent.training.loss_reduction import sample_loss
from silo_agent.training.model.model import T5
from silo_agent.training.ranks.ranks import ALONE, Ranks
from silo_agent.training.task_loss import summed_loss
from silo_wire.messages import TrainingSummary
from silo_wire.plans.sections.training import TrainingSection
from silo_wire.plans.work import optimizer_steps

Progress = Callable[[float, float], None]
"""Called after each optimizer step with the fraction done (0 to 1) and the effective batch's task loss."""


class Objective(Protocol):
    """What optimizer steps lower in place of the task loss."""

    def add_gradient(self, group: Iterable[list[int]], should_stop: Callable[[], bool]) -> tuple[float, int]:
        """As `accumulate_gradient`: the gradient of the mean over tokens; the summed loss, and the number of tokens."""

    def stepped(self) -> None:
        """The optimizer has made a step."""

    def kept(self) -> Sequence[torch.Tensor]:
        """What it remembers from step to step, in a fixed order: part of the checkpoint."""


def train_locally(
    model: T5,
    parameters: Sequence[nn.Parameter],
    examples: EncodedExamples,
    section: TrainingSection,
    *,
    seed: Seed,
    sample: Sequence[int] | None,
    round_parameters: Sequence[torch.Tensor] | None,
    correction: Sequence[torch.Tensor] | None = None,
    checkpoint: CheckpointFile | None,
    on_progress: Progress,
    should_stop: Callable[[], bool],
    clock: Callable[[], float],
    objective: Objective | None = None,
    ranks: Ranks = ALONE,
) -> TrainingSummary:
    """Train `model` in place on all of `examples` for `section.epochs`, or for `section.steps` optimizer steps; the
    epochs that `checkpoint` holds are not repeated.

    `sample`: the examples whose loss is evaluated before and after; None where losses are logged. `parameters` are the
    model's own in a fixed order; `round_parameters`, in the same order, are needed for FedProx alone; `correction`, in
    that order too, is what is added to each gradient. `objective` is what is trained for in place of the task loss.
    `ranks`: the processes that train together, of which this is one; none of them has an objective.

    Data order and dropout depend on `seed` alone; the process's random state is left as it was. Raises TrainingStopped
    soon after `should_stop()` turns true, TrainingDiverged for a loss or gradient that is not finite.
    """
    began = clock()
    # Of the round model, therefore before a checkpoint takes its place.
    before = (
        None if sample is None else sample_loss(model, examples, sample, section, should_stop=should_stop, ranks=ranks)
    )
    device = parameters[0].device
    generator = begun(torch.Generator(), seed)
    optimizer = local_optimizer(section, parameters)
    steps = optimizer_steps(len(examples), section)
    kept = () if objective is None else objective.kept()
    epoch, step, earlier_s, log = 0, 0, 0.0, LossLog.empty(section.loss_log_steps)
    model.train()
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        computed_again(model, wanted=section.gradient_checkpointing),
    ):
        begin_all(ranks.seed(seed))
        if checkpoint is not None and (state := _agreed(checkpoint.load(device), ranks, device)) is not None:
            _take_over(state, parameters, optimizer, generator, kept, ranks)
            epoch, step, earlier_s, log = state.epochs, state.steps, state.seconds, state.log
            del state  # or its copy of the parameters would stay
        while step < steps:
            batches = shuffled_batches(
                examples, batch_size=section.batch_size, generator=generator, grouped=section.length_grouping
            )
            for start in range(0, len(batches), section.gradient_accumulation)[: steps - step]:
                group = batches[start : start + section.gradient_accumulation]
                optimizer.zero_grad()
                if objective is None:
                    loss_sum, tokens = accumulate_gradient(model, examples, group, section, device, should_stop, ranks)
                    ranks.sum_gradients(parameters)
                else:
                    loss_sum, tokens = objective.add_gradient(group, should_stop)
                if not math.isfinite(loss_sum):
                    raise _diverged("loss", loss_sum, step, steps, section)
                _add_proximal_term(parameters, round_parameters, section.fedprox_mu)
                norm = ranks.norm(nn.utils.get_total_norm([it.grad for it in parameters if it.grad is not None]))
                nn.utils.clip_grads_with_norm_(parameters, section.max_grad_norm or math.inf, norm)
                if not math.isfinite(norm):
                    raise _diverged("gradient norm", float(norm), step, steps, section)
                _add_correction(parameters, correction)
                factor = learning_rate_factor(section.learning_rate_schedule, step, steps)
                for settings in optimizer.param_groups:
                    settings["lr"] = section.learning_rate * factor
                optimizer.step()
                if objective is not None:
                    objective.stepped()
                step += 1
                if not tokens:
                    pass  # no loss is logged where nothing counted
                elif section.loss_reduction == "as_published":
                    log.add_as_published(
                        loss_sum / tokens,
                        batches=len(group),
                        of=len(batches),
                        accumulation=section.gradient_accumulation,
                    )
                else:
                    log.add(loss_sum, tokens)
                on_progress(step / steps, loss_sum / max(1, tokens))
            epoch += 1
            if checkpoint is not None and step < steps:
                checkpoint.save(
                    TrainingState(
                        epochs=epoch,
                        steps=step,
                        seconds=earlier_s + clock() - began,
                        log=log,
                        parameters=parameters,
                        optimizer=optimizer.state_dict()["state"],
                        random=ranks.states(_random_states(generator, device)),
                        kept=kept if objective is None else objective.kept(),
                    )
                )
    optimizer.zero_grad()
    if section.loss_reduction != "as_published":
        log.close()
    if not log.losses:
        raise TrainingDiverged(
            f"training learnt nothing: the task counts no token of {len(examples)} examples in the loss: look at the "
            "lines, or decline the plan"
        )
    first, last = log.losses[0], log.losses[-1]
    largest, least = max(log.losses), min(log.losses)
    if sample is not None and before is not None:
        first, last = before, sample_loss(model, examples, sample, section, should_stop=should_stop, ranks=ranks)
        largest, least = first, min(first, last)
    return TrainingSummary(
        examples=len(examples),
        loss_max=largest,
        loss_min=least,
        loss_first=first,
        loss_last=last,
        optimizer_steps=step,
        seconds=earlier_s + clock() - began,
    )


def _random_states(generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Of the data order (`generator`) and of dropout, which draws on the CPU or on the GPU."""
    states = {"order": generator.get_state(), "cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _take_over(
    state: TrainingState,
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    kept: Sequence[torch.Tensor],
    ranks: Ranks,
) -> None:
    with torch.no_grad():
        for parameter, value in zip((*parameters, *kept), (*state.parameters, *state.kept), strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state.optimizer})
    random = ranks.own_states(state.random)
    generator.set_state(random["order"])
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"], parameters[0].device)


def _agreed(state: TrainingState | None, ranks: Ranks, device: torch.device) -> TrainingState | None:
    """`state` where every rank read the same; None, and training begins anew, where one of them did not."""
    steps = -1 if state is None else state.steps
    every = torch.zeros(ranks.world, dtype=torch.int64, device=device)
    every[ranks.rank] = steps
    return state if len(set(ranks.sum(every).tolist())) == 1 else None


def accumulate_gradient(
    model: T5,
    examples: EncodedExamples,
    group: Iterable[list[int]],
    section: TrainingSection,
    device: torch.device,
    should_stop: Callable[[], bool],
    ranks: Ranks = ALONE,
) -> tuple[float, int]:
    """Add the gradient of the group's token-mean loss; its summed loss and its number of target tokens.

    The gradient is that of this rank's share of the group, of whose tokens the mean is; loss and tokens are all ranks'.
    """
    group = list(group)
    tokens = sum(counted_tokens(examples.targets[index]) for indices in group for index in indices)
    total = torch.zeros((), device=device)
    pad = model.config.pad_token_id
    if ranks.world > 1 and ranks.any(should_stop()):
        raise TrainingStopped
    for indices in ranks.rows(group):
        if ranks.world == 1 and should_stop():
            raise TrainingStopped
        if indices is None and not ranks.sharded:
            continue
        # What others wait for to compute with is computed with here as well, and does not count.
        batch = collate(examples, group[0] if indices is None else indices, pad=pad, device=device)
        with autocast(device, section.precision):
            loss = ranks.computed(model, partial(summed_loss, batch=batch))
        if indices is None:
            loss = loss * 0
        ranks.backward(loss / max(1, tokens))
        total += loss.detach()
    return float(ranks.sum(total)), tokens


def _add_proximal_term(
    parameters: Sequence[nn.Parameter], round_parameters: Sequence[torch.Tensor] | None, mu: float
) -> None:
    """The gradient of mu/2 ||w - w_t||^2 (Li et al. 2020, FedProx)."""
    if mu == 0:
        return
    assert round_parameters is not None, "FedProx needs the round model"
    with torch.no_grad():
        for parameter, origin in zip(parameters, round_parameters, strict=True):
            pull = (parameter - origin).mul_(mu)
            parameter.grad = pull if parameter.grad is None else parameter.grad.add_(pull)


def _add_correction(parameters: Sequence[nn.Parameter], correction: Sequence[torch.Tensor] | None) -> None:
    """Also where no example reaches a parameter: its silo's gradient is 0, and the others' may not be."""
    if correction is None:
        return
    with torch.no_grad():
        for parameter, added in zip(parameters, correction, strict=True):
            parameter.grad = added.clone() if parameter.grad is None else parameter.grad.add_(added)


def _diverged(what: str, value: float, step: int, steps: int, section: TrainingSection) -> TrainingDiverged:
    return TrainingDiverged(
        f"training diverged: {what} is {value} at optimizer step {step + 1} of {steps}: "
        f"lower learning_rate ({section.learning_rate:g}) in the plan"
    )
