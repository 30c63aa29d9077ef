"""Rows of a masked attempt under its key: who has the whole database later, every row that ever was in it, has noise.

Such a reader has every statement's values. He chooses which row he takes for which, of what attempt, and how he changes
it. What silos send, and when an attempt ends, is theirs to choose.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import event as sqlalchemy_event

from lorica_coordinator.edges.database.open_store import leave_former_keys
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.database.sealing.attempt_keys import KEY_BYTES, AttemptKey
from lorica_coordinator.edges.database.sealing.attempt_seal import AttemptName, AttemptSeal
from lorica_coordinator.edges.database.sealing.key_vault import FOLDER, FolderKeyVault
from lorica_coordinator.edges.database.state_json import journal_of
from lorica_coordinator.rounds.effects import Aggregate, DiscardUpdates, RoundAbandoned
from lorica_coordinator.rounds.events import PlanStopped, Resumed
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.states import Aggregating, Finished, Gathering, Masking, Stopped, course_of
from lorica_coordinator.settings import Settings
from lorica_coordinator.vectors.key_place import marked
from lorica_security.errors import ConfigurationError, StorageError
from lorica_security.host import files
from lorica_security.identifiers import FederationName
from silo_wire.canonical import Digest, digest_of
from silo_wire.messages import Mask
from tests.support.masked_rounds import SILOS, MaskedRounds
from tests.support.rounds import FEDERATION, T0

NAME = AttemptName(federation=FEDERATION, plan=digest_of(b"a plan"), round=3, attempt=2)


@pytest.fixture
def vault(tmp_path: Path) -> FolderKeyVault:
    return FolderKeyVault(tmp_path / "keys", 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.sqlite"


@pytest.fixture
def store(path: Path, vault: FolderKeyVault) -> Iterator[SqlRoundStore]:
    with closing(SqlRoundStore(path, FEDERATION, vault)) as made:
        yield made


def keys(vault: FolderKeyVault) -> list[Path]:
    return sorted(vault._folder.glob("*"))


def masking(until: str = "unmasking") -> MaskedRounds:
    rounds = MaskedRounds()
    rounds.train()
    rounds.open()
    rounds.until(until) if until else rounds.run()
    return rounds


# --- a seal


class OneKey:
    """The same key for every attempt, which no vault gives: what binds is the seal's."""

    def make(self) -> tuple[AttemptKey, bytes]:
        return AttemptKey(1, "0" * 32), bytes(range(KEY_BYTES))

    def read(self, key: AttemptKey) -> bytes | None:
        return self.make()[1]

    def destroy(self, key: AttemptKey) -> None: ...

    def destroy_earlier(self, kept: AttemptKey | None) -> None: ...


def seal_of(name: AttemptName) -> AttemptSeal:
    seal = AttemptSeal(OneKey())
    seal.begin(name)
    return seal


@pytest.mark.parametrize(
    "other",
    [
        replace(NAME, federation=FederationName("other")),
        replace(NAME, plan=digest_of(b"another plan")),
        replace(NAME, round=4),
        replace(NAME, attempt=3),
    ],
    ids=["federation", "plan", "round", "attempt"],
)
def test_a_row_of_one_attempt_is_none_of_another_that_differs_in_one_thing(other: AttemptName) -> None:
    sealed = seal_of(NAME).seal(5, b"a share")
    with pytest.raises(StorageError, match="does not open with the attempt's key"):
        seal_of(other).open(5, sealed)


@given(
    numbers=st.tuples(st.integers(1, 400), st.integers(1, 400), st.integers(0, 400)),
    others=st.tuples(st.integers(1, 400), st.integers(1, 400), st.integers(0, 400)),
    same=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    content=st.binary(max_size=60),
)
def test_a_row_opens_in_its_own_place_alone(
    numbers: tuple[int, int, int], others: tuple[int, int, int], same: tuple[bool, bool, bool], content: bytes
) -> None:
    """Round, attempt and position, of which some are alike."""
    others = tuple(one if kept else other for one, other, kept in zip(numbers, others, same, strict=True))  # type: ignore[assignment]
    one = seal_of(replace(NAME, round=numbers[0], attempt=numbers[1]))
    sealed = one.seal(numbers[2], content)
    assert one.open(numbers[2], sealed) == content
    assert sealed != one.seal(numbers[2], content), "no nonce twice"
    if others != numbers:
        with pytest.raises(StorageError, match="does not open with the attempt's key"):
            seal_of(replace(NAME, round=others[0], attempt=others[1])).open(others[2], sealed)
    for position in {0, numbers[2] + 1} - {numbers[2]}:
        with pytest.raises(StorageError, match="does not open with the attempt's key"):
            one.open(position, sealed)


@given(content=st.binary(max_size=60), change=st.data())
def test_a_row_that_was_changed_does_not_open(content: bytes, change: st.DataObject) -> None:
    seal = seal_of(NAME)
    sealed = bytearray(seal.seal(1, content))
    if change.draw(st.booleans()):
        sealed[change.draw(st.integers(0, len(sealed) - 1))] ^= change.draw(st.integers(1, 255))
    else:
        del sealed[change.draw(st.integers(0, len(sealed) - 1)) :]
    with pytest.raises(StorageError, match="row 1 of the masked attempt of round 3, attempt 2, does not open"):
        seal.open(1, bytes(sealed))


# --- the keys


def test_a_key_is_private_and_overwritten_before_it_goes(
    vault: FolderKeyVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, secret = vault.make()
    (file,) = keys(vault)
    assert (len(secret), file.read_bytes(), file.stat().st_mode & 0o777) == (KEY_BYTES, secret, 0o600)
    assert vault.read(key) == secret
    other, kept = vault.make()
    assert (other != key, kept != secret) == (True, True)
    seen: list[bytes] = []
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda it, **named: (seen.append(it.read_bytes()), unlink(it, **named))[1])
    vault.destroy(key)
    assert seen == [bytes(KEY_BYTES)], "zeros when its name goes"
    assert (vault.read(key), vault.read(other)) == (None, kept)
    vault.destroy(key)  # nothing is there


def test_a_key_of_which_a_crash_left_zeros_is_none(vault: FolderKeyVault) -> None:
    key, _ = vault.make()
    (file,) = keys(vault)
    for left in (bytes(KEY_BYTES), b"", b"short"):
        file.write_bytes(left)
        assert vault.read(key) is None


def test_a_key_that_others_can_read_is_refused(vault: FolderKeyVault) -> None:
    key, _ = vault.make()
    (file,) = keys(vault)
    file.chmod(0o640)
    with pytest.raises(StorageError, match=r"the key of a masked attempt is not private: .* has mode 0640"):
        vault.read(key)


def test_a_leader_destroys_what_earlier_terms_left_and_nothing_of_later_ones(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    (first, _), (second, _), (third, _), (later, _) = (FolderKeyVault(folder, term).make() for term in (1, 2, 3, 10))
    (folder / "3a-1-1.key").write_bytes(b"of a release whose keys had no term")
    vault = FolderKeyVault(folder, 3)
    assert vault.newest_term() == 10
    vault.destroy_earlier(second)
    assert {AttemptKey.parse(file.stem, "") for file in keys(vault)} == {second, third, later}
    vault.destroy_earlier(None)
    assert {AttemptKey.parse(file.stem, "") for file in keys(vault)} == {third, later}
    assert first < second < third < later


@pytest.mark.parametrize(
    "text", ["", "../../keys/ca", "1-" + "0" * 31, "1-" + "0" * 33, "1" * 19 + "-" + "0" * 32, "a"]
)
def test_a_name_that_is_none_leads_to_no_file(text: str) -> None:
    with pytest.raises(StorageError, match="names the key of a masked attempt as"):
        AttemptKey.parse(text, "postgresql:///d")


def test_a_folder_that_several_see_has_to_be_there(tmp_path: Path) -> None:
    shared = tmp_path / "mount"
    vault = FolderKeyVault(shared, 2, own=False)
    for use in (vault.make, vault.newest_term, lambda: vault.read(AttemptKey(1, "0" * 32))):
        with pytest.raises(StorageError, match=r"mount of \[storage\] attempt_keys is not there, or .*: mount it"):
            use()
    shared.mkdir(mode=0o750)
    marked(shared, "")
    with pytest.raises(ConfigurationError, match="has mode 0750: it will hold private keys"):
        vault.make()
    shared.chmod(0o700)
    key, secret = vault.make()
    assert FolderKeyVault(shared, 9, own=False).read(key) == secret


def settings_of(state: Path, storage: str) -> Settings:
    parsed = Settings.parse(f'federation = "{FEDERATION}"\n[storage]\n{storage}\n', "federation.toml")
    return parsed.model_copy(update={"state": str(state)})


def test_keys_that_no_database_uses_any_more_are_destroyed(tmp_path: Path) -> None:
    former, shared = tmp_path / FOLDER, tmp_path / "shared"
    shared.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(former)
    database = 'database = "postgresql+psycopg://owner@/lorica?host=/run"\n'
    for storage, left in (
        (database, 1),  # they are in use
        (f'{database}attempt_keys = "{former}"', 1),
        (f'{database}attempt_keys = "{tmp_path}/link"', 1),
        (f'{database}attempt_keys = "{tmp_path}/not-mounted"', 1),  # nobody leads like that
        (f'{database}attempt_keys = "{shared}"', 0),
        ("", 0),
    ):
        FolderKeyVault(former, 1).make()
        kept, _ = FolderKeyVault(shared, 1).make()
        leave_former_keys(settings_of(tmp_path, storage))
        assert len(list(former.glob("*.key"))) == left, storage
        assert FolderKeyVault(shared, 1).read(kept) is not None
        for file in former.glob("*.key"):
            file.unlink()


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ('attempt_keys = "/srv/keys"', r"attempt_keys = '/srv/keys' is for a \[storage\] database in PostgreSQL: name"),
        (
            'database = "postgresql+psycopg://o@/l?host=/run"\nattempt_keys = "keys"',
            "no path from / on: give the whole",
        ),
    ],
)
def test_a_place_of_keys_that_is_refused(storage: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=said):
        settings_of(tmp_path, storage)


# --- the store with them


class Reader:
    """Who reads the database: whatever went into any row, at any time."""

    def __init__(self, store: SqlRoundStore) -> None:
        self.read = b""
        sqlalchemy_event.listen(store.place.engine, "before_cursor_execute", self._see)

    def _see(self, connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        rows = parameters if isinstance(parameters, list) else [parameters]
        for row in rows:
            for value in row.values() if isinstance(row, dict) else row:
                self.read += bytes(value) if isinstance(value, bytes | memoryview) else str(value).encode()


@settings(
    max_examples=20,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(choices=st.lists(st.sampled_from([*range(4)] * 6 + [4, 5]), min_size=12, max_size=60))
def test_whatever_silos_do_a_reader_of_the_database_has_nothing_of_what_they_sent(
    choices: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sealed")
    vault = FolderKeyVault(folder / "keys", 1)
    with closing(SqlRoundStore(folder / "state.sqlite", FEDERATION, vault)) as store:
        reader, rounds, journals = Reader(store), MaskedRounds(), set[bytes]()
        rounds.train()
        rounds.open()
        for choice in (*choices, 5):
            journals |= set(journal_of(rounds.state))
            store.transition(rounds.state, [], at=T0, now=T0)
            state = rounds.state
            if choice < len(SILOS) and isinstance(state, Masking) and isinstance(rounds.order(SILOS[choice]), Mask):
                rounds.answer(SILOS[choice])
            elif choice == 4 and isinstance(state, Masking):
                store = SqlRoundStore(folder / "state.sqlite", FEDERATION, vault)  # started again
                sqlalchemy_event.listen(store.place.engine, "before_cursor_execute", reader._see)
                assert store.load(T0) == state
            elif choice == 5:
                stopped, _ = step(state, PlanStopped(now=T0))
                if isinstance(stopped, Stopped):
                    stopped = replace(stopped, masked=None)
                store.transition(stopped, [], at=T0, now=T0)
                assert keys(vault) == [], "the attempt is over, and its key is gone"
                break
        # 24 bytes of anything that a silo sent: less than any share, key or signature.
        pieces = [event[at : at + 24] for event in journals for at in range(0, max(1, len(event) - 24), 96)]
        found = sum(piece in reader.read for piece in pieces)
        assert found == 0


def test_a_reader_of_the_database_has_nothing_of_an_attempt_that_came_to_its_end(store: SqlRoundStore) -> None:
    reader, rounds = Reader(store), masking()
    store.transition(rounds.state, [], at=T0, now=T0)
    rounds.run()
    store.transition(rounds.state, [], at=T0, now=T0)
    journal = journal_of(rounds.state)
    found = sum(event[at : at + 24] in reader.read for event in journal for at in range(0, len(event) - 24, 96))
    assert found == 0


def test_the_search_finds_what_is_not_sealed(path: Path) -> None:
    with closing(SqlRoundStore(path, FEDERATION)) as store:
        reader, rounds = Reader(store), masking()
        store.transition(rounds.state, [], at=T0, now=T0)
    found = journal_of(rounds.state)[-1][:24] in reader.read
    assert found


def test_a_sealed_attempt_goes_on_after_a_start(store: SqlRoundStore, path: Path, vault: FolderKeyVault) -> None:
    for until in ("share keys", "unmasking", ""):
        rounds = masking(until)
        store.transition(rounds.state, [], at=T0, now=T0)
        with closing(SqlRoundStore(path, FEDERATION, vault)) as again:
            assert again.load(T0) == rounds.state
            assert again.lost_attempt() is None
        assert len(keys(vault)) == 1


def test_a_key_that_could_not_be_destroyed_goes_after_a_later_transition(
    store: SqlRoundStore, vault: FolderKeyVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = masking()
    store.transition(rounds.state, [], at=T0, now=T0)
    after, _ = step(rounds.state, PlanStopped(now=T0))

    def full(path: Path) -> None:
        raise StorageError(f"{path} cannot be erased: Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files, "erase", full)
        store.transition(after, [], at=T0, now=T0)
        assert len(keys(vault)) == 1
    store.transition(after, [], at=T0, now=T0)
    assert keys(vault) == []


def test_and_one_that_a_kill_left_with_the_first_transition_after_the_start(path: Path, vault: FolderKeyVault) -> None:
    rounds = masking()
    with closing(SqlRoundStore(path, FEDERATION, vault)) as store:
        store.transition(rounds.state, [], at=T0, now=T0)
    after, _ = step(rounds.state, PlanStopped(now=T0))
    with closing(SqlRoundStore(path, FEDERATION, vault)) as store, pytest.MonkeyPatch.context() as patch:
        store.load(T0)
        patch.setattr(store._states, "saved", lambda name, deleted: None)  # killed before it came to this
        store.transition(after, [], at=T0, now=T0)
    assert len(keys(vault)) == 1
    vault = FolderKeyVault(vault._folder, 2)
    with closing(SqlRoundStore(path, FEDERATION, vault)) as store:
        store.transition(store.load(T0), [], at=T0, now=T0)
    assert keys(vault) == []


def test_two_transitions_that_fail_leave_the_attempt_with_its_key(
    store: SqlRoundStore, path: Path, vault: FolderKeyVault
) -> None:
    """The next attempt is begun, and is not; the one before goes on, and does not; the process is started again."""
    rounds = masking("share keys")
    store.transition(rounds.state, [], at=T0, now=T0)
    assert isinstance(rounds.state, Masking)
    other = replace(rounds.state, attempt=2)
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TRIGGER full BEFORE UPDATE ON machine BEGIN SELECT RAISE(ABORT, 'full'); END")
    for state in (other, rounds.state):
        with pytest.raises(StorageError, match="full"):
            store.transition(state, [], at=T0, now=T0)
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TRIGGER full")
    with closing(SqlRoundStore(path, FEDERATION, vault)) as again:
        assert again.load(T0) == rounds.state


def test_who_only_looks_destroys_no_key(store: SqlRoundStore, path: Path, vault: FolderKeyVault) -> None:
    rounds = masking()
    store.transition(rounds.state, [], at=T0, now=T0)
    FolderKeyVault(vault._folder, 2).make()  # of the attempt that the coordinator begins at this moment
    with closing(SqlRoundStore(path, FEDERATION, vault)) as looking:
        looking.load(T0)
    assert len(keys(vault)) == 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("UPDATE machine SET sealed = NULL", "holds a masked attempt that is not sealed: restore"),
        ("UPDATE machine SET sealed = (SELECT event FROM masked_events WHERE position = 1)", "row 0 .* does not open"),
        ("UPDATE masked_events SET event = (SELECT sealed FROM machine) WHERE position = 2", "row 2 .* does not open"),
        ("DELETE FROM masked_events WHERE position = 2", "events of the masked attempt under way, not events 1 to"),
    ],
)
def test_a_database_that_was_changed_is_refused_by_name(
    damage: str, said: str, store: SqlRoundStore, path: Path
) -> None:
    store.transition(masking().state, [], at=T0, now=T0)
    with closing(sqlite3.connect(path)) as database:
        database.execute(damage)
        database.commit()
    with pytest.raises(StorageError, match=said):
        store.load(T0)


# --- an attempt without its key


@pytest.mark.parametrize("until", ["share keys", "unmasking", "", "stopped"])
def test_an_attempt_whose_key_is_lost_is_told_and_the_plan_goes_on(
    until: str, store: SqlRoundStore, path: Path, vault: FolderKeyVault
) -> None:
    rounds = masking("" if until == "stopped" else until)
    key = rounds.key
    state = rounds.state
    if until == "stopped":
        state, _ = step(state, PlanStopped(now=T0))
    store.transition(state, [], at=T0, now=T0)
    os.unlink(keys(vault)[0])
    with closing(SqlRoundStore(path, FEDERATION, vault)) as again:
        left = again.load(T0)
        resumed = Resumed(now=T0, population=frozenset(SILOS), lost=again.lost_attempt())
        after, effects = step(left, resumed)
        (abandoned,) = [it for it in effects if isinstance(it, RoundAbandoned)]
        assert (abandoned.key, abandoned.reason) == (
            key,
            "the key of this attempt was lost with what silos had sent for it",
        )
        assert DiscardUpdates(key=key) in effects
        assert not any(isinstance(it, Aggregate) for it in effects)
        assert isinstance(after, Stopped if until == "stopped" else Gathering)
        expected = (1, 2) if until == "share keys" else (2, 1)  # who may have revealed shares is not asked for more
        assert (after.opening.round, after.opening.attempt) == expected
        again.transition(after, [], at=T0, now=T0)
        assert again.load(T0) is not None
        assert again.lost_attempt() is None
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM masked_events").fetchone() == (0,)


def test_in_the_last_round_the_plan_is_finished() -> None:
    rounds = masking("")
    assert isinstance(rounds.state, Aggregating)
    course = course_of(rounds.state)
    assert course is not None
    last = course.terms.timetable.last_round
    bare = replace(rounds.state, masked=None, round=last)
    after, _ = step(bare, Resumed(now=T0, population=frozenset(SILOS), lost=True))
    assert isinstance(after, Finished)
    assert Digest(after.course.model) == course.model
