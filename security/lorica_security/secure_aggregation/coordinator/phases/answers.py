"""What every answer of a silo is checked for: this roster, one that was asked, the first of its kind."""

from typing import Any

from lorica_security.errors import Conflict, WrongTime
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator.states import Phase, WithDealers, WithRoster, WithSurvivors


def is_repeated(state: Phase, event: Any, held: tuple[Any, ...]) -> bool:
    """Whether this very answer is there already. Raises Conflict for another one, WrongTime for one not waited for."""
    for item in held:
        if item.silo == event.silo:
            if item != event:
                raise Conflict(f"silo {event.silo} sent a second, different {type(event).__name__}: the first counts")
            return True
    if event.silo not in state.awaited:
        raise WrongTime(
            f"silo {event.silo} is not waited for in the phase {state.phase}: it was dropped, or never asked"
        )
    return False


def check_roster(state: WithRoster, roster: bytes) -> None:
    """Raise WrongTime unless the answer is for this attempt's roster."""
    if roster != state.roster.digest:
        raise WrongTime(f"a message for another roster came in {state.attempt}")


def dealers_of(state: WithDealers) -> tuple[SiloName, ...]:
    """Those who dealt, by name."""
    return tuple(item.silo for item in state.shared)


def check_dealt(state: WithDealers, silo: SiloName) -> None:
    """Raise WrongTime unless the silo dealt."""
    if silo not in dealers_of(state):
        raise WrongTime(f"silo {silo} dealt no keys in {state.attempt}: it waits for the next")


def check_sent(state: WithSurvivors, silo: SiloName) -> None:
    """Raise WrongTime unless the silo sent a masked vector."""
    if all(item.silo != silo for item in state.inputs):
        raise WrongTime(f"silo {silo} sent no masked vector in {state.attempt}: it waits for the next")
