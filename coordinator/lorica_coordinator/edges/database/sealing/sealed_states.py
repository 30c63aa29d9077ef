"""The machine's state with its masked attempt apart: in clear what outlasts the attempt, sealed the attempt.

Without a vault nothing is sealed, and a state is as it always was.
"""

from typing import Any, Final

import structlog
from sqlalchemy import Connection, Row

from lorica_coordinator.edges.database.masked_events import in_clear, read_events
from lorica_coordinator.edges.database.sealing.attempt_keys import AttemptKey, KeyVault
from lorica_coordinator.edges.database.sealing.attempt_seal import PART_POSITION, AttemptName, AttemptSeal
from lorica_coordinator.edges.database.state_json import state_from_json, state_to_json, with_attempt, without_attempt
from lorica_coordinator.rounds.phases.abandoning import asked_for_shares
from lorica_coordinator.rounds.states import State, course_of, round_of
from lorica_security.errors import StorageError
from lorica_security.identifiers import FederationName

_log = structlog.get_logger(__name__)
_OF_THE_ATTEMPT: Final = ("sealed", "sealed_under", "asked")


class SealedStates:
    """`lost` says of the state that was read last whether its attempt's key is gone: as RoundStore.lost_attempt."""

    def __init__(self, vault: KeyVault | None, federation: FederationName) -> None:
        self._seal = None if vault is None else AttemptSeal(vault)
        self._federation = federation
        self._swept = False  # an earlier process may have been killed before it destroyed a key
        self.lost: bool | None = None

    def read(self, connection: Connection, row: Row[Any], *, where: str, now: float) -> tuple[State, tuple[bytes, ...]]:
        """The state in a row of `machine`, and the events of its attempt. Raises StorageError naming `where`."""
        self.lost = None
        stored = {"version": row.version, "phase": row.phase, "text": row.state, "where": where, "now": now}
        if self._seal is None or not row.events:
            events = read_events(connection, row.events, where)
            return state_from_json(**stored, journal=events), events
        bare = state_from_json(**stored)
        name = self._name_of(bare)
        if row.sealed is None or name is None:
            raise StorageError(f"{where} holds a masked attempt that is not sealed: restore it from backup")
        if row.sealed_under is None or not self._seal.go_on(name, AttemptKey.parse(row.sealed_under, where)):
            self.lost = bool(row.asked)
            return bare, ()
        part = self._seal.open(PART_POSITION, bytes(row.sealed))
        events = read_events(connection, row.events, where, self._seal.open)
        return with_attempt(bare, part, events, where), events

    def columns(self, state: State, *, now: float) -> tuple[dict[str, Any], AttemptName | None]:
        """What `machine` has of the state, and the attempt whose key is needed on.

        The key of a new attempt is made here, so within the transaction: only who may write the state makes one.
        """
        if self._seal is None:
            return {"state": state_to_json(state, now=now)}, None
        bare, part = without_attempt(state)
        name = None if part is None else self._name_of(state)
        values: dict[str, Any] = {"state": state_to_json(bare, now=now), **dict.fromkeys(_OF_THE_ATTEMPT)}
        if part is not None and name is not None:
            key = self._seal.begin(name)
            sealed = self._seal.seal(PART_POSITION, part)
            values |= {"sealed": sealed, "sealed_under": key.text, "asked": asked_for_shares(state)}
        return values, name

    def event(self, position: int, event: bytes) -> bytes:
        """An event of the attempt as its row has it."""
        return in_clear(position, event) if self._seal is None else self._seal.seal(position, event)

    def saved(self, name: AttemptName | None, *, deleted: bool) -> None:
        """The transaction is over: destroy the keys of attempts that ended with it; where that fails, after a later
        one."""
        if self._seal is None:
            return
        sweep = deleted or not self._swept
        self._swept = False
        try:
            self._seal.saved(name, sweep=sweep)
            self._swept = True
        except StorageError as error:
            _log.error("the key of a masked attempt could not be destroyed, it is tried again", error=str(error))

    def _name_of(self, state: State) -> AttemptName | None:
        course, (number, attempt) = course_of(state), round_of(state)
        if course is None:
            return None
        return AttemptName(federation=self._federation, plan=course.terms.plan, round=number, attempt=attempt)
