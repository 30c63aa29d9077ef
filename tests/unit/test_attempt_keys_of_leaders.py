"""Keys of masked attempts in a folder that several leaders see, of whom all but one are stale and go on when they will.

What is searched over: who begins a term when, what each does next, where it fails, is cut off or killed, and how much
later it destroys the keys that it set out to destroy. The database is SQLite, with the fence that PostgreSQL has.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, select, update

from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.database.round_tables import leadership, machine
from lorica_coordinator.edges.database.sealing.attempt_keys import AttemptKey
from lorica_coordinator.edges.database.sealing.key_vault import FolderKeyVault
from lorica_coordinator.edges.database.sqlite_database import SqliteDatabase
from lorica_coordinator.rounds.events import PlanStopped
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.states import Masking, State
from lorica_coordinator.service.ports import Overtaken
from lorica_security.errors import StorageError
from lorica_security.host import files
from tests.support.masked_rounds import MaskedRounds
from tests.support.rounds import FEDERATION, T0

ERASE = files.erase
HOW = ("well", "fails", "answer lost", "killed", "destroys late", "erases late", "overtaken")


@cache
def masking() -> Masking:
    rounds = MaskedRounds()
    rounds.train()
    rounds.open()
    rounds.until("unmasking")
    assert isinstance(rounds.state, Masking)
    return rounds.state


@cache
def without_attempt() -> State:
    return replace(step(masking(), PlanStopped(now=T0))[0], masked=None)


class Database(SqliteDatabase):
    """Whose answer to a COMMIT may be lost, as that of a server."""

    answers_may_be_lost = True


@dataclass
class Process:
    """One that leads, or did."""

    path: Path
    keys: Path
    late: list[Callable[[], None]] = field(default_factory=list)
    fails: bool = False
    loses_the_answer: bool = False

    def __post_init__(self) -> None:
        database = Database(self.path)
        SqlRoundStore(self.path, FEDERATION).close()
        self.token = secrets.token_hex(16)
        with database.engine.begin() as connection:
            found = connection.execute(select(leadership.c.term)).scalar() or 0
            self.term = max(found, FolderKeyVault(self.keys, 0).newest_term()) + 1
            if not found:
                values = {"id": 1, "federation": FEDERATION, "identity": "", "holder": ""}
                connection.execute(leadership.insert().values(term=0, token="", **values))
            connection.execute(update(leadership).values(term=self.term, token=self.token))
        self.vault = FolderKeyVault(self.keys, self.term)
        self.store = SqlRoundStore(database, FEDERATION, self.vault, self._fence)  # type: ignore[arg-type]
        transaction = self.store._transaction

        @contextmanager
        def cut_off() -> Iterator[Connection]:
            with transaction() as connection:
                yield connection
                if self.fails:
                    raise StorageError("the disk is full")
            if self.loses_the_answer:
                raise StorageError("the connection was cut")

        self.store._transaction = cut_off  # type: ignore[method-assign]
        self.state = self.store.load(T0)

    def _fence(self, connection: Connection) -> None:
        found = connection.execute(select(leadership.c.term, leadership.c.token)).one()
        if tuple(found) != (self.term, self.token):
            raise Overtaken("another coordinator leads")

    def transition(self, state: State) -> None:
        self.store.transition(state, [], at=T0, now=T0)
        self.state = state


NEWEST_FIRST = (0, 0, 0, 1, 2)


def move(chance: Random) -> tuple[str, int, str]:
    """What somebody does next: who by how many terms ago he led, and how that goes."""
    what = chance.choice(("take", "toggle", "toggle", "goes on", "destroys now"))
    return what, chance.choice(NEWEST_FIRST if what == "toggle" else (0, 1, 2)), chance.choice(HOW)


class Leaders:
    """What each of them set out to destroy is destroyed when the search says so, before or after it was
    overtaken."""

    def __init__(self, folder: Path) -> None:
        self.database, self.keys = folder / "state.sqlite", folder / "keys"
        self.processes: list[Process] = []
        self.attempts = 0
        self.take()

    def take(self) -> None:
        self.processes = [*self.processes[-3:], Process(self.database, self.keys)]

    def move(self, what: str, who: int, how: str) -> None:
        process = self.processes[-1 - who % len(self.processes)]
        if what == "take":
            self.take()
        elif what == "destroys now":
            while process.late:
                process.late.pop(0)()
        else:
            state = process.state
            if what == "toggle":
                self.attempts += 1
                masks = isinstance(state, Masking)
                state = without_attempt() if masks else replace(masking(), attempt=self.attempts)
            self._transition(process, state, how)

    def _transition(self, process: Process, state: State, how: str) -> None:
        process.fails, process.loses_the_answer = how == "fails", how == "answer lost"
        with pytest.MonkeyPatch.context() as patch:
            if how == "erases late":
                patch.setattr(files, "erase", lambda path: process.late.append(partial(ERASE, path)))
            if how == "destroys late":
                for name in ("destroy", "destroy_earlier"):
                    patch.setattr(process.vault, name, partial(_later, process, getattr(process.vault, name)))
            if how == "killed":
                patch.setattr(process.store._states, "saved", lambda name, deleted: None)
            if how == "overtaken":
                make = process.vault.make

                def made() -> tuple[AttemptKey, bytes]:
                    self.take()
                    return make()

                patch.setattr(process.vault, "make", made)
            with suppress(Overtaken, StorageError):
                process.transition(state)
        process.fails = process.loses_the_answer = False
        if how == "killed":
            self.processes = [one for one in self.processes if one is not process]
            if not self.processes:
                self.take()

    def needed(self) -> AttemptKey | None:
        with closing(SqliteDatabase(self.database).engine.connect()) as connection:
            named = connection.execute(select(machine.c.sealed_under)).scalar()
        return None if named is None else AttemptKey.parse(named, "")

    def check(self) -> None:
        if (key := self.needed()) is not None:
            assert FolderKeyVault(self.keys, 0).read(key) is not None, "it was destroyed, and is needed"

    def left(self) -> set[AttemptKey]:
        return {AttemptKey.parse(path.stem, "") for path in self.keys.glob("*.key")}


def _later(process: Process, do: Callable[[AttemptKey | None], None], key: AttemptKey | None) -> None:
    process.late.append(partial(do, key))


@settings(max_examples=20, deadline=None, phases=(Phase.generate,))
@given(seed=st.integers(0, 2**64 - 1))
def test_no_leader_destroys_a_key_that_is_needed_and_none_is_left(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By moves that a seed gives: lists of hypothesis' own repeat themselves, and come to less."""
    leaders, chance = Leaders(tmp_path_factory.mktemp("leaders")), Random(seed)
    for _ in range(40):
        leaders.move(*move(chance))
        leaders.check()
    leaders.take()
    last = leaders.processes[-1]
    last.transition(last.state)
    needed = leaders.needed()
    assert leaders.left() == ({needed} if needed else set()), "and nothing else is left"
    last.transition(without_attempt())
    assert leaders.left() == set()
