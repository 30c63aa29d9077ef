"""The round machine's state as JSON: the phase's name apart, so that it can be read without parsing the rest.

A deadline is stored as the seconds that are left of it, since an instant of one process's steady clock means nothing to
another. `STATE_VERSION` counts the shapes that states have had; a state of another version is refused, never guessed
at.
"""

from dataclasses import replace
from math import inf

from pydantic import TypeAdapter, ValidationError

from lorica_coordinator.rounds.secure_attempt import MaskedSum, SecureAttempt
from lorica_coordinator.rounds.states import (
    STATES,
    Aggregating,
    Gathering,
    Masking,
    State,
    Stopped,
    deadline_of,
    with_deadline,
)
from lorica_security.errors import MalformedMessage, StorageError

STATE_VERSION = 4

_ADAPTERS: dict[str, TypeAdapter[State]] = {kind.phase: TypeAdapter(kind) for kind in STATES}


def state_to_json(state: State, *, now: float) -> str:
    """What is left of a deadline, at `now`. What an attempt of secure aggregation led to is left out: its journal says
    it."""
    at = deadline_of(state)
    left = state if at is None else with_deadline(state, max(0.0, at - now))
    return _ADAPTERS[state.phase].dump_json(_without_held(left)).decode()


def _without_held(state: State) -> State:
    match state:
        case Masking(secure=SecureAttempt() as secure):
            return replace(state, secure=replace(secure, held=None))
        case Aggregating(masked=MaskedSum() as masked) | Stopped(masked=MaskedSum() as masked):
            return replace(state, masked=replace(masked, attempt=replace(masked.attempt, held=None)))
        case _:
            return state


def state_from_json(*, version: int, phase: str, text: str, where: str, now: float) -> State:
    """The state that `text` holds, with its deadline as much after `now` as was left; raises StorageError naming
    `where` for another version or text that is not one."""
    if version != STATE_VERSION:
        raise StorageError(
            f"{where} holds a state of version {version}, this coordinator reads version {STATE_VERSION}: "
            "run the release that wrote it"
        )
    if phase not in _ADAPTERS:
        raise StorageError(f"{where} holds a state of the unknown phase {phase!r}: restore it from backup")
    try:
        state = _ADAPTERS[phase].validate_json(text)
    except (ValidationError, MalformedMessage) as error:
        reason = " ".join(str(error).split())
        raise StorageError(f"{where} holds a state that does not parse, restore it from backup: {reason}") from error
    left = deadline_of(state)
    for seconds in (left, state.left if isinstance(state, Gathering) else None):
        if seconds is not None and not 0 <= seconds < inf:  # also catches NaN
            raise StorageError(
                f"{where} holds a state with {seconds} seconds left of its deadline: restore it from backup"
            )
    return state if left is None else with_deadline(state, now + left)
