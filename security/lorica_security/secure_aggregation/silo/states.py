"""Where a silo stands within an attempt: one flat value a state.

No state is a kind of another; what several states have in common is named by a union of them.
"""

from dataclasses import dataclass

from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.messages import Delivery, SharedKeys, SurvivorSet
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo.effects import Effect
from lorica_security.secure_aggregation.silo.events import OpenAttempt
from lorica_security.secure_aggregation.silo.memory import SiloMemory


@dataclass(frozen=True, slots=True)
class Resting:
    """In no attempt."""

    memory: SiloMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Advertised:
    """The attempt is joined; the keys for it are on their way."""

    memory: SiloMemory
    opening: OpenAttempt

    @property
    def attempt(self) -> Attempt:
        return self.opening.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The roster was accepted; what this silo deals is being made."""

    memory: SiloMemory
    opening: OpenAttempt
    roster: Roster

    @property
    def attempt(self) -> Attempt:
        return self.opening.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """What this silo dealt is journalled."""

    memory: SiloMemory
    opening: OpenAttempt
    roster: Roster
    shared: SharedKeys

    @property
    def attempt(self) -> Attempt:
        return self.opening.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """Who dealt is known; the vector is being masked."""

    memory: SiloMemory
    opening: OpenAttempt
    roster: Roster
    shared: SharedKeys
    delivery: Delivery

    @property
    def attempt(self) -> Attempt:
        return self.opening.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """The masked vector is on disk; `vector` is its digest."""

    memory: SiloMemory
    opening: OpenAttempt
    roster: Roster
    shared: SharedKeys
    delivery: Delivery
    vector: bytes

    @property
    def attempt(self) -> Attempt:
        return self.opening.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The survivor set is signed."""

    memory: SiloMemory
    opening: OpenAttempt
    roster: Roster
    shared: SharedKeys
    delivery: Delivery
    vector: bytes
    survivors: SurvivorSet

    @property
    def attempt(self) -> Attempt:
        return self.opening.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Revealed:
    """The shares are shown; this silo joins no further attempt of the round."""

    memory: SiloMemory
    opening: OpenAttempt
    roster: Roster
    shared: SharedKeys
    delivery: Delivery
    vector: bytes
    survivors: SurvivorSet

    @property
    def attempt(self) -> Attempt:
        return self.opening.attempt


WithSet = Agreed | Revealed
"""A survivor set is signed."""
WithVector = Masked | WithSet
"""The vector is masked."""
WithDelivery = Masking | WithVector
"""Who dealt what is fixed."""
WithDealing = Dealt | WithDelivery
"""This silo has dealt."""
WithRoster = Sharing | WithDealing
"""The roster is fixed."""
InAttempt = Advertised | WithRoster
"""There is a root to erase."""
State = Resting | InAttempt
STATES: tuple[type[State], ...] = (Resting, Advertised, Sharing, Dealt, Masking, Masked, Agreed, Revealed)
Step = tuple[State, tuple[Effect, ...]]
