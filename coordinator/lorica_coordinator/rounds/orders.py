"""What each silo should do now, and what the coordinator waits for: pure functions of the state."""

from collections.abc import Iterable

from lorica_coordinator.rounds.cohorts.cohort import cohort_of, named, outstanding
from lorica_coordinator.rounds.cohorts.whole_groups import awaited_groups
from lorica_coordinator.rounds.secure_attempt import MaskedSum, SecureAttempt
from lorica_coordinator.rounds.states import (
    Aggregating,
    Collecting,
    Declined,
    Evaluating,
    Gathering,
    Idle,
    Masking,
    Report,
    State,
    Stopped,
    Task,
    course_of,
    round_of,
)
from lorica_coordinator.rounds.states import Finished as PlanFinished
from lorica_coordinator.rounds.terms import PlanTerms
from lorica_coordinator.rounds.updates import CommittedUpdate
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator.requests import is_awaited, request_to, takes_part
from lorica_security.secure_aggregation.roster import Roster
from silo_wire.messages import Evaluate, Finished, Mask, Order, Prepare, Standby, StandbyReason, Train


def order_for(state: State, silo: SiloName, now: float) -> Order:
    """The order that stands for a connected silo.

    Work of the round comes first; then a silo that is not ready prepares.
    """
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
        case Masking(secure=SecureAttempt() as secure) if is_awaited(secure.state, silo):
            return Mask(
                key=state.key,
                model=course.model,
                seconds_left=max(0.0, state.deadline - now),
                attempt=secure.attempt,
                message=(request := request_to(secure.state, silo)),
                identities=secure.identities if isinstance(request, Roster) else (),
                successions=secure.successions if isinstance(request, Roster) else (),
            )
        case Evaluating() if silo in _at_work(state):
            return Evaluate(key=state.key, model=course.model, seconds_left=max(0.0, state.deadline - now))
    if silo not in course.ready:
        return Prepare(course.terms.plan)
    match state:
        case Collecting() if silo in state.trained:
            return Standby(StandbyReason.TRAINED)
        case Masking(secure=None) if silo in state.silos:
            return Standby(StandbyReason.TRAINED)
        case Masking(secure=SecureAttempt() as secure) if takes_part(secure.state, silo):
            return Standby(StandbyReason.UPDATE_RECEIVED)
        case Masking():
            return Standby(StandbyReason.NOT_IN_COHORT)
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
    done = (*state.trained, *_silos_of(state.updates)) if isinstance(state, Collecting) else _silos_of(state.reports)
    return outstanding(state.cohort, done, _silos_of(state.declined))


def _silos_of(items: Iterable[Report | CommittedUpdate | Declined]) -> tuple[SiloName, ...]:
    return tuple(item.silo for item in items)


CLOSING = "closing round, in which nobody trains"


def waiting_for(state: State) -> str:
    """What the present phase waits for, in one line for the operator."""
    course = course_of(state)
    closing = course is not None and round_of(state)[0] > course.terms.rounds
    return f"{CLOSING}: {_waiting_for(state)}" if closing else _waiting_for(state)


def _waiting_for(state: State) -> str:
    match state:
        case Idle():
            return f"{len(state.population)} silos enrolled; no plan has been started"
        case Gathering():
            return _gathering(state)
        case Collecting():
            done = f"{len(state.trained)} of {len(state.cohort)} silos have trained"
            if not state.course.terms.secure_aggregation:
                done = f"{len(state.updates)} of {len(state.cohort)} updates in"
            return f"{done}, working: {named(_at_work(state))}"
        case Masking():
            return _masking(state)
        case Aggregating(masked=MaskedSum() as masked):
            return f"unmasking the sum of {len(masked.vectors)} silos"
        case Aggregating():
            return f"summing {len(state.updates)} updates"
        case Evaluating():
            return f"{len(state.reports)} of {len(state.cohort)} evaluations in, working: {named(_at_work(state))}"
        case Stopped(missing=str(missing)) if missing:
            return f"stopped: {missing}"
        case Stopped():
            return f"stopped by the operator; `coordinator plan start` goes on with plan {state.course.terms.name}"
        case PlanFinished():
            return state.reason or f"all {state.course.terms.rounds} rounds done"


def _masking(state: Masking) -> str:
    if state.secure is None:
        return f"opening secure aggregation among {len(state.silos)} silos"
    at = state.secure.state
    awaited = named(silo for silo in state.silos if is_awaited(at, silo))
    return f"secure aggregation, {at.phase}; waiting for {awaited}"


def _gathering(state: Gathering) -> str:
    course = state.course
    training, number = state.opening.task is Task.TRAINING, state.opening.round
    population, ready, unawaited = (
        course.terms.taking_part(silos, number, training=training)
        for silos in (course.population, course.ready, course.unawaited)
    )
    least = course.terms.quorum(number, training=training)
    who = _who(course.terms, number, training=training)
    if course.population and not population:
        enrolled = f"{len(course.population)} silos are enrolled and none of them {who.rstrip()}"
        return f"{enrolled}, of whom this takes {least} at least; `coordinator invite` brings one"
    counts = f"{len(ready)} of {len(population)} enrolled silos {who}ready "
    counts += "to train" if training else "to evaluate"
    if barred := course.barred_in(state.opening.round):
        counts += f", left out until `coordinator plan start`: {named(sorted(barred))}"
    absent = named(cohort_of(population - ready))
    awaited = named(cohort_of(population - ready - unawaited))
    if not state.started:
        return f"{counts}; waiting for `coordinator plan start {course.terms.name}`"
    if course.paused:
        return f"{counts}; paused by the operator, `coordinator plan resume` goes on"
    if len(ready) < least:
        return f"{counts}, at least {least} are needed; waiting for {absent}"
    if (lacking := awaited_groups(state)) is not None:
        return f"{counts}; {lacking.in_words}"
    return f"{counts}; waiting for {awaited} until the deadline"


def _who(terms: PlanTerms, round_number: int, *, training: bool) -> str:
    """Of whom a round is, where not of all."""
    if terms.labelled_alone == "never":
        return ""
    return "without labels " if training and terms.who_trains.unlabelled_round(round_number) else "with labels "
