"""Train and Evaluate orders, in any phase."""

from dataclasses import replace

from silo_agent.rounds.effects import DeclareTrained, Decline, EndMasking, FetchPlan, ReportEvaluation
from silo_agent.rounds.handlers.beginning import begin
from silo_agent.rounds.handlers.declining import (
    decline_order,
    decline_second_model,
    declining,
    declining_second_model,
)
from silo_agent.rounds.handlers.leaving import leave
from silo_agent.rounds.states import (
    DELIVERING,
    PAUSED,
    Agent,
    Answering,
    Declined,
    Done,
    Evaluating,
    Fetching,
    Holding,
    Phase,
    Preparing,
    Refused,
    Reporting,
    Step,
    Training,
    Uploading,
)
from silo_wire.messages import DeclineReason, Evaluate, Mask, RoundKey, Train


def round_order(agent: Agent, phase: Phase, order: Train | Evaluate) -> Step:
    """A Train or Evaluate order, in any phase but Stopped."""
    match phase:
        case Fetching(known) | Training(known) | Uploading(known) | Evaluating(known) | Reporting(known) if _same(
            known, order
        ):
            if known.model != order.model:
                return decline_second_model(agent, phase, order)
            return (replace(agent, phase=replace(phase, then=None)) if isinstance(phase, DELIVERING) else agent), ()
        case Holding(update) if isinstance(order, Train) and order.key == update.key:
            if update.model != order.model:
                return decline_second_model(agent, phase, order)
            return agent, (DeclareTrained(key=update.key, model=update.model),)
        case Answering(known) if isinstance(order, Train) and order.key == known.key:
            return replace(agent, phase=replace(phase, then=None)), ()
        case Uploading() | Answering() | Reporting():
            return replace(agent, phase=replace(phase, then=order)), ()
        case Preparing(plan, Train() | Evaluate() as known) if _same(known, order):
            if known.model == order.model:
                return agent, ()
            erase = () if phase.held is None else (EndMasking(phase.held.key),)
            return replace(agent, phase=Preparing(plan)), (*declining_second_model(order), *erase)
        case Declined(order=known, reason=reason, told=told) if known.key == order.key and type(known) is type(order):
            if reason is not DeclineReason.PAUSED or agent.paused:
                return agent, (Decline(key=order.key, reason=reason, detail=told),)
        case Done(Evaluate() as known, evaluation) if _same(known, order) and evaluation is not None:
            if known.model == order.model and isinstance(order, Evaluate):
                return replace(agent, phase=Reporting(order, evaluation)), (ReportEvaluation(order, evaluation),)
            return decline_second_model(agent, phase, order)
        case Refused(plan=plan, reason=reason, told=told) if plan == order.key.plan:
            return agent, (Decline(key=order.key, reason=reason, detail=told),)
        case _:
            pass
    if agent.paused and not _of_same_round(phase, order.key):
        if isinstance(phase, Preparing) and phase.plan == order.key.plan:  # goes on, to be ready on resuming
            return replace(agent, phase=Preparing(phase.plan)), declining(order, DeclineReason.PAUSED, PAUSED)
        return decline_order(agent, phase, order, DeclineReason.PAUSED, PAUSED)
    if agent.prepared != order.key.plan:
        if isinstance(phase, Preparing) and phase.plan == order.key.plan:
            return replace(agent, phase=replace(phase, then=order)), ()
        return replace(agent, phase=Preparing(order.key.plan, order)), (*leave(phase), FetchPlan(order.key.plan))
    return begin(agent, phase, order)


def _same(known: Train | Evaluate, order: Train | Evaluate) -> bool:
    return type(known) is type(order) and known.key == order.key


def _of_same_round(phase: Phase, key: RoundKey) -> bool:
    match phase:
        case (
            Fetching(order)
            | Training(order)
            | Uploading(order)
            | Evaluating(order)
            | Reporting(order)
            | Answering(order)
            | Done(order)
            | Preparing(_, (Train() | Mask() | Evaluate()) as order)
        ):
            return (order.key.plan, order.key.round) == (key.plan, key.round)
        case Holding(update):
            return (update.key.plan, update.key.round) == (key.plan, key.round)
        case _:
            return False
