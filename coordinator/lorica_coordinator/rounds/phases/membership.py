"""Silos are enrolled, grouped, ready, gone and revoked, whatever the phase."""

from dataclasses import replace

from lorica_coordinator.rounds.effects import Cause, DiscardUpdates, RoundAbandoned, SiloDropped, Step
from lorica_coordinator.rounds.events import GroupsChanged, ReadinessDeclared, SiloEnrolled, SiloLeft, SiloRevoked
from lorica_coordinator.rounds.phases.checks import check_enrolled
from lorica_coordinator.rounds.phases.collecting import settle_collecting
from lorica_coordinator.rounds.phases.evaluating import settle_evaluating
from lorica_coordinator.rounds.phases.gathering import with_course
from lorica_coordinator.rounds.phases.masking import protocol_step
from lorica_coordinator.rounds.secure_attempt import SecureAttempt
from lorica_coordinator.rounds.states import Collecting, Declined, Evaluating, Idle, Masking, Running, State, Stopped
from lorica_security.secure_aggregation.coordinator import events as protocol_events
from lorica_security.secure_aggregation.coordinator import requests as protocol_requests
from silo_wire.messages import DeclineReason


def enrol_idle(state: Idle, event: SiloEnrolled) -> Step:
    """A silo joins the federation while there is no plan."""
    return replace(state, population=state.population | {event.silo}), ()


def enrol(state: Running, event: SiloEnrolled) -> Step:
    """A silo joins the federation."""
    return with_course(state, replace(state.course, population=state.course.population | {event.silo}), event.now)


def regroup_idle(state: Idle, event: GroupsChanged) -> Step:
    """Other release groups stand while there is no plan."""
    return replace(state, groups=event.groups), ()


def regroup(state: Running, event: GroupsChanged) -> Step:
    """Other release groups stand: a masked sum may be possible now."""
    return with_course(state, replace(state.course, groups=event.groups), event.now)


def revoke_idle(state: Idle, event: SiloRevoked) -> Step:
    """A silo leaves the federation while there is no plan."""
    return replace(state, population=state.population - {event.silo}), ()


def revoke(state: Running, event: SiloRevoked) -> Step:
    """A silo leaves the federation, and the attempt under way."""
    course = state.course
    left = replace(
        course,
        population=course.population - {event.silo},
        ready=course.ready - {event.silo},
        unawaited=course.unawaited - {event.silo},
    )
    if isinstance(state, Collecting | Masking | Evaluating):
        return _without(replace(state, course=left), event)
    if isinstance(state, Stopped):
        return _without_in_what_was_stopped(replace(state, course=left), event)
    return with_course(state, left, event.now)


def _without_in_what_was_stopped(state: Stopped, event: SiloRevoked) -> Step:
    """The sum that a stop put off is made without this silo, or given up where no quorum is left."""
    updates = tuple(update for update in state.updates if update.silo != event.silo)
    if updates == state.updates:
        return state, ()
    opening = state.opening
    key = state.course.key(opening.round, opening.attempt)
    dropped = SiloDropped(key=key, silo=event.silo, outcome="refused", detail=event.reason)
    if len(updates) >= state.course.terms.quorum(opening.round):
        return replace(state, updates=updates), (dropped,)
    abandoned = RoundAbandoned(key=key, cause=Cause.REVOKED, reason=f"silo {event.silo} was {event.reason}")
    again = replace(opening, attempt=opening.attempt + 1)
    after = Stopped(course=state.course, opening=again, missing=state.missing)
    return after, (dropped, abandoned, DiscardUpdates(key=key))


def _without(state: Collecting | Masking | Evaluating, event: SiloRevoked) -> Step:
    """The attempt goes on without this silo, if it was in it."""
    silo = event.silo
    cohort = state.silos if isinstance(state, Masking) else state.cohort
    if silo not in cohort or any(item.silo == silo for item in state.declined):
        return state, ()
    declined = (*state.declined, Declined(silo=silo, reason=DeclineReason.REVOKED, detail=event.reason))
    dropped = SiloDropped(key=state.key, silo=silo, outcome="refused", detail=event.reason)
    after: State
    match state:
        case Collecting():
            updates = tuple(update for update in state.updates if update.silo != silo)
            trained = tuple(name for name in state.trained if name != silo)
            after, effects = settle_collecting(
                replace(state, updates=updates, trained=trained, declined=declined), event.now
            )
        case Masking(secure=None):
            after, effects = replace(state, declined=declined), ()
        case Masking(secure=SecureAttempt() as secure):
            after, effects = replace(state, declined=declined), ()
            if protocol_requests.takes_part(secure.state, silo):
                after, effects = protocol_step(
                    after, protocol_events.SiloDropped(silo, "revoked"), event.now, told=silo
                )
        case Evaluating():
            reports = tuple(report for report in state.reports if report.silo != silo)
            return settle_evaluating(replace(state, reports=reports, declined=declined), event.now)
    return after, (dropped, *effects)


def declare(state: Running, event: ReadinessDeclared) -> Step:
    """A connected silo says whether it takes part."""
    check_enrolled(state, event.silo)
    course, silo = state.course, frozenset({event.silo})
    if event.ready:
        course = replace(course, ready=course.ready | silo, unawaited=course.unawaited - silo)
    else:
        course = replace(course, ready=course.ready - silo)
    return with_course(state, course, event.now)


def leave_idle(state: Idle, event: SiloLeft) -> Step:
    """A connection is gone while there is no plan."""
    return state, ()


def leave(state: Running, event: SiloLeft) -> Step:
    """A connection is gone: the silo is not ready, and is dropped from nothing."""
    course = replace(state.course, ready=state.course.ready - {event.silo})
    return with_course(state, course, event.now)
