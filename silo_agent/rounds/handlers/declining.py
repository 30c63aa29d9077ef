"""How the agent declines an order, and a second model for one attempt."""

from dataclasses import replace

from silo_agent.rounds.effects import Decline, Effect, Outcome, RecordRefusal
from silo_agent.rounds.handlers.leaving import leave, outcome_of
from silo_agent.rounds.states import Agent, Declined, Phase, Step
from silo_wire.messages import DeclineReason, Evaluate, Mask, Train

_TWO_MODELS = "two different models were handed out for one attempt"


def decline_second_model(agent: Agent, phase: Phase, order: Train | Mask | Evaluate) -> Step:
    """Decline a second model for one attempt, whichever of the two is right."""
    after = replace(agent, phase=Declined(order=order, reason=DeclineReason.INTEGRITY, told=_TWO_MODELS))
    return after, (*leave(phase), *declining_second_model(order))


def declining_second_model(order: Train | Mask | Evaluate) -> tuple[Effect, ...]:
    """What it takes to decline a second model."""
    detail = f"{_TWO_MODELS}: round {order.key.round} attempt {order.key.attempt}, the second is {order.model}"
    refusal = RecordRefusal(rule="one_model", detail=detail)
    return (refusal, *declining(order, DeclineReason.INTEGRITY, _TWO_MODELS))


def decline_order(agent: Agent, phase: Phase, order: Train | Mask | Evaluate, reason: DeclineReason, told: str) -> Step:
    """Leave what is under way and decline the order."""
    after = replace(agent, phase=Declined(order=order, reason=reason, told=told))
    return after, (*leave(phase), *declining(order, reason, told))


def declining(order: Train | Mask | Evaluate, reason: DeclineReason, told: str, detail: str = "") -> tuple[Effect, ...]:
    """What it takes to decline an order."""
    return (
        outcome_of(order, Outcome.DECLINED, f"{reason.value}: {detail or told}"),
        Decline(key=order.key, reason=reason, detail=told),
    )
