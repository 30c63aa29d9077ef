"""What each silo of an attempt does now, where the records say no more than that it was asked to train."""

from collections.abc import Collection
from dataclasses import replace

from lorica_coordinator.rounds.secure_attempt import SecureAttempt
from lorica_coordinator.rounds.states import Collecting, Masking, State, course_of, round_of
from lorica_coordinator.service.records import RoundRow
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator.requests import takes_part
from silo_wire.canonical import Digest

TRAINING = "training"
"""What the records have from the opening of an attempt on, until a silo's update is there or the silo is dropped."""
NO_UPDATE = "no update"


def as_they_stand(row: RoundRow, plan: Digest, state: State, connected: Collection[SiloName]) -> RoundRow:
    """Training, trained, masking or absent while the attempt runs; no update once it cannot bring one any more."""
    course = course_of(state)
    here = course is not None and course.terms.plan == plan and round_of(state) == (row.round, row.attempt)

    def outcome(silo: SiloName) -> str:
        match state if here and row.outcome == "running" else None:
            case Collecting(trained=trained) if silo in trained:
                return "trained"
            case Collecting():
                return TRAINING if silo in connected else "absent"
            case Masking(secure=None) as masking if silo in masking.silos:
                return "trained"
            case Masking(secure=SecureAttempt() as secure) if takes_part(secure.state, silo):
                return "masking" if silo in connected else "absent"
            case _:
                return NO_UPDATE

    silos = tuple(replace(it, outcome=outcome(it.silo)) if it.outcome == TRAINING else it for it in row.silos)
    return replace(row, silos=silos)
