"""Wishes of this silo's people: pause, resume, stop."""

from dataclasses import replace

from silo_agent.rounds.effects import CancelWork, FetchPlan
from silo_agent.rounds.events import Event, PauseAsked, ResumeAsked, StopAsked
from silo_agent.rounds.handlers.declining import decline_effects
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
    after = replace(agent, paused=True)
    return after, readiness_of(after) if isinstance(phase, COUNTED_ON) and not agent.paused else ()


def resume(agent: Agent, phase: Phase, _event: ResumeAsked) -> Step:
    after = replace(agent, paused=False, failures=0, trouble="")
    if isinstance(phase, Refused) and phase.reason is DeclineReason.POLICY:  # its people may have approved the plan
        return replace(after, phase=Preparing(phase.plan)), (FetchPlan(phase.plan),)
    if not isinstance(phase, COUNTED_ON) or not agent.paused:
        return after, ()
    if isinstance(phase, Declined) and phase.reason is DeclineReason.PAUSED:
        after = at_rest(after)
    return after, readiness_of(after)


def stop(agent: Agent, phase: Phase, _event: StopAsked) -> Step:
    after = replace(agent, phase=Stopped())
    match phase:
        case Fetching(order) | Training(order) | Evaluating(order):
            return after, (CancelWork(), *decline_effects(order, DeclineReason.STOPPING, STOPPING))
        case Preparing(_, (Train() | Evaluate()) as order):
            return after, (CancelWork(), *decline_effects(order, DeclineReason.STOPPING, STOPPING))
        case Preparing() | Collecting() | Uploading() | Answering() | Reporting():
            # What was answered is answered again, the very same, by the next process. An update on disk is uploaded by the next process, if the round still waits for it then.
            return after, (CancelWork(),)
        case _:
            return after, ()


def ignore(agent: Agent, _phase: Phase, _event: Event) -> Step:
    return agent, ()
