"""What several phases check of an event, and how a decline is recorded."""

from dataclasses import replace

from lorica_coordinator.rounds.effects import SiloDropped
from lorica_coordinator.rounds.events import DeadlinePassed, SiloDeclined
from lorica_coordinator.rounds.states import (
    Aggregating,
    Collecting,
    Course,
    Declined,
    Evaluating,
    Gathering,
    Masking,
    State,
    population_of,
)
from lorica_security.errors import AuthorisationError, WrongTime
from lorica_security.identifiers import SiloName
from silo_wire.messages import RoundKey


def check_key(state: Collecting | Masking | Aggregating | Evaluating, key: RoundKey) -> None:
    """Raise WrongTime unless the message is about the present plan, round and attempt."""
    if key != state.key:
        raise WrongTime(
            f"message for plan {key.plan[:12]} round {key.round} attempt {key.attempt}, "
            f"now is plan {state.key.plan[:12]} round {state.round} attempt {state.attempt}: wait for the next order"
        )


def check_in_cohort(state: Collecting | Evaluating, silo: SiloName) -> None:
    """Raise WrongTime unless the silo takes part in this attempt."""
    if silo not in state.cohort:
        raise WrongTime(f"silo {silo} is not in the cohort of round {state.round} attempt {state.attempt}")


def check_enrolled(state: State, silo: SiloName) -> None:
    """Raise AuthorisationError unless the silo is enrolled."""
    if silo not in population_of(state):
        raise AuthorisationError(f"silo {silo} is not enrolled in this federation: enrol it with a new invitation")


def check_deadline(state: Gathering | Collecting | Masking | Evaluating, event: DeadlinePassed) -> None:
    """Raise WrongTime for a timer of an earlier deadline, or one that came too early."""
    if event.deadline != state.deadline or event.now < event.deadline:
        raise WrongTime(f"deadline {event.deadline} is not the one of phase {state.phase}, or has not passed")


def unready(course: Course, silo: SiloName) -> Course:
    """The course once the silo has to declare readiness anew."""
    return replace(course, ready=course.ready - {silo})


def declined_by(event: SiloDeclined) -> Declined:
    """What a phase keeps of a decline."""
    return Declined(silo=event.silo, reason=event.reason, detail=event.detail)


def dropped_by(event: SiloDeclined) -> SiloDropped:
    """What is recorded of a decline."""
    detail = f"{event.reason.value}: {event.detail}" if event.detail else event.reason.value
    return SiloDropped(key=event.key, silo=event.silo, outcome="declined", detail=detail)
