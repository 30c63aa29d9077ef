"""What the coordinator must store, send and do after an event, in this order; and what a silo is named for."""

from dataclasses import dataclass
from enum import Enum

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.coordinator.events import Event
from lorica_security.secure_aggregation.masked_vectors.fixed_point import FixedPoint
from lorica_security.secure_aggregation.masked_vectors.mask_stream import MaskSum
from lorica_security.secure_aggregation.messages import Delivery, SurvivorSet, UnmaskRequest
from lorica_security.secure_aggregation.roster import Roster


class Offence(Enum):
    """What a silo is named for."""

    SILENCE = "silence"
    BAD_SIGNATURE = "bad signature"
    BAD_MESSAGE = "bad message"
    WRONG_LENGTH = "wrong length"
    BAD_SHARE = "bad share"
    FALSE_COMPLAINT = "false complaint"
    DISPUTED = "disputed"  # one of two lied, and the box cannot show which


@dataclass(frozen=True, slots=True)
class Journal:
    """Append to the journal of the attempt, durably, before any later effect."""

    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Give a silo what it is to answer."""

    to: SiloName
    message: "Request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Name a silo, for the record and so that it can be barred."""

    silo: SiloName
    offence: Offence
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmask:
    """Add up the vectors of `survivors`, mod 2^32, then apply `masks`: what is left is the encoded sum.

    Then erase `masks`.
    """

    attempt: Attempt
    survivors: tuple[SiloName, ...]
    dropped: tuple[SiloName, ...]
    fixed_point: FixedPoint
    masks: MaskSum


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """No sum comes out of this attempt. Tell the silos, so that they erase; discard their vectors."""

    attempt: Attempt
    reason: str


Effect = Journal | Send | Blame | Unmask | Abandon


Request = Roster | Delivery | SurvivorSet | UnmaskRequest
