"""The operator's plan begins, stops, pauses and goes on."""

from dataclasses import replace

from lorica_coordinator.rounds.effects import (
    Cause,
    DiscardUpdates,
    Effect,
    EvaluationAbandoned,
    ModelMade,
    PlanBegun,
    RoundAbandoned,
    Step,
)
from lorica_coordinator.rounds.events import PlanOffered, PlanPaused, PlanResumed, PlanStarted, PlanStopped
from lorica_coordinator.rounds.phases.abandoning import after_masking
from lorica_coordinator.rounds.phases.entry import enter_aggregating, enter_aggregating_masked
from lorica_coordinator.rounds.phases.gathering import gather, with_course
from lorica_coordinator.rounds.states import (
    Aggregating,
    Collecting,
    Course,
    Evaluating,
    Finished,
    Gathering,
    Idle,
    Masking,
    Opening,
    Running,
    State,
    Stopped,
    Task,
    groups_of,
    population_of,
)
from lorica_coordinator.rounds.which_plan import check_start
from lorica_security.errors import StateError

STOP_REASON = "the operator stopped the plan"


def _begin(before: State, event: PlanOffered | PlanStarted, *, started: bool) -> Step:
    """With the silos and the release groups that there were `before`."""
    terms = event.terms
    course = Course(terms=terms, population=population_of(before), groups=groups_of(before), model=event.model)
    if terms.evaluation_due(0):
        opening = Opening(round=0, attempt=1, task=Task.EVALUATION)
    else:
        opening = Opening(round=1, attempt=1, task=Task.TRAINING)
    begun = PlanBegun(plan=terms.plan, name=terms.name)
    made = ModelMade(plan=terms.plan, round=0, model=event.model, signature=event.signature)
    after, effects = gather(course, opening, started=started, now=event.now)
    return after, (begun, made, *effects)


def offer(state: Idle, event: PlanOffered) -> Step:
    """A plan is offered; it is started where its terms say so."""
    return _begin(state, event, started=event.terms.start_when_ready)


def start_idle(state: Idle, event: PlanStarted) -> Step:
    """The first plan is started."""
    return _begin(state, event, started=True)


def start_gathering(state: Gathering, event: PlanStarted) -> Step:
    """The plan that gathers is started, or another one takes its place."""
    if not _is_same_plan(state, event):
        _check_start(state, event)
        return _begin(state, event, started=True)
    if state.started and _unbarred(state.course) == state.course:
        return state, ()
    return gather(_unbarred(state.course), state.opening, started=True, now=event.now)


def start_running(state: Collecting | Masking | Aggregating | Evaluating, event: PlanStarted) -> Step:
    """The plan runs already: a pause ends."""
    _check_start(state, event)
    return replace(state, course=replace(state.course, paused=False)), ()


def start_stopped(state: Stopped, event: PlanStarted) -> Step:
    """The stopped plan goes on with what was kept, or another one takes its place."""
    _check_start(state, event)
    if not _is_same_plan(state, event):
        after, effects = _begin(state, event, started=True)
        return after, (*_given_up(state, event.now), *effects)
    course, opening = _unbarred(state.course), state.opening
    if state.masked is not None:
        return enter_aggregating_masked(course, opening.round, opening.attempt, state.masked)
    if state.updates:
        return enter_aggregating(course, opening.round, opening.attempt, state.updates)
    return gather(course, opening, started=True, now=event.now)


def _unbarred(course: Course) -> Course:
    """The operator's word is that all take part again, and now."""
    return replace(course, barred=(), disputes=(), unawaited=frozenset(), paused=False)


def _given_up(state: Stopped, now: float) -> tuple[Effect, ...]:
    """The attempt whose updates were kept through the stop, when another plan takes its place."""
    if not state.updates and state.masked is None:
        return ()
    key = state.course.key(state.opening.round, state.opening.attempt)
    return RoundAbandoned(key=key, cause=Cause.REPLACED, reason="another plan was started"), DiscardUpdates(key=key)


def start_finished(state: Finished, event: PlanStarted) -> Step:
    """Another plan is started after a finished one."""
    if _is_same_plan(state, event):
        raise StateError(
            f"plan {event.terms.name} is finished: `coordinator plan start NAME` starts another; change its seed or "
            "its name to run it again "
            "from the beginning"
        )
    return _begin(state, event, started=True)


def _is_same_plan(state: Running, event: PlanStarted) -> bool:
    return state.course.terms.plan == event.terms.plan


def _check_start(state: Running, event: PlanStarted) -> None:
    check_start(state, plan=event.terms.plan, name=event.terms.name, leave=event.leave)


def stop_gathering(state: Gathering, event: PlanStopped) -> Step:
    """Stop before a round is open."""
    return Stopped(course=state.course, opening=state.opening, missing=event.missing), ()


def stop_collecting(state: Collecting, event: PlanStopped) -> Step:
    """Stop, and give up the attempt: the round is tried again."""
    opening = Opening(round=state.round, attempt=state.attempt + 1, task=Task.TRAINING)
    return Stopped(course=state.course, opening=opening, missing=event.missing), _stopped(state, event)


def stop_masking(state: Masking, event: PlanStopped) -> Step:
    """Stop, and give up the attempt: silos may have answered for its round."""
    opening = after_masking(state)
    if opening is None:
        return Finished(course=state.course), _stopped(state, event)
    return Stopped(course=state.course, opening=opening, missing=event.missing), _stopped(state, event)


def _stopped(state: Collecting | Masking, event: PlanStopped) -> tuple[Effect, ...]:
    """The attempt under way is given up."""
    cause = Cause.MODEL_MISSING if event.missing else Cause.STOPPED
    abandoned = RoundAbandoned(key=state.key, cause=cause, reason=event.missing or STOP_REASON)
    return abandoned, DiscardUpdates(key=state.key)


def stop_aggregating(state: Aggregating, event: PlanStopped) -> Step:
    """Stop, and keep what was being summed for the next start."""
    opening = Opening(round=state.round, attempt=state.attempt, task=Task.TRAINING)
    kept = Stopped(course=state.course, opening=opening, updates=state.updates, masked=state.masked)
    return replace(kept, missing=event.missing), ()


def stop_evaluating(state: Evaluating, event: PlanStopped) -> Step:
    """Stop, and give up the evaluation: it is made again."""
    opening = Opening(round=state.round, attempt=state.attempt + 1, task=Task.EVALUATION)
    abandoned = EvaluationAbandoned(key=state.key, reason=event.missing or STOP_REASON)
    return Stopped(course=state.course, opening=opening, missing=event.missing), (abandoned,)


def stop_stopped(state: Stopped, event: PlanStopped) -> Step:
    """Stopped already: nothing changes."""
    return state, ()


def pause(state: Running, event: PlanPaused) -> Step:
    """No further attempt opens."""
    if isinstance(state, Stopped | Finished):
        raise StateError(f"plan {state.course.terms.name} is {state.phase}: there is nothing to pause")
    return with_course(state, replace(state.course, paused=True), event.now)


def go_on(state: Running, event: PlanResumed) -> Step:
    """Attempts open again."""
    if not state.course.paused:
        raise StateError(
            f"plan {state.course.terms.name} is not paused; after a stop, `coordinator plan start` goes on with it"
        )
    return with_course(state, replace(state.course, paused=False), event.now)
