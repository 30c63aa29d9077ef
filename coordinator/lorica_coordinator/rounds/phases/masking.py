"""Masking: secure aggregation's own phases, under one deadline each; who spoils an attempt is barred."""

from dataclasses import replace

from lorica_coordinator.rounds.effects import Cause, Effect, MaskedAccepted, SiloDropped, Step
from lorica_coordinator.rounds.events import DeadlinePassed, MaskAnswered, MaskingOpened, SiloDeclined, SiloTrained
from lorica_coordinator.rounds.phases.abandoning import abandon
from lorica_coordinator.rounds.phases.checks import check_deadline, check_key, declined_by, dropped_by, unready
from lorica_coordinator.rounds.phases.entry import enter_aggregating_masked
from lorica_coordinator.rounds.secure_attempt import MaskedSum, MaskedVector, SecureAttempt, opened
from lorica_coordinator.rounds.states import Aggregating, Barred, Course, Dispute, Masking, State
from lorica_security.errors import MalformedMessage, WrongTime
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator import effects as protocol_effects
from lorica_security.secure_aggregation.coordinator import events as protocol_events
from lorica_security.secure_aggregation.coordinator import requests as protocol_requests
from lorica_security.secure_aggregation.coordinator import states as protocol_states
from lorica_security.secure_aggregation.messages import Complaint, MaskedInput, Reveal
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey


def check_may_send_masked(state: State, key: RoundKey, silo: SiloName) -> SecureAttempt:
    """The attempt of secure aggregation in which a masked vector of `silo` would be taken now; raises WrongTime."""
    if not isinstance(state, Masking):
        raise WrongTime(
            f"a masked vector for round {key.round} attempt {key.attempt} does not fit the phase {state.phase}: "
            "wait for the next order"
        )
    check_key(state, key)
    if state.secure is None or not isinstance(state.secure.state, protocol_states.Masking):
        raise WrongTime(f"a masked vector of silo {silo} does not fit the present phase of secure aggregation")
    if not protocol_requests.is_awaited(state.secure.state, silo):
        raise WrongTime(f"no masked vector of silo {silo} is waited for in round {key.round} attempt {key.attempt}")
    return state.secure


def trained_again(state: Masking, event: SiloTrained) -> Step:
    """Acknowledge that a silo has trained which masks already."""
    check_key(state, event.key)
    if event.silo not in state.silos:
        raise WrongTime(f"round {state.round} masks already: silo {event.silo} has trained too late for it")
    return state, ()


def masking_opened(state: Masking, event: MaskingOpened) -> Step:
    """Begin secure aggregation, without those that declined before it began."""
    check_key(state, event.key)
    if state.secure is not None:
        raise WrongTime(f"secure aggregation of round {state.round} attempt {state.attempt} is open already")
    try:
        secure, _ = opened(event.opening, event.identities, event.successions)
    except MalformedMessage as error:
        return abandon(state, Cause.MASKING, str(error), event.now)
    after: Step = replace(state, secure=secure, deadline=event.now + state.course.terms.masking_deadline_s), ()
    for silo in (item.silo for item in state.declined):  # before there was anything to drop them from
        current, effects = after
        if isinstance(current, Masking):
            further, more = protocol_step(current, protocol_events.SiloDropped(silo, "declined"), event.now, told=silo)
            after = further, (*effects, *more)
    return after


def mask_answered(state: Masking, event: MaskAnswered) -> Step:
    """Take a silo's answer in secure aggregation."""
    check_key(state, event.key)
    if state.secure is None:
        raise WrongTime(f"secure aggregation of round {state.round} attempt {state.attempt} is not open yet")
    after, effects = protocol_step(state, event.answer, event.now)
    answer = event.answer
    if isinstance(answer, MaskedInput) and not any(isinstance(it, SiloDropped) for it in effects):
        vector = MaskedVector(silo=answer.silo, digest=Digest(answer.vector.hex()))
        accepted = MaskedAccepted(key=state.key, vector=vector, signature=answer.signature)
        return after, (accepted, *effects) if after != state else ()
    return after, effects


def answered_late(state: Aggregating, event: MaskAnswered) -> Step:
    """More shares than were needed to unmask; nobody's fault."""
    check_key(state, event.key)
    if state.masked is None or not isinstance(event.answer, Reveal):
        raise WrongTime(f"round {state.round} is closed: the answer of silo {_sender(event)} came late")
    return state, ()


def _sender(event: MaskAnswered) -> SiloName:
    return event.answer.silo


def decline_masking(state: Masking, event: SiloDeclined) -> Step:
    """Take a silo out of secure aggregation at its own word."""
    check_key(state, event.key)
    if event.silo not in state.silos:
        raise WrongTime(f"silo {event.silo} is not in the cohort of round {state.round} attempt {state.attempt}")
    if any(item.silo == event.silo for item in state.declined):
        return state, ()
    state = replace(state, course=unready(state.course, event.silo), declined=(*state.declined, declined_by(event)))
    if state.secure is None:
        return state, (dropped_by(event),)
    if not protocol_requests.takes_part(state.secure.state, event.silo):
        return state, ()  # was dropped before, and is on record for that
    dropped = protocol_events.SiloDropped(event.silo, "declined")
    after, effects = protocol_step(state, dropped, event.now, told=event.silo)
    return after, (dropped_by(event), *effects)


def masking_deadline(state: Masking, event: DeadlinePassed) -> Step:
    """Close secure aggregation's present phase."""
    check_deadline(state, event)
    if state.secure is None:  # the coordinator itself could not open it; it keeps trying
        return replace(state, deadline=event.now + state.course.terms.masking_deadline_s), ()
    return protocol_step(state, protocol_events.PhaseClosed(state.secure.state.phase), event.now)


def protocol_step(state: Masking, event: protocol_events.Event, now: float, *, told: SiloName | None = None) -> Step:
    """`told`: whose silence is on record already."""
    assert state.secure is not None
    before = state.secure.state
    secure, effects = state.secure.stepped(event)
    course, records = state.course, list[Effect]()
    for blame in (effect for effect in effects if isinstance(effect, protocol_effects.Blame)):
        silent = blame.offence is protocol_effects.Offence.SILENCE
        if blame.offence is protocol_effects.Offence.DISPUTED:
            course = _disputing(course, event, state.round)
        elif not silent:
            course = _barring(course, blame.silo, state.round)
        if blame.silo != told:
            detail = blame.detail if silent else f"{blame.offence.value}: {blame.detail}"
            outcome = "late" if silent else "refused"
            records.append(SiloDropped(key=state.key, silo=blame.silo, outcome=outcome, detail=detail))
    after: State
    then = replace(state, course=course)
    match secure.state:
        case protocol_states.Abandoned(reason=reason):
            after, further = abandon(then, Cause.MASKING, reason, now)
        case protocol_states.Unmasked():
            assert isinstance(before, protocol_states.Unmasking)
            vectors = tuple(
                MaskedVector(silo=item.silo, digest=Digest(item.vector.hex()))
                for item in before.inputs
                if item.silo in before.survivors.silos
            )
            masked = MaskedSum(vectors=vectors, attempt=secure)
            after, further = enter_aggregating_masked(course, state.round, state.attempt, masked)
        case _:
            deadline = state.deadline
            if secure.state.phase != before.phase:
                deadline = now + course.terms.masking_deadline_s
            after, further = replace(then, secure=secure, deadline=deadline), ()
    return after, (*records, *further)


def _barring(course: Course, silo: SiloName, round_number: int) -> Course:
    others = tuple(item for item in course.barred if item.silo != silo and item.round >= round_number)
    return replace(course, barred=(*others, Barred(silo=silo, round=round_number + 1)))


def _disputing(course: Course, complaint: protocol_events.Event, round_number: int) -> Course:
    assert isinstance(complaint, Complaint), "nothing else can be in dispute"
    dispute = Dispute(accuser=complaint.silo, dealer=complaint.dealer, round=round_number + 1)
    others = (it for it in course.disputes if it.round >= round_number and set(it.silos) != set(dispute.silos))
    return replace(course, disputes=(*others, dispute))
