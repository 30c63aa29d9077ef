"""Who is dropped from an attempt: silent at a deadline, gone for good, or blamed for a false message."""

from dataclasses import replace

from lorica_security.errors import LoricaError, MalformedMessage, WrongTime
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator.effects import Abandon, Blame, Effect, Journal, Offence
from lorica_security.secure_aggregation.coordinator.events import PhaseClosed, SiloDropped
from lorica_security.secure_aggregation.coordinator.states import Abandoned, Phase, Step
from lorica_security.secure_aggregation.messages import Identities


def drop(state: Phase, event: SiloDropped, identities: Identities) -> Step:
    """Wait no more for a silo that will not answer."""
    if event.silo not in state.awaited:
        return state, ()
    blame = Blame(silo=event.silo, offence=Offence.SILENCE, detail=event.detail)
    return without(state, event.silo, (Journal(event), blame))


def close_phase(state: Phase, event: PhaseClosed, identities: Identities) -> Step:
    """Wait for nobody any more: the deadline has passed."""
    if event.phase != state.phase:
        raise WrongTime(f"the deadline of the phase {event.phase} came in the phase {state.phase}")
    late = tuple(
        Blame(silo=silo, offence=Offence.SILENCE, detail=f"no answer in the phase {state.phase}")
        for silo in sorted(state.awaited)
    )
    return replace(state, awaited=frozenset()), (Journal(event), *late)


def blame_for(state: Phase, silo: SiloName, error: LoricaError) -> Step:
    """A message that was refused is no event of the journal: that `silo` was dropped is.

    Who replays the journal may know other keys of this silo, and must not come to another end by them.
    """
    offence = Offence.BAD_SIGNATURE if not isinstance(error, MalformedMessage) else Offence.BAD_MESSAGE
    blame = Blame(silo=silo, offence=offence, detail=str(error))
    if silo not in state.awaited:
        return state, (blame,)
    return without(state, silo, (Journal(SiloDropped(silo, f"{offence.value}: {error}")), blame))


def without(state: Phase, silo: SiloName, effects: tuple[Effect, ...]) -> Step:
    """The phase goes on without this silo."""
    return replace(state, awaited=state.awaited - {silo}), effects


def abandon(state: Phase, reason: str) -> Step:
    """End the attempt without a sum."""
    abandoned = Abandoned(attempt=state.attempt, reason=reason)
    return abandoned, (Abandon(attempt=state.attempt, reason=reason),)
