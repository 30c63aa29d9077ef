"""How the federation stands, for the operator: put together from the machine's state, the records and who is
connected."""

from collections.abc import Sequence
from dataclasses import dataclass

from lorica_coordinator.rounds.orders import order_for, waiting_for
from lorica_coordinator.rounds.states import (
    Collecting,
    Declined,
    Evaluating,
    Finished,
    Masking,
    State,
    course_of,
    round_of,
)
from lorica_coordinator.rounds.terms import EXACT_MATCH
from lorica_coordinator.service.attendance import Attendance
from lorica_coordinator.service.records import EnrolledSilo
from lorica_security.identifiers import FederationName, SiloName
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluate, Mask, Train


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloStanding:
    """`state`: invited, enrolled (never seen), revoked, absent, connected (nothing is asked of it), preparing, ready,
    training, masking, evaluating, declined.

    `fraction` is the progress of the present phase, 0 to 1, as the agent reports it; 0 where nothing of single silos is
    shown: how large its steps are tells how many records a silo has.
    """

    silo: SiloName
    state: str
    detail: str
    last_seen_unix_s: float
    fraction: float
    certificate_expires_unix_s: float
    agent_version: str = ""
    agent_wire: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """`seconds_left` of the phase, None without a deadline; plan and models None while there is no plan.

    `shows_single_silos`: whether rounds come with what one silo told (PlanTerms). `score` is by what answers count, as
    people are shown it.
    """

    federation: FederationName
    plan_name: str
    plan: Digest | None
    phase: str
    detail: str
    round: int
    attempt: int
    rounds: int
    seconds_left: float | None
    silos: tuple[SiloStanding, ...]
    model: Digest | None
    best_model: Digest | None
    shows_single_silos: bool
    score: str = EXACT_MATCH


def standing(
    *,
    federation: FederationName,
    state: State,
    fault: str | None,
    behind: str | None = None,
    enrolled: Sequence[EnrolledSilo],
    invited: Sequence[SiloName],
    attendance: Attendance,
    now: float,
    seconds_left: float | None,
) -> Standing:
    """`fault` is why the present phase cannot go on; `behind` what silos have of release groups that is newer than what
    is here.

    `now` is in Unix seconds; `seconds_left` of the phase, None where it has no deadline.
    """
    course = course_of(state)
    round_number, attempt = round_of(state)
    names = {item.silo for item in enrolled}
    silos = [_enrolled(state, item, attendance, now) for item in enrolled]
    silos += [
        SiloStanding(
            silo=name,
            state="invited",
            detail="",
            last_seen_unix_s=0.0,
            fraction=0.0,
            certificate_expires_unix_s=0.0,
        )
        for name in invited
        if name not in names
    ]
    return Standing(
        federation=federation,
        plan_name="" if course is None else course.terms.name,
        plan=None if course is None else course.terms.plan,
        phase=state.phase,
        detail="; ".join(dict.fromkeys(says for says in (waiting_for(state), fault, behind) if says is not None)),
        round=round_number,
        attempt=attempt,
        rounds=0 if course is None else max(course.terms.rounds, round_number),  # a closing round comes after them
        seconds_left=seconds_left,
        silos=tuple(sorted(silos, key=lambda item: item.silo)),
        model=None if course is None else course.model,
        best_model=None if course is None else course.best_model,
        shows_single_silos=course is None or course.terms.shows_single_silos,
        score=EXACT_MATCH if course is None else course.terms.score,
    )


def _enrolled(state: State, silo: EnrolledSilo, attendance: Attendance, now: float) -> SiloStanding:
    seat, course = attendance.seat(silo.silo), course_of(state)
    told = course is None or course.terms.shows_single_silos
    declined = next((item for item in _declined(state) if item.silo == silo.silo), None)
    detail = ""
    if silo.revoked_unix_s is not None:
        name = "revoked"
    elif seat is None:
        name = "absent" if silo.last_seen_unix_s else "enrolled"
    elif declined is not None:
        name = "declined"
        detail = f"{declined.reason.value} {declined.detail}".rstrip()
    else:
        name = _at_work(state, silo.silo)
        if name == "preparing":
            detail = seat.unready_reason
        elif seat.phase is not None and name in ("training", "masking", "evaluating"):
            detail = seat.phase.value
    return SiloStanding(
        silo=silo.silo,
        state=name,
        detail=detail,
        last_seen_unix_s=silo.last_seen_unix_s if seat is None else now,
        fraction=seat.fraction if seat is not None and told else 0.0,
        certificate_expires_unix_s=silo.certificate_expires_unix_s,
        agent_version=silo.agent_version,
        agent_wire=silo.agent_wire,
    )


def _declined(state: State) -> Sequence[Declined]:
    return state.declined if isinstance(state, Collecting | Masking | Evaluating) else ()


def _at_work(state: State, silo: SiloName) -> str:
    course = course_of(state)
    match order_for(state, silo, now=0.0):  # which order it is does not depend on the time
        case Train():
            return "training"
        case Mask():
            return "masking"
        case Evaluate():
            return "evaluating"
    if course is None or isinstance(state, Finished):
        return "connected"
    return "ready" if silo in course.ready else "preparing"
