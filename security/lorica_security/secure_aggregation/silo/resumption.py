"""Where a restarted silo stands: its journal, replayed and held against its memory."""

from dataclasses import replace

from lorica_security.errors import IntegrityError, PolicyRefusal
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.messages import Advertisement
from lorica_security.secure_aggregation.silo.effects import Effect, Journal, MaskVector, Remember, Send
from lorica_security.secure_aggregation.silo.events import Event, OpenAttempt
from lorica_security.secure_aggregation.silo.machine import step
from lorica_security.secure_aggregation.silo.memory import MASKING_MEMORY, SiloMemory
from lorica_security.secure_aggregation.silo.party import Party
from lorica_security.secure_aggregation.silo.phases.advertise_keys import own_advertisement
from lorica_security.secure_aggregation.silo.states import Advertised, Resting, State, Step, WithSet


def restored(memory: SiloMemory, journal: tuple[Event, ...], party: Party) -> Step:
    """Where a restarted agent stands: the state that the journal leads to, and the last event's effects, to be done
    again.

    Remember and Journal effects among them are already done and are left out. An empty journal gives a silo at rest.
    Raises PolicyRefusal for a journal that `memory` is not of: of another attempt than the last that was joined, or one
    that says less than this silo has done. It was put back, or the memory was.
    """
    if not journal:
        return Resting(memory), ()
    opening, *events = journal
    if not isinstance(opening, OpenAttempt):
        raise IntegrityError(
            f"the journal of a secure aggregation begins with {type(opening).__name__}: forfeit the attempt"
        )
    advertisement = own_advertisement(opening, party)
    _check_is_last(memory, opening.attempt, advertisement)
    state: State = Advertised(memory=memory, opening=opening)
    effects: tuple[Effect, ...] = (Send(advertisement),)
    for event in events:
        _erase_work(effects)  # of a step that was done before the one to be done again
        state, effects = step(state, event, party)
    last = memory.of(opening.attempt.plan)
    answered = last is not None and last.answered
    if answered and not isinstance(state, WithSet):
        _erase_work(effects)
        raise _not_of_today(
            f"the journal of {opening.attempt} comes to {type(state).__name__}, and by its memory this silo answered it"
        )
    state = replace(state, memory=memory)  # which has what playing it again remembers
    return state, tuple(effect for effect in effects if not isinstance(effect, Remember | Journal))


def _erase_work(effects: tuple[Effect, ...]) -> None:
    for effect in effects:
        if isinstance(effect, MaskVector):
            effect.erase()


def _check_is_last(memory: SiloMemory, attempt: Attempt, advertisement: Advertisement) -> None:
    last = memory.of(attempt.plan)
    if last is None or (last.round, last.number) != (attempt.round, attempt.number):
        came = "to none of its plan" if last is None else f"to attempt {last.number} of round {last.round}"
        raise _not_of_today(f"the journal is of {attempt}, and by its memory this silo came {came}")
    if advertisement.digest not in memory.announced:
        raise _not_of_today(f"the memory does not have the keys that the journal of {attempt} begins with")


def _not_of_today(what: str) -> PolicyRefusal:
    return PolicyRefusal(
        MASKING_MEMORY,
        f"{what}: one of the two was put back, and could lead to two sums over one delta; forfeit the attempt",
    )
