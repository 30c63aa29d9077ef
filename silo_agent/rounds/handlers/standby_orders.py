"""Standby orders: the coordinator wants nothing now, and says why."""

from dataclasses import replace

from silo_agent.rounds.effects import EndMasking
from silo_agent.rounds.handlers.leaving import at_rest, leave, unreadiness_of
from silo_agent.rounds.states import (
    Agent,
    Answering,
    Collecting,
    Complete,
    Evaluating,
    Fetching,
    Holding,
    Idle,
    Phase,
    Preparing,
    Ready,
    Refused,
    Reporting,
    Step,
    Training,
    Uploading,
)
from silo_wire.messages import Standby, StandbyReason


def standby_at_rest(agent: Agent, phase: Phase, order: Standby) -> Step:
    """Stay at rest; the plan may be over."""
    match order.reason:
        case StandbyReason.NO_PLAN | StandbyReason.STOPPED:
            return replace(agent, phase=phase if isinstance(phase, Complete | Idle) else Idle()), ()
        case StandbyReason.GATHERING if not isinstance(phase, Refused):
            # The coordinator counts on this silo: it must hear again that a paused one does not come.
            return at_rest(agent), unreadiness_of(agent)
        case _:
            return agent, ()


def standby_preparing(agent: Agent, phase: Preparing, order: Standby) -> Step:
    """Go on preparing, for no order, unless the plan is over."""
    if order.reason in (StandbyReason.NO_PLAN, StandbyReason.STOPPED):
        return replace(agent, phase=Idle()), leave(phase)
    if phase.held is not None and order.reason not in _STILL_MASKING:
        return replace(agent, phase=Preparing(phase.plan)), (EndMasking(phase.held.key),)
    return replace(agent, phase=replace(phase, then=None)), ()


_STILL_MASKING = (StandbyReason.TRAINED, StandbyReason.UPDATE_RECEIVED, StandbyReason.AGGREGATING)


def standby_holding(agent: Agent, phase: Holding, order: Standby) -> Step:
    """Keep the delta while it may be masked."""
    if order.reason in _STILL_MASKING:
        return agent, ()
    after, effects = standby_at_rest(at_rest(agent), Ready(phase.update.key.plan), order)
    return after, (*leave(phase), *effects)


def standby_answering(agent: Agent, phase: Answering, order: Standby) -> Step:
    """Finish this step; what follows depends on whether masking is still under way."""
    return replace(agent, phase=replace(phase, then=None if order.reason in _STILL_MASKING else order)), ()


def standby_collecting(agent: Agent, _phase: Collecting, _order: Standby) -> Step:
    """Go on fetching the model of a finished plan."""
    return agent, ()


def standby_delivering(agent: Agent, phase: Uploading | Reporting, _order: Standby) -> Step:
    """See the delivery through, for no other order."""
    return replace(agent, phase=replace(phase, then=None)), ()


def standby_working(agent: Agent, phase: Fetching | Training | Evaluating, order: Standby) -> Step:
    """Drop the work: the round is closed or stopped."""
    over = order.reason in (StandbyReason.NO_PLAN, StandbyReason.STOPPED)
    after = replace(agent, phase=Idle()) if over else at_rest(agent)
    return after, (*leave(phase), *(() if over else unreadiness_of(after)))
