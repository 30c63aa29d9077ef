"""Where a silo stands within an attempt: one flat value a state."""

from dataclasses import dataclass

from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.messages import Delivery, SharedKeys, SurvivorSet
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo.effects import Effect
from lorica_security.secure_aggregation.silo.events import OpenAttempt
from lorica_security.secure_aggregation.silo.memory import SiloMemory


@dataclass(frozen=True, slots=True)
class Resting:
    memory: SiloMemory


@dataclass(frozen=True, kw_only=True)
class Advertised:
    memory: SiloMemory
    opening: OpenAttempt

    @property
    def attempt(self) -> Attempt:
        return self.opening.attempt


@dataclass(frozen=True, kw_only=True)
class Sharing(Advertised):
    roster: Roster


@dataclass(frozen=True, kw_only=True)
class Dealt(Sharing):
    shared: SharedKeys


@dataclass(frozen=True, kw_only=True)
class Masking(Dealt):
    delivery: Delivery


@dataclass(frozen=True, kw_only=True)
class Masked(Masking):
    vector: bytes


@dataclass(frozen=True, kw_only=True)
class Agreed(Masked):
    survivors: SurvivorSet


@dataclass(frozen=True, kw_only=True)
class Revealed(Agreed):
    pass


State = Resting | Advertised | Sharing | Dealt | Masking | Masked | Agreed | Revealed
STATES: tuple[type[State], ...] = (Resting, Advertised, Sharing, Dealt, Masking, Masked, Agreed, Revealed)

Step = tuple[State, tuple[Effect, ...]]
