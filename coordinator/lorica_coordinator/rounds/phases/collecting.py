"""Collecting: updates, or silos that have trained, come in until all are settled or the deadline has passed."""

from dataclasses import replace

from lorica_coordinator.rounds.cohorts.cohort import named, outstanding
from lorica_coordinator.rounds.cohorts.whole_groups import wanting
from lorica_coordinator.rounds.effects import Cause, SiloDropped, Step, UpdateAccepted
from lorica_coordinator.rounds.events import DeadlinePassed, SiloDeclined, SiloTrained, UpdateCommitted
from lorica_coordinator.rounds.phases.abandoning import abandon
from lorica_coordinator.rounds.phases.checks import (
    check_deadline,
    check_in_cohort,
    check_key,
    declined_by,
    dropped_by,
    unready,
)
from lorica_coordinator.rounds.phases.entry import enter_aggregating, enter_masking
from lorica_coordinator.rounds.states import Aggregating, Collecting, State
from lorica_coordinator.rounds.updates import CommittedUpdate
from lorica_security.errors import Conflict, WrongTime
from lorica_security.identifiers import SiloName
from silo_wire.messages import RoundKey


def check_may_commit(state: State, key: RoundKey, silo: SiloName) -> None:
    """Raise unless an update of `silo` for `key` would be taken now: WrongTime, or Conflict after a decline."""
    if not isinstance(state, Collecting):
        raise WrongTime(
            f"an update for round {key.round} attempt {key.attempt} does not fit the phase {state.phase}: "
            "wait for the next order"
        )
    check_key(state, key)
    if state.course.terms.secure_aggregation:
        raise WrongTime(f"round {key.round} takes masked vectors alone: an update in the clear is not wanted")
    _check_may_work(state, silo)


def _check_may_work(state: Collecting, silo: SiloName) -> None:
    check_in_cohort(state, silo)
    if any(item.silo == silo for item in state.declined):
        raise Conflict(f"silo {silo} has declined round {state.round} attempt {state.attempt}: wait for the next order")


def commit(state: Collecting, event: UpdateCommitted) -> Step:
    """Take an update into the attempt."""
    update = event.update
    check_may_commit(state, event.key, update.silo)
    if _is_repeated(state.updates, update):
        return state, ()
    updates = tuple(sorted((*state.updates, update), key=lambda item: item.silo))
    accepted = UpdateAccepted(key=state.key, update=update, signature=event.signature)
    after, effects = settle_collecting(replace(state, updates=updates), event.now)
    return after, (accepted, *effects)


def commit_again(state: Aggregating, event: UpdateCommitted) -> Step:
    """Acknowledge an update that is being summed already."""
    check_key(state, event.key)
    if not _is_repeated(state.updates, event.update):
        raise WrongTime(f"round {state.round} is closed: an update of silo {event.update.silo} came late")
    return state, ()


def _is_repeated(updates: tuple[CommittedUpdate, ...], update: CommittedUpdate) -> bool:
    for held in updates:
        if held.silo == update.silo:
            if held.digest != update.digest:
                raise Conflict(f"silo {update.silo} has committed update {held.digest} and sends {update.digest}")
            return True
    return False


def silo_trained(state: Collecting, event: SiloTrained) -> Step:
    """Note that a silo holds a delta to be masked."""
    check_key(state, event.key)
    if not state.course.terms.secure_aggregation:
        raise WrongTime(f"round {state.round} takes updates in the clear: nothing is masked in it")
    _check_may_work(state, event.silo)
    if event.model != state.course.model:
        raise WrongTime(f"silo {event.silo} trained from model {event.model}, the round's is {state.course.model}")
    if event.silo in state.trained:
        return state, ()
    return settle_collecting(replace(state, trained=tuple(sorted((*state.trained, event.silo)))), event.now)


def decline_training(state: Collecting, event: SiloDeclined) -> Step:
    """Take a silo out of the attempt at its own word."""
    check_key(state, event.key)
    check_in_cohort(state, event.silo)
    if any(item.silo == event.silo for item in state.declined):
        return state, ()
    if any(item.silo == event.silo for item in state.updates):
        raise Conflict(f"silo {event.silo} has committed its update for round {state.round}: it cannot decline it")
    after, effects = settle_collecting(
        replace(
            state,
            course=unready(state.course, event.silo),
            trained=tuple(silo for silo in state.trained if silo != event.silo),
            declined=(*state.declined, declined_by(event)),
        ),
        event.now,
    )
    return after, (dropped_by(event), *effects)


def settle_collecting(state: Collecting, now: float) -> Step:
    """Stay, or go on once all have settled, or abandon where no sum can come out any more."""
    least = state.course.terms.quorum(state.round)
    left = frozenset(outstanding(state.cohort, (item.silo for item in state.declined)))
    lacking = wanting(state.course, left, state.round) if state.declined else None
    if len(left) < least or lacking is not None:
        says = f"fewer than {least} silos are left" if lacking is None else lacking.in_words
        reasons = "; ".join(f"{item.silo}: {item.reason.value} {item.detail}".rstrip() for item in state.declined)
        return abandon(state, Cause.DECLINED, f"{says}, declined have {reasons}", now)
    if _missing(state):
        return state, ()
    return _collected(state, now)


def _collected(state: Collecting, now: float) -> Step:
    if state.course.terms.secure_aggregation:
        return enter_masking(state, now)
    return enter_aggregating(state.course, state.round, state.attempt, state.updates)


def _missing(state: Collecting) -> tuple[SiloName, ...]:
    done = (*state.trained, *(item.silo for item in state.updates))
    return outstanding(state.cohort, done, (item.silo for item in state.declined))


def collecting_deadline(state: Collecting, event: DeadlinePassed) -> Step:
    """Drop who is late, then go on with a quorum or abandon."""
    check_deadline(state, event)
    late = _missing(state)
    dropped = tuple(
        SiloDropped(key=state.key, silo=silo, outcome="late", detail="no update before the deadline") for silo in late
    )
    least, done = state.course.terms.quorum(state.round), len(state.updates) + len(state.trained)
    if done >= least:
        after, effects = _collected(state, event.now)
    else:
        after, effects = abandon(
            state, Cause.LATE, f"{done} of at least {least} updates at the deadline, late: {named(late)}", event.now
        )
    return after, (*dropped, *effects)
