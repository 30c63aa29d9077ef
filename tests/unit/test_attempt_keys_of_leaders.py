"""Keys of masked attempts in a folder that several leaders see, of whom all but one are stale and go on when they will.

What is searched over: who begins a term when, what each does next, where it fails, is cut off or killed, and how much
later it destroys the keys that it set out to destroy. The database is SQLite, with the fence that PostgreSQL has.
"""

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
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
    late: list[Path] = field(default_factory=list)
    attempt: int = 0
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


class Leaders(RuleBasedStateMachine):
    """`late` destructions of each process are carried out when the search says so, before or after it was overtaken."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(mkdtemp(prefix="leaders-"))
        self.processes: list[Process] = []
        self.attempts = 0

    @initialize()
    def begin(self) -> None:
        self.take()

    @rule()
    def take(self) -> None:
        if len(self.processes) < 5:
            self.processes.append(Process(self.folder / "state.sqlite", self.folder / "keys"))

    @rule(
        who=st.integers(0, 4),
        what=st.sampled_from(["another attempt", "goes on", "ends"]),
        how=st.sampled_from(["well", "well", "fails", "answer lost", "killed", "late", "overtaken meanwhile"]),
    )
    def act(self, who: int, what: str, how: str) -> None:
        process = self.processes[-1 - who % len(self.processes)]
        if what == "another attempt" and isinstance(process.state, Masking):
            what = "ends"  # first, as in every plan
        if what == "another attempt":
            self.attempts += 1
            state: State = replace(masking(), attempt=self.attempts)
        else:
            state = process.state if what == "goes on" else without_attempt()
        process.fails, process.loses_the_answer = how == "fails", how == "answer lost"
        with pytest.MonkeyPatch.context() as patch:
            if how == "late":
                patch.setattr(files, "erase", process.late.append)
            if how == "killed":
                patch.setattr(process.store._states, "saved", lambda name, deleted: None)
            if how == "overtaken meanwhile":
                make = process.vault.make

                def made() -> tuple[AttemptKey, bytes]:
                    self.take()
                    return make()

                patch.setattr(process.vault, "make", made)
            try:
                process.transition(state)
            except (Overtaken, StorageError):
                pass
            else:
                assert not process.fails
        process.fails = process.loses_the_answer = False
        if how == "killed":
            self.processes.remove(process)
            if not self.processes:
                self.take()

    @rule(who=st.integers(0, 4), which=st.integers(0, 9))
    def destroys_now(self, who: int, which: int) -> None:
        late = self.processes[who % len(self.processes)].late
        if late:
            ERASE(late.pop(which % len(late)))

    @invariant()
    def what_the_state_needs_is_there(self) -> None:
        if self.processes and (key := self._needed()) is not None:
            assert FolderKeyVault(self.folder / "keys", 0).read(key) is not None

    def teardown(self) -> None:
        try:
            while self.processes and self.processes[-1].late:
                self.destroys_now(len(self.processes) - 1, 0)
            last = Process(self.folder / "state.sqlite", self.folder / "keys")
            last.transition(last.state)
            needed = self._needed()
            left = {AttemptKey.parse(path.stem, "") for path in (self.folder / "keys").glob("*.key")}
            assert left == ({needed} if needed else set()), "and nothing else is left"
            last.transition(without_attempt())
            assert list((self.folder / "keys").glob("*")) == []
        finally:
            rmtree(self.folder)

    def _needed(self) -> AttemptKey | None:
        with closing(Database(self.folder / "state.sqlite").engine.connect()) as connection:
            named = connection.execute(select(machine.c.sealed_under)).scalar()
        return None if named is None else AttemptKey.parse(named, "")


TestLeaders = Leaders.TestCase
TestLeaders.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)
