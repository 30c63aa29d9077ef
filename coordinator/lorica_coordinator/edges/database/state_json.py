"""The round machine's state as JSON: the phase's name apart, so that it can be read without parsing the rest.

A deadline is stored as the seconds that are left of it, since an instant of one process's steady clock means nothing to
another. `STATE_VERSION` counts the shapes that states have had; a state of another version is refused, never guessed
at.

The journal of a masked attempt is not in it: its events are rows of their own (masked_events.py).
"""

from collections.abc import Sequence
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
from lorica_security.errors import Conflict, MalformedMessage, StorageError, WrongTime

STATE_VERSION = 5
_BLOCK = 64
"""To a multiple of which a state's text is filled up with blanks. Where only the deadline at its end has other digits,
the text is as long as before, and SQLite writes its last page alone."""

_ATTEMPT = TypeAdapter(SecureAttempt)
_SUM = TypeAdapter(MaskedSum)
_ADAPTERS: dict[str, TypeAdapter[State]] = {kind.phase: TypeAdapter(kind) for kind in STATES}


def state_to_json(state: State, *, now: float) -> str:
    """What is left of a deadline, at `now`. Of an attempt of secure aggregation its journal is left out, and what that
    led to."""
    at = deadline_of(state)
    left = state if at is None else with_deadline(state, max(0.0, at - now))
    attempt = _attempt_of(left)
    bare = left if attempt is None else _with_attempt(left, replace(attempt, journal=(), held=None))
    text = _ADAPTERS[state.phase].dump_json(bare).decode()
    return text.ljust(-(-len(text) // _BLOCK) * _BLOCK)


def journal_of(state: State) -> tuple[bytes, ...]:
    """Of the attempt of secure aggregation that `state` is about; empty where it is about none."""
    attempt = _attempt_of(state)
    return () if attempt is None else attempt.journal


def without_attempt(state: State) -> tuple[State, bytes | None]:
    """`state` without its attempt of secure aggregation, and that as JSON, its journal apart; None where it has
    none."""
    match state:
        case Masking(secure=SecureAttempt() as attempt):
            return replace(state, secure=None), _ATTEMPT.dump_json(replace(attempt, journal=(), held=None))
        case Aggregating(masked=MaskedSum() as masked) | Stopped(masked=MaskedSum() as masked):
            bare = replace(masked, attempt=replace(masked.attempt, journal=(), held=None))
            return replace(state, masked=None), _SUM.dump_json(bare)
        case _:
            return state, None


def with_attempt(state: State, part: bytes, journal: Sequence[bytes], where: str) -> State:
    """What `without_attempt` took apart, with `journal` in the attempt, replayed. Raises StorageError naming
    `where`."""
    try:
        match state:
            case Masking():
                state = replace(state, secure=_ATTEMPT.validate_json(part))
            case Aggregating() | Stopped():
                state = replace(state, masked=_SUM.validate_json(part))
            case _:
                raise StorageError(f"{where} holds a masked attempt in the phase {state.phase}: restore it from backup")
    except (ValidationError, MalformedMessage) as error:
        raise StorageError(f"{where} holds a masked attempt that does not parse, restore it from backup") from error
    return _replayed(state, journal, where)


def _replayed(state: State, journal: Sequence[bytes], where: str) -> State:
    attempt = _attempt_of(state)
    if (attempt is None) != (not journal):
        raise StorageError(
            f"{where} holds the phase {state.phase} with {len(journal)} events of a masked attempt: restore it from "
            "backup"
        )
    if attempt is None:
        return state
    try:
        return _with_attempt(state, replace(attempt, journal=tuple(journal)).recovered())
    except (MalformedMessage, WrongTime, Conflict) as error:
        raise StorageError(
            f"{where} has events of a masked attempt that do not follow one another, restore it from backup: {error}"
        ) from error


def _attempt_of(state: State) -> SecureAttempt | None:
    match state:
        case Masking(secure=attempt):
            return attempt
        case Aggregating(masked=MaskedSum(attempt=attempt)) | Stopped(masked=MaskedSum(attempt=attempt)):
            return attempt
        case _:
            return None


def _with_attempt(state: State, attempt: SecureAttempt) -> State:
    match state:
        case Masking():
            return replace(state, secure=attempt)
        case Aggregating(masked=MaskedSum() as masked) | Stopped(masked=MaskedSum() as masked):
            return replace(state, masked=replace(masked, attempt=attempt))
        case _:
            raise AssertionError(f"the phase {state.phase} has no attempt")


def state_from_json(
    *, version: int, phase: str, text: str, where: str, now: float, journal: Sequence[bytes] = ()
) -> State:
    """The state that `text` holds, with its deadline as much after `now` as was left, and `journal` in its attempt of
    secure aggregation, replayed.

    Raises StorageError naming `where` for another version, text that is not one, a journal without an attempt or the
    other way round, and one that no attempt has written.
    """
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
    state = _replayed(state, journal, where)
    return state if left is None else with_deadline(state, now + left)
