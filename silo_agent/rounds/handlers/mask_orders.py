"""Mask orders, in any phase: the steps of secure aggregation."""

from dataclasses import replace

from silo_agent.rounds.effects import Decline, FetchPlan
from silo_agent.rounds.handlers.beginning import begin
from silo_agent.rounds.handlers.leaving import leave
from silo_agent.rounds.states import (
    Agent,
    Answering,
    Declined,
    Holding,
    Phase,
    Preparing,
    Refused,
    Reporting,
    Step,
    Uploading,
)
from silo_wire.messages import Mask


def mask_order(agent: Agent, phase: Phase, order: Mask) -> Step:
    """In any phase but Stopped."""
    match phase:
        case Answering(known) if known == replace(order, seconds_left=known.seconds_left):
            return replace(agent, phase=replace(phase, then=None)), ()
        case Uploading() | Answering() | Reporting():
            return replace(agent, phase=replace(phase, then=order)), ()
        case Declined(order=known, reason=reason, told=told) if known.key == order.key and isinstance(known, Mask):
            return agent, (Decline(key=order.key, reason=reason, detail=told),)
        case Refused(plan=plan, reason=reason, told=told) if plan == order.key.plan:
            return agent, (Decline(key=order.key, reason=reason, detail=told),)
        case Preparing(plan) if plan == order.key.plan:
            return replace(agent, phase=replace(phase, then=order)), ()
        case _ if agent.prepared == order.key.plan:
            return begin(agent, phase, order)
        case Holding(update) if update.key == order.key:
            return replace(agent, phase=Preparing(order.key.plan, order, update)), (FetchPlan(order.key.plan),)
        case _:
            return replace(agent, phase=Preparing(order.key.plan, order)), (*leave(phase), FetchPlan(order.key.plan))
