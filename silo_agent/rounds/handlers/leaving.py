"""How the agent leaves what is under way: what is recorded, cancelled and erased."""

from dataclasses import replace

from silo_agent.rounds.effects import CancelWork, DeclareReadiness, Effect, EndMasking, JournalOutcome, Outcome
from silo_agent.rounds.events import SavedUpdate
from silo_agent.rounds.states import (
    Agent,
    Answering,
    Collecting,
    Evaluating,
    Fetching,
    Holding,
    Idle,
    Phase,
    Preparing,
    Ready,
    Reporting,
    Training,
    Uploading,
)
from silo_wire.messages import Evaluate, Mask, Train


def leave(phase: Phase) -> tuple[Effect, ...]:
    """What it takes to drop the work of `phase`, if it has any."""
    match phase:
        case Fetching(order) | Training(order) | Uploading(order) | Evaluating(order) | Reporting(order):
            return outcome_of(order, Outcome.CLOSED, _WENT_ON), CancelWork()
        case Answering(order):
            return outcome_of(order, Outcome.CLOSED, _WENT_ON), CancelWork(), EndMasking(order.key)
        case Holding(update):
            closed = JournalOutcome(key=update.key, evaluation=False, outcome=Outcome.CLOSED, detail=_WENT_ON)
            return closed, EndMasking(update.key)
        case Preparing(held=SavedUpdate() as update):
            return CancelWork(), EndMasking(update.key)
        case Preparing() | Collecting():
            return (CancelWork(),)
        case _:
            return ()


_WENT_ON = "the coordinator went on"


def outcome_of(order: Train | Mask | Evaluate, outcome: Outcome, detail: str = "") -> JournalOutcome:
    """What the journal says of an order that is over."""
    return JournalOutcome(key=order.key, evaluation=isinstance(order, Evaluate), outcome=outcome, detail=detail)


def at_rest(agent: Agent) -> Agent:
    """The agent with nothing under way, ready where a plan is prepared."""
    return replace(agent, phase=Idle() if agent.prepared is None else Ready(agent.prepared))


def readiness_of(agent: Agent) -> tuple[Effect, ...]:
    """What is said to the coordinator about readiness; nothing without a prepared plan."""
    if agent.prepared is None:
        return ()
    return (DeclareReadiness(plan=agent.prepared, ready=not agent.unready, reason=agent.unready),)


def unreadiness_of(agent: Agent) -> tuple[Effect, ...]:
    """Said at the end of work that was under way when the reason arose."""
    return readiness_of(agent) if agent.unready else ()
