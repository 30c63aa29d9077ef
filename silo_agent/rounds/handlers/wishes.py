"""Wishes of this silo's people: pause, resume, stop."""

from dataclasses import replace

from silo_agent.rounds.effects import CancelWork, FetchPlan
from silo_agent.rounds.events import Event, PauseAsked, ResumeAsked, StopAsked
from silo_agent.rounds.handlers.declining import declining
from silo_agent.rounds.handlers.leaving import at_rest, readiness_of
from silo_agent.rounds.states import (
    COUNTED_ON,
    Agent,
    Answering,
    Collecting,
    Declined,
    Evaluating,
    Fetching,
    Phase,
    Preparing,
    Refused,
    Reporting,
    Step,
    Stopped,
    Training,
    Uploading,
)
from silo_wire.messages import DeclineReason, Evaluate, Train

STOPPING = "the silo agent is being stopped"


def pause(agent: Agent, phase: Phase, _event: PauseAsked) -> Step:
    """Take no new round; the one under way goes on."""
    after = replace(agent, paused=True)
    return after, readiness_of(after) if isinstance(phase, COUNTED_ON) and not agent.paused else ()


def resume(agent: Agent, phase: Phase, _event: ResumeAsked) -> Step:
    """Take rounds again, and forget failures."""
    after = replace(agent, paused=False, failures=0, trouble="")
    if isinstance(phase, Refused) and phase.reason is DeclineReason.POLICY:  # its people may have approved the plan
        return replace(after, phase=Preparing(phase.plan)), (FetchPlan(phase.plan),)
    if not isinstance(phase, COUNTED_ON) or not agent.paused:
        return after, ()
    if isinstance(phase, Declined) and phase.reason is DeclineReason.PAUSED:
        after = at_rest(after)
    return after, readiness_of(after)


def stop(agent: Agent, phase: Phase, _event: StopAsked) -> Step:
    """Stop: what is delivered goes on in the next process, other work is declined."""
    after = replace(agent, phase=Stopped())
    match phase:
        case Fetching(order) | Training(order) | Evaluating(order):
            return after, (CancelWork(), *declining(order, DeclineReason.STOPPING, STOPPING))
        case Preparing(_, (Train() | Evaluate()) as order):
            return after, (CancelWork(), *declining(order, DeclineReason.STOPPING, STOPPING))
        case Preparing() | Collecting() | Uploading() | Answering() | Reporting():
            # The next process answers the very same again, and uploads an update on disk if the round still waits for
            # it.
            return after, (CancelWork(),)
        case _:
            return after, ()


def ignore(agent: Agent, _phase: Phase, _event: Event) -> Step:
    """Stopped: whatever comes is ignored."""
    return agent, ()
