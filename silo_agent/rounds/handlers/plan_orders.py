"""Orders that are about a plan: prepare it; it is finished."""

from dataclasses import replace

from silo_agent.rounds.effects import DeclareReadiness, FetchModel, FetchPlan
from silo_agent.rounds.handlers.leaving import at_rest, leave, readiness_of
from silo_agent.rounds.states import (
    Agent,
    Answering,
    Collecting,
    Complete,
    Done,
    Holding,
    Phase,
    Preparing,
    Refused,
    Reporting,
    Step,
    Uploading,
)
from silo_wire.messages import Finished, Prepare


def prepare(agent: Agent, phase: Phase, order: Prepare) -> Step:
    """Fetch and check a plan, unless this was done or refused before."""
    match phase:
        case Preparing(plan) if plan == order.plan:
            return replace(agent, phase=replace(phase, then=None)), ()
        case Holding(update) if update.key.plan == order.plan:  # a step of this very attempt may follow
            if agent.prepared == order.plan:
                return agent, readiness_of(agent)
            return replace(agent, phase=Preparing(order.plan, held=update)), (FetchPlan(order.plan),)
        case Answering() if agent.prepared == order.plan:
            return replace(agent, phase=replace(phase, then=None)), readiness_of(agent)
        case Answering():
            return replace(agent, phase=replace(phase, then=order)), ()
        case Refused(plan=plan, told=told) if plan == order.plan:
            return agent, (DeclareReadiness(plan=plan, ready=False, reason=told),)
        case Uploading() | Reporting() if agent.prepared == order.plan:
            return replace(agent, phase=replace(phase, then=None)), readiness_of(agent)
        case Uploading() | Reporting():
            return replace(agent, phase=replace(phase, then=order)), ()
        case Done() if agent.prepared == order.plan:
            return agent, readiness_of(agent)
        case _ if agent.prepared == order.plan:
            return at_rest(agent), (*leave(phase), *readiness_of(agent))
        case _:
            return replace(agent, phase=Preparing(order.plan)), (*leave(phase), FetchPlan(order.plan))


def plan_finished(agent: Agent, phase: Phase, order: Finished) -> Step:
    """Fetch the model that a finished plan leaves."""
    match phase:
        case Collecting(known) | Complete(known) | Preparing(_, Finished() as known) if known == order:
            return agent, ()
        case Refused(plan=plan) if plan == order.plan:
            return agent, ()
        case Uploading() | Answering() | Reporting():
            return replace(agent, phase=replace(phase, then=order)), ()
        case _:
            pass
    if agent.prepared != order.plan:
        if isinstance(phase, Preparing) and phase.plan == order.plan:
            return replace(agent, phase=replace(phase, then=order)), ()
        return replace(agent, phase=Preparing(order.plan, order)), (*leave(phase), FetchPlan(order.plan))
    return replace(agent, phase=Collecting(order)), (*leave(phase), FetchModel(order))
