"""How long one silo's training and scoring take on this machine, found by doing a little of both.

What is timed is the agent's own trainer on the silo's own batches, from the round model, in the plan's order; after
some steps it is asked to stop, as an agent is whose round is over. Nothing of it is kept: no update, no checkpoint, no
entry in a ledger.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from lorica.memory_readings import memory_bytes, reset_peak
from lorica.simulation.forecast.estimate import SiloTimes, evaluations_of
from lorica_security.identifiers import SiloName
from silo_agent.edges.workshop.answers_tried import answers_tried
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.rounds.update import TrainingStopped
from silo_agent.service.ports import RoundModel
from silo_agent.sql_sandbox import Limits
from silo_agent.training.evaluation import judged_on
from silo_agent.training.model.plan_model import PlanModel
from silo_agent.training.semi_supervised.answer_filter import AnswerFilter
from silo_agent.training.silo_trainer import SiloTrainer
from silo_wire.plans.plan import Plan
from silo_wire.transport import give_memory_back

STEPS = 10
"""Optimizer steps at most. The first one warms up, and counts only where there is no other."""
BATCHES = 2
"""Batches of an evaluation at most."""
SAMPLE_S = 20.0
"""After which neither goes on, once a step or a batch is done."""

Clock = Callable[[], float]


def measured(
    trainer: SiloTrainer,
    model: PlanModel,
    round_model: RoundModel,
    *,
    plan: Plan,
    silo: SiloName,
    sources: SiloSources,
    executes: bool,
    work: Path,
    clock: Clock = time.perf_counter,
) -> SiloTimes:
    """Train a few steps from `round_model` and score a few examples; `work` is a folder for what is thrown away.

    `executes`: on the silo's database as well. Raises what the trainer raises.
    """
    give_memory_back()  # or what silos before this one have had would count as this one's
    reset_peak(os.getpid())
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    with answers_tried(plan, silo, sources) as answers:
        beside_s, step_s = _training(trainer, plan, round_model, work, clock, answers)
    example_s = 0.0
    if evaluations_of(plan) and trainer.encoded("dev"):  # none where the silo has no labels
        model.load(round_model.file, round_model.manifest, round_model.mark)  # which does not grow with the examples
        example_s = _scoring(trainer, plan, round_model, sources if executes else None, clock)
    peak = torch.cuda.max_memory_allocated(model.device) if on_gpu else memory_bytes(os.getpid())[1]
    return SiloTimes(step_s=step_s, beside_steps_s=beside_s, example_s=example_s, peak_bytes=peak)


def _training(
    trainer: SiloTrainer, plan: Plan, model: RoundModel, work: Path, clock: Clock, answers: AnswerFilter | None
) -> tuple[float, float]:
    """Seconds of a round's training apart from its steps, and of one optimizer step."""
    batches: list[float] = []
    steps: list[float] = []

    def should_stop() -> bool:
        """Asked before each batch."""
        batches.append(clock())
        return len(steps) >= STEPS or (bool(steps) and batches[-1] - began > SAMPLE_S)

    began = clock()
    with suppress(TrainingStopped):  # a training that is shorter than the sample comes to its end
        trainer.train(
            round_number=1,
            model_path=model.file,
            model=model.manifest,
            model_mark=model.mark,
            update_path=work / "update",
            answers=answers,
            on_progress=lambda fraction, loss: steps.append(clock()),
            should_stop=should_stop,
        )
    evaluated = trainer.loss_batches  # before the first step, and as many after the last
    evaluating = 2 * (batches[evaluated] - batches[0]) if evaluated else 0.0
    began += evaluating / 2
    batches = batches[evaluated:]
    first = min([*batches[:1], *steps[:1]])  # a Poisson sample may be empty: then a step comes before any batch
    sums_losses = (
        plan.privacy.level == "record" and plan.weighted
    )  # over all records, before the first step and after the last
    beside = (first - began) * (2 if sums_losses else 1) + evaluating
    return beside, (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else steps[0] - first


def _scoring(trainer: SiloTrainer, plan: Plan, model: RoundModel, sources: SiloSources | None, clock: Clock) -> float:
    """Seconds for one dev example; with queries on the database where `sources` are given and name one."""
    section = plan.evaluation
    count = len(trainer.encoded("dev"))
    most = min(section.batch_size * BATCHES, section.max_examples or count, count)
    done: list[tuple[float, float]] = []  # share of the sample, and when
    target, limits = (None, Limits()) if sources is None else (sources.database(), sources.limits())
    with judged_on(target, limits) as same:
        began = clock()
        try:
            trainer.evaluate(
                model_path=model.file,
                model=model.manifest,
                model_mark=model.mark,
                most=most,
                same_result=same,
                on_progress=lambda fraction: done.append((fraction, clock())),
                should_stop=lambda: bool(done) and clock() - began > SAMPLE_S,
            )
        except TrainingStopped:
            fraction, at = done[-1]
            return (at - began) / (fraction * most)
        return (clock() - began) / most
