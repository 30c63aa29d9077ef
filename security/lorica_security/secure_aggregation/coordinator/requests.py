"""What the present phase asks of a silo, and whether the silo still takes part."""

from typing import Any

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator.effects import Request, Send
from lorica_security.secure_aggregation.coordinator.states import (
    Advertising,
    Agreeing,
    Masking,
    Phase,
    Sharing,
    State,
    Unmasked,
    Unmasking,
    WithRoster,
)
from lorica_security.secure_aggregation.messages import Delivery, UnmaskRequest


def delivery_to(state: Masking, holder: SiloName) -> Delivery:
    """All dealings, and the boxes for this holder."""
    return Delivery(
        roster=state.roster.digest,
        holder=holder,
        dealings=tuple(item.dealing for item in state.shared),
        boxes=tuple(share for item in state.shared for share in item.boxes if share.holder == holder),
    )


def is_awaited(state: State, silo: SiloName) -> bool:
    """Whether the present phase waits for an answer of `silo`, to `request_to` it."""
    return isinstance(state, Phase) and silo in state.awaited


def request_to(state: State, silo: SiloName) -> Request | None:
    """What a silo that is awaited has to answer, however often it asks; None: to advertise keys."""
    match state:
        case Unmasking():
            return UnmaskRequest(roster=state.roster.digest, agreements=state.agreements)
        case Agreeing():
            return state.survivors
        case Masking():
            return delivery_to(state, silo)
        case Sharing():
            return state.roster
        case _:
            return None


def requests_to_all(state: WithRoster) -> tuple[Send, ...]:
    """What each awaited silo is sent at the beginning of a phase."""
    requests = ((silo, request_to(state, silo)) for silo in sorted(state.awaited))
    return tuple(Send(to=silo, message=request) for silo, request in requests if request is not None)


def takes_part(state: State, silo: SiloName) -> bool:
    """Whether `silo` has answered in the present phase or is awaited: it was neither dropped nor left out."""
    answers: tuple[Any, ...]
    match state:
        case Unmasked():
            return silo in state.survivors.silos
        case Unmasking():
            answers = state.reveals
        case Agreeing():
            answers = state.agreements
        case Masking():
            answers = state.inputs
        case Sharing():
            answers = state.shared
        case Advertising():
            answers = state.advertisements
        case _:
            return False
    return silo in state.awaited or any(answer.silo == silo for answer in answers)
