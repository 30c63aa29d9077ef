"""The round machine's state as JSON: the phase's name apart, so that it can be read without parsing the rest.

`STATE_VERSION` counts the shapes that states have had; a state of another version is refused, never guessed at.
"""

from dataclasses import replace

from pydantic import TypeAdapter, ValidationError

from coordinator.rounds.secure_attempt import MaskedSum, SecureAttempt
from coordinator.rounds.states import STATES, Aggregating, Masking, State, Stopped
from security.errors import MalformedMessage, StorageError

STATE_VERSION = 3

_ADAPTERS: dict[str, TypeAdapter[State]] = {kind.phase: TypeAdapter(kind) for kind in STATES}


def state_to_json(state: State) -> str:
    """What an attempt of secure aggregation led to is left out: its journal says it."""
    return _ADAPTERS[state.phase].dump_json(_without_held(state)).decode()


def _without_held(state: State) -> State:
    match state:
        case Masking(secure=SecureAttempt() as secure):
            return replace(state, secure=replace(secure, held=None))
        case Aggregating(masked=MaskedSum() as masked) | Stopped(masked=MaskedSum() as masked):
            return replace(state, masked=replace(masked, attempt=replace(masked.attempt, held=None)))
        case _:
            return state


def state_from_json(*, version: int, phase: str, text: str, where: str) -> State:
    """The state that `text` holds; raises StorageError naming `where` for another version or text that is not one."""
    if version != STATE_VERSION:
        raise StorageError(
            f"{where} holds a state of version {version}, this coordinator reads version {STATE_VERSION}: "
            "run the release that wrote it"
        )
    if phase not in _ADAPTERS:
        raise StorageError(f"{where} holds a state of the unknown phase {phase!r}: restore it from backup")
    try:
        return _ADAPTERS[phase].validate_json(text)
    except (ValidationError, MalformedMessage) as error:
        reason = " ".join(str(error).split())
        raise StorageError(f"{where} holds a state that does not parse, restore it from backup: {reason}") from error
