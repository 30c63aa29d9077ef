"""Where an attempt stands at the coordinator: one flat value a phase.

No state is a kind of another; what several states have in common is named by a union of them.
"""

from dataclasses import dataclass
from typing import ClassVar

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
    """Before the attempt."""

    phase: ClassVar[str] = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertising:
    """Waiting for the keys of those invited."""

    phase: ClassVar[str] = "advertise keys"
    opening: OpenAttempt
    awaited: frozenset[SiloName]
    advertisements: tuple[Advertisement, ...] = ()

    @property
    def attempt(self) -> Attempt:
        return self.opening.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Waiting for what each silo of the roster deals."""

    phase: ClassVar[str] = "share keys"
    roster: Roster
    link: Link
    awaited: frozenset[SiloName]
    shared: tuple[SharedKeys, ...] = ()

    @property
    def attempt(self) -> Attempt:
        return self.roster.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """Waiting for masked vectors. `shared` is complete from here on: those who dealt, by name."""

    phase: ClassVar[str] = "masked input"
    roster: Roster
    link: Link
    awaited: frozenset[SiloName]
    shared: tuple[SharedKeys, ...]
    inputs: tuple[MaskedInput, ...] = ()

    @property
    def attempt(self) -> Attempt:
        return self.roster.attempt

    @property
    def dealings_digest(self) -> bytes:
        return dealings_digest(tuple(item.dealing for item in self.shared))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreeing:
    """Waiting for signatures on the survivor set."""

    phase: ClassVar[str] = "consistency check"
    roster: Roster
    link: Link
    awaited: frozenset[SiloName]
    shared: tuple[SharedKeys, ...]
    inputs: tuple[MaskedInput, ...]
    survivors: SurvivorSet
    agreements: tuple[Agreement, ...] = ()

    @property
    def attempt(self) -> Attempt:
        return self.roster.attempt

    @property
    def dealings_digest(self) -> bytes:
        return dealings_digest(tuple(item.dealing for item in self.shared))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmasking:
    """Waiting for shares of those who signed."""

    phase: ClassVar[str] = "unmasking"
    roster: Roster
    link: Link
    awaited: frozenset[SiloName]
    shared: tuple[SharedKeys, ...]
    inputs: tuple[MaskedInput, ...]
    survivors: SurvivorSet
    agreements: tuple[Agreement, ...]
    reveals: tuple[Reveal, ...] = ()

    @property
    def attempt(self) -> Attempt:
        return self.roster.attempt

    @property
    def dealings_digest(self) -> bytes:
        return dealings_digest(tuple(item.dealing for item in self.shared))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmasked:
    """Enough shares came; the sum can be unmasked."""

    phase: ClassVar[str] = "unmasked"
    attempt: Attempt
    roster: Roster
    survivors: SurvivorSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """No sum comes out of this attempt."""

    phase: ClassVar[str] = "abandoned"
    attempt: Attempt
    reason: str


WithSurvivors = Agreeing | Unmasking
"""Who survived is fixed."""
WithDealers = Masking | WithSurvivors
"""Who dealt is fixed."""
WithRoster = Sharing | WithDealers
"""The roster is fixed."""
Phase = Advertising | WithRoster
"""Answers of silos are waited for."""
State = Idle | Phase | Unmasked | Abandoned
STATES: tuple[type[State], ...] = (Idle, Advertising, Sharing, Masking, Agreeing, Unmasking, Unmasked, Abandoned)

Step = tuple[State, tuple[Effect, ...]]
