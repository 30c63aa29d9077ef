"""The end of an attempt at a silo: root, journal and masked vector are erased, in memory and on disk."""

from lorica_security.errors import WrongTime
from lorica_security.secure_aggregation.silo.effects import Erase
from lorica_security.secure_aggregation.silo.events import AttemptEnded
from lorica_security.secure_aggregation.silo.party import Party
from lorica_security.secure_aggregation.silo.states import InAttempt, Resting, Step


def end_attempt(state: InAttempt, event: AttemptEnded, party: Party) -> Step:
    """Erase the root and all that was kept of the attempt."""
    if event.attempt != state.attempt:
        raise WrongTime(f"the end of {event.attempt} came during {state.attempt}")
    return Resting(state.memory), (Erase(attempt=state.attempt, root=state.opening.root),)


def end_at_rest(state: Resting, event: AttemptEnded, party: Party) -> Step:
    """Nothing is left to erase."""
    return state, ()
