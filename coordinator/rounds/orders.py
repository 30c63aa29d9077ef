"""What each silo should do now, and what the coordinator waits for: pure functions of the state."""

from coordinator.rounds.cohort import cohort_of, named, outstanding
from coordinator.rounds.states import (
    Aggregating,
    Collecting,
    Evaluating,
    Gathering,
    Idle,
    State,
    Stopped,
    Task,
    course_of,
)
from coordinator.rounds.states import Finished as PlanFinished
from security.identifiers import SiloName
from silo_wire.messages import Evaluate, Finished, Order, Prepare, Standby, StandbyReason, Train


def order_for(state: State, silo: SiloName, now: float) -> Order:
    """The order that stands for a connected silo. Work of the round comes first; then a silo that is not ready prepares."""
    course = course_of(state)
    if course is None:
        return Standby(StandbyReason.NO_PLAN)
    match state:
        case PlanFinished():
            return Finished(
                plan=course.terms.plan,
                rounds=course.terms.rounds,
                final_model=course.model,
                best_model=course.best_model,
            )
        case Stopped():
            return Standby(StandbyReason.STOPPED)
        case Collecting() if silo in _at_work(state):
            return Train(
                key=state.key,
                model=course.model,
                seconds_left=max(0.0, state.deadline - now),
                included_update=next((one.digest for one in course.included if one.silo == silo), None),
            )
        case Evaluating() if silo in _at_work(state):
            return Evaluate(key=state.key, model=course.model, seconds_left=max(0.0, state.deadline - now))
    if silo not in course.ready:
        return Prepare(course.terms.plan)
    match state:
        case Collecting() | Evaluating() if silo in state.cohort:
            return Standby(StandbyReason.UPDATE_RECEIVED)
        case Collecting() | Evaluating():
            return Standby(StandbyReason.NOT_IN_COHORT)
        case Aggregating():
            return Standby(StandbyReason.AGGREGATING)
        case _:
            # Counts alone: who else is in the federation is not this silo's to know.
            return Standby(
                StandbyReason.GATHERING, f"{len(course.ready)} of {len(course.population)} enrolled silos ready"
            )


def _at_work(state: Collecting | Evaluating) -> tuple[SiloName, ...]:
    done = state.updates if isinstance(state, Collecting) else state.reports
    return outstanding(state.cohort, (item.silo for item in done), (item.silo for item in state.declined))


def waiting_for(state: State) -> str:
    """What the present phase waits for, in one line for the operator."""
    match state:
        case Idle():
            return f"{len(state.population)} silos enrolled; no plan has been started"
        case Gathering():
            return _gathering(state)
        case Collecting():
            return f"{len(state.updates)} of {len(state.cohort)} updates in, working: {named(_at_work(state))}"
        case Aggregating():
            return f"summing {len(state.updates)} updates"
        case Evaluating():
            return f"{len(state.reports)} of {len(state.cohort)} evaluations in, working: {named(_at_work(state))}"
        case Stopped():
            return "stopped by the operator; `coordinator plan start` goes on"
        case PlanFinished():
            return f"all {state.course.terms.rounds} rounds done"


def _gathering(state: Gathering) -> str:
    course = state.course
    purpose = "to evaluate" if state.opening.task is Task.EVALUATION else "to train"
    counts = f"{len(course.ready)} of {len(course.population)} enrolled silos ready {purpose}"
    absent = named(cohort_of(course.population - course.ready))
    if not state.started:
        return f"{counts}; waiting for `coordinator plan start`"
    if len(course.ready) < course.terms.min_silos:
        return f"{counts}, at least {course.terms.min_silos} are needed; waiting for {absent}"
    return f"{counts}; waiting for {absent} until the deadline"
