"""What can happen to an attempt at the coordinator: answers of silos, and silos that do not answer."""

from dataclasses import dataclass

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    Complaint,
    MaskedInput,
    Reveal,
    SharedKeys,
    check_names,
)
from lorica_security.secure_aggregation.parameters import Terms


@dataclass(frozen=True, kw_only=True)
class OpenAttempt:
    """`invited` by name: those who may advertise keys."""

    attempt: Attempt
    terms: Terms
    invited: tuple[SiloName, ...]

    def __post_init__(self) -> None:
        check_names("invitation", *self.invited)


@dataclass(frozen=True, slots=True)
class SiloDropped:
    """This silo will not answer in this attempt: it declined, left, its upload failed, or it was blamed for a
    message.
    """

    silo: SiloName
    detail: str


@dataclass(frozen=True, slots=True)
class PhaseClosed:
    """The deadline of the phase that `phase` names has passed."""

    phase: str


Event = (
    OpenAttempt | Advertisement | SharedKeys | Complaint | MaskedInput | Agreement | Reveal | SiloDropped | PhaseClosed
)
EVENTS: tuple[type[Event], ...] = (
    OpenAttempt,
    Advertisement,
    SharedKeys,
    Complaint,
    MaskedInput,
    Agreement,
    Reveal,
    SiloDropped,
    PhaseClosed,
)
