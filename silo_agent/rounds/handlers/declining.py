"""How the agent declines an order, and a second model for one attempt."""

from dataclasses import replace

from silo_agent.rounds.effects import Decline, Effect, Outcome, RecordRefusal
from silo_agent.rounds.handlers.leaving import leave, outcome_of
from silo_agent.rounds.states import Agent, Declined, Phase, Step
from silo_wire.messages import DeclineReason, Evaluate, Mask, Train

_TWO_MODELS = "two different models were handed out for one attempt"


def decline_second_model(agent: Agent, phase: Phase, order: Train | Mask | Evaluate) -> Step:
    after = replace(agent, phase=Declined(order=order, reason=DeclineReason.INTEGRITY, told=_TWO_MODELS))
    return after, (*leave(phase), *second_model_declined(order))


def second_model_declined(order: Train | Mask | Evaluate) -> tuple[Effect, ...]:
    detail = f"{_TWO_MODELS}: round {order.key.round} attempt {order.key.attempt}, the second is {order.model}"
    refusal = RecordRefusal(rule="one_model", detail=detail)
    return (refusal, *decline_effects(order, DeclineReason.INTEGRITY, _TWO_MODELS))


def declined_for(agent: Agent, phase: Phase, order: Train | Mask | Evaluate, reason: DeclineReason, told: str) -> Step:
    after = replace(agent, phase=Declined(order=order, reason=reason, told=told))
    return after, (*leave(phase), *decline_effects(order, reason, told))


def decline_effects(
    order: Train | Mask | Evaluate, reason: DeclineReason, told: str, detail: str = ""
) -> tuple[Effect, ...]:
    return (
        outcome_of(order, Outcome.DECLINED, f"{reason.value}: {detail or told}"),
        Decline(key=order.key, reason=reason, detail=told),
    )
