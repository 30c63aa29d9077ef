"""Where an attempt stands at the coordinator: one flat value a phase."""

from dataclasses import dataclass

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.coordinator.effects import Effect
from lorica_security.secure_aggregation.coordinator.events import OpenAttempt
from lorica_security.secure_aggregation.groups.release_groups import Link
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    MaskedInput,
    Reveal,
    SharedKeys,
    SurvivorSet,
    dealings_digest,
)
from lorica_security.secure_aggregation.roster import Roster


@dataclass(frozen=True, slots=True)
class Idle:
    phase = "idle"


@dataclass(frozen=True, kw_only=True)
class Advertising:
    opening: OpenAttempt
    awaited: frozenset[SiloName]
    advertisements: tuple[Advertisement, ...] = ()

    phase = "advertise keys"

    @property
    def attempt(self) -> Attempt:
        return self.opening.attempt


@dataclass(frozen=True, kw_only=True)
class Sharing:
    roster: Roster
    link: Link
    awaited: frozenset[SiloName]
    shared: tuple[SharedKeys, ...] = ()

    phase = "share keys"

    @property
    def attempt(self) -> Attempt:
        return self.roster.attempt


@dataclass(frozen=True, kw_only=True)
class Masking(Sharing):
    """`shared` is complete from here on: those who dealt, by name."""

    inputs: tuple[MaskedInput, ...] = ()

    phase = "masked input"

    @property
    def dealings_digest(self) -> bytes:
        return dealings_digest(tuple(item.dealing for item in self.shared))


@dataclass(frozen=True, kw_only=True)
class Agreeing(Masking):
    survivors: SurvivorSet
    agreements: tuple[Agreement, ...] = ()

    phase = "consistency check"


@dataclass(frozen=True, kw_only=True)
class Unmasking(Agreeing):
    reveals: tuple[Reveal, ...] = ()

    phase = "unmasking"


@dataclass(frozen=True, kw_only=True)
class Unmasked:
    attempt: Attempt
    roster: Roster
    survivors: SurvivorSet

    phase = "unmasked"


@dataclass(frozen=True, kw_only=True)
class Abandoned:
    attempt: Attempt
    reason: str

    phase = "abandoned"


State = Idle | Advertising | Sharing | Masking | Agreeing | Unmasking | Unmasked | Abandoned
STATES: tuple[type[State], ...] = (Idle, Advertising, Sharing, Masking, Agreeing, Unmasking, Unmasked, Abandoned)

Step = tuple[State, tuple[Effect, ...]]


Phase = Advertising | Sharing | Masking | Agreeing | Unmasking
