"""The round store on a real SQLite file: what comes back is what went in, and a transition is whole or not there."""

import json
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lorica_coordinator.edges.database.certificate_records import EXPIRED_KEPT_S
from lorica_coordinator.edges.database.database_copy import copy_database
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.database.sqlite_database import BUSY_TIMEOUT_MS
from lorica_coordinator.edges.database.state_json import STATE_VERSION, state_from_json, state_to_json
from lorica_coordinator.edges.upkeep.backup import leave_out_what_is_under_way
from lorica_coordinator.rounds.effects import COMMANDS, Record
from lorica_coordinator.rounds.events import DeadlinePassed, Event, PlanStopped
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.scores import BestModel
from lorica_coordinator.rounds.states import Aggregating, Idle, State, Stopped, deadline_of
from lorica_coordinator.rounds.updates import IncludedUpdate
from lorica_coordinator.service.issued import Certificate, IssuedCertificate
from lorica_coordinator.service.records import EnrolledSilo, Invitation
from lorica_security.errors import AuthenticationError, AuthorisationError, StorageError
from lorica_security.identifiers import Identity, Role, SiloName
from silo_wire.canonical import digest_of
from tests.support.masked_rounds import D, MaskedRounds
from tests.support.rounds import (
    COLLECTING,
    FEDERATION,
    GATHERING,
    IDLE,
    INITIAL,
    ONE_OF_EACH_STATE,
    PLAN,
    SIGNATURE,
    STOPPED,
    T0,
    A,
    B,
    C,
    after,
    aggregated,
    committed,
    course,
    declined,
    evaluation,
    key,
    model_after,
    ready,
    reported,
    started,
    update,
)


@pytest.fixture(scope="module")
def three_silos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "state.sqlite"
    made = SqlRoundStore(path, FEDERATION)
    for silo in (A, B, C):
        enrol(made, silo)
    made.close()
    return path


@pytest.fixture
def path(three_silos: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "state.sqlite"
    shutil.copy(three_silos, copied)
    return copied


@pytest.fixture
def store(path: Path) -> Iterator[SqlRoundStore]:
    made = SqlRoundStore(path, FEDERATION)
    yield made
    made.close()


def invitation(silo: SiloName = A, secret: bytes = b"secret", expires: float = T0 + 100) -> Invitation:
    return Invitation(silo=silo, secret_digest=bytes.fromhex(digest_of(secret)), expires_unix_s=expires, pin="a pin")


def enrolled_silo(silo: SiloName = A, at: float = T0) -> EnrolledSilo:
    return EnrolledSilo(
        silo=silo,
        identity_public_key=silo.encode().ljust(32, b"."),
        certificate_serial=f"{silo}-{at:.0f}",
        certificate_digest=digest_of(f"certificate of {silo} at {at:.0f}".encode()),
        certificate_expires_unix_s=T0 + 86_400,
        enrolled_unix_s=at,
        last_seen_unix_s=0.0,
    )


def enrol(store: SqlRoundStore, silo: SiloName) -> None:
    offered = invitation(silo, f"secret of {silo}".encode())
    store.invite(offered)
    store.enrol(enrolled_silo(silo), secret_digest=offered.secret_digest)


def live(store: SqlRoundStore, state: State, *events: Event) -> State:
    """Run events through the machine, each persisted as the service does."""
    for event in events:
        state, effects = step(state, event)
        store.transition(state, records_of(effects), at=event.now, now=event.now)
    return state


def records_of(effects: tuple[object, ...]) -> list[Record]:
    return [effect for effect in effects if not isinstance(effect, COMMANDS)]  # type: ignore[misc]


def whole_round() -> list[Event]:
    return [
        started(rounds=1),
        ready(A),
        ready(B, T0 + 1),
        committed(A, now=T0 + 5, examples=30),
        committed(B, now=T0 + 6),
        aggregated(now=T0 + 7),
        reported(A, now=T0 + 8),
        reported(B, exact_matches=10, now=T0 + 9),
    ]


# --- state


@pytest.mark.parametrize("state", ONE_OF_EACH_STATE.values(), ids=lambda state: state.phase)
def test_every_state_comes_back_as_it_was(store: SqlRoundStore, path: Path, state: State) -> None:
    store.transition(state, [], at=T0, now=T0)
    store.close()
    assert SqlRoundStore(path, FEDERATION).load(T0) == state


def test_of_a_deadline_what_was_left_comes_back_from_the_moment_of_reading_on(store: SqlRoundStore) -> None:
    store.transition(COLLECTING, [], at=T0, now=T0 + 100)
    assert deadline_of(store.load(7.0)) == 507.0
    store.transition(COLLECTING, [], at=T0, now=T0 + 900)
    assert deadline_of(store.load(7.0)) == 7.0, "what is over is over"


@pytest.mark.parametrize("left", ["NaN", "Infinity", "-1.0"])
def test_what_is_left_of_gathering_that_is_no_duration_is_refused(left: str) -> None:
    text = state_to_json(replace(GATHERING, deadline=None, left=40.0), now=T0)
    with pytest.raises(StorageError, match="restore it from backup"):
        state_from_json(
            version=STATE_VERSION,
            phase="gathering",
            text=text.replace('"left":40.0', f'"left":{left}'),
            where="x",
            now=T0,
        )


@pytest.mark.parametrize("left", ["NaN", "Infinity", "-1.0"])
def test_a_deadline_that_is_no_duration_is_refused(store: SqlRoundStore, path: Path, left: str) -> None:
    store.transition(COLLECTING, [], at=T0, now=T0)
    with sqlite3.connect(path) as connection:
        connection.execute(
            "UPDATE machine SET state = replace(state, '\"deadline\":600.0', ?)", (f'"deadline":{left}',)
        )
    with pytest.raises(StorageError, match="restore it from backup"):
        store.load()


def test_states_with_all_their_parts_come_back() -> None:
    best = BestModel(model=model_after(1), round=1, exact_matches=3, examples=7)
    busy = after(replace(COLLECTING, cohort=(A, B, C), course=course(best=best)), committed(A), declined(B))
    for state in (busy, Stopped(course=STOPPED.course, opening=STOPPED.opening, updates=(update(A), update(B)))):
        text = state_to_json(state, now=T0)
        assert state_from_json(version=STATE_VERSION, phase=state.phase, text=text, where="here", now=T0) == state


def test_what_a_model_includes_survives_and_older_states_include_nothing() -> None:
    kept = course(included=(IncludedUpdate(silo=A, digest=update(A).digest),))
    state = replace(COLLECTING, course=kept)
    text = state_to_json(state, now=T0)
    assert state_from_json(version=STATE_VERSION, phase=state.phase, text=text, where="here", now=T0) == state
    older = json.loads(text)
    del older["course"]["included"]
    read = state_from_json(version=STATE_VERSION, phase=state.phase, text=json.dumps(older), where="here", now=T0)
    assert read == COLLECTING


def test_a_new_store_is_idle_with_the_enrolled_silos(store: SqlRoundStore) -> None:
    assert store.load() == Idle(population=frozenset({A, B, C}))


def test_the_state_of_another_version_is_refused_by_name(store: SqlRoundStore, path: Path) -> None:
    store.transition(IDLE, [], at=T0, now=T0)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE machine SET version = 99")
    with pytest.raises(StorageError, match=r"state\.sqlite holds a state of version 99"):
        store.load()


def test_tables_of_another_version_are_refused_by_name(store: SqlRoundStore, path: Path) -> None:
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0099'")
    with pytest.raises(
        StorageError, match=r"state\.sqlite has tables of revision 0099.* install the release that wrote it"
    ):
        SqlRoundStore(path, FEDERATION)


@pytest.mark.parametrize(
    ("column", "value"), [("state", "{}"), ("state", "not JSON"), ("phase", "sleeping"), ("state", '{"course": 1}')]
)
def test_a_state_that_does_not_parse_is_refused_not_guessed(
    store: SqlRoundStore, path: Path, column: str, value: str
) -> None:
    store.transition(COLLECTING, [], at=T0, now=T0)
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE machine SET {column} = ?", (value,))
    with pytest.raises(StorageError, match=r"state\.sqlite"):
        store.load()


# --- one transaction


def test_a_transition_whose_records_fail_keeps_the_old_state(store: SqlRoundStore) -> None:
    before = live(store, IDLE, started(), ready(A))
    opened, effects = step(before, ready(B))
    broken = [*records_of(effects), *records_of(effects)]  # the second insert of the round breaks its primary key
    with pytest.raises(StorageError):
        store.transition(opened, broken, at=T0, now=T0)
    assert store.load(T0) == before
    assert store.rounds(PLAN, 0) == ()


def test_a_transition_whose_state_cannot_be_written_keeps_its_records_out(store: SqlRoundStore, path: Path) -> None:
    before = live(store, IDLE, started(), ready(A))
    with sqlite3.connect(path) as connection:  # a disk that fails at the very last statement
        connection.execute(
            "CREATE TRIGGER full BEFORE UPDATE ON machine BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
        )
    opened, effects = step(before, ready(B))
    with pytest.raises(StorageError, match="disk is full"):
        store.transition(opened, records_of(effects), at=T0, now=T0)
    assert store.rounds(PLAN, 0) == ()
    assert store.load(T0) == before


def test_writes_are_synchronised_to_the_disk(store: SqlRoundStore) -> None:
    with store._transaction() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 10_000}


def unmasking(store: SqlRoundStore) -> tuple[Aggregating, list[bytes]]:
    """A round whose silos have revealed their shares, as saved, and pieces of what the state has of these."""
    rounds = MaskedRounds()
    rounds.train()
    rounds.open()
    rounds.run()
    assert isinstance(rounds.state, Aggregating)
    assert rounds.state.masked is not None
    enrol(store, D)
    store.transition(rounds.state, records_of(tuple(rounds.effects)), at=T0, now=T0)
    revealed = rounds.state.masked.attempt.journal[-3:]
    return rounds.state, [entry[at : at + 40] for entry in revealed for at in range(0, len(entry) - 40, 40)]


def files_with(pieces: list[bytes], path: Path) -> list[str]:
    files = sorted(path.parent.glob("state.sqlite*"))
    return [file.name for file in files if any(piece in file.read_bytes() for piece in pieces)]


def test_what_silos_revealed_is_in_no_file_when_the_round_is_over(store: SqlRoundStore, path: Path) -> None:
    state, revealed = unmasking(store)
    assert files_with(revealed, path) == ["state.sqlite-wal"]
    live(store, state, aggregated(state.key, silos=()))
    assert files_with(revealed, path) == []


def test_nor_when_the_process_was_killed_before_it_cleared_its_log(store: SqlRoundStore, path: Path) -> None:
    state, revealed = unmasking(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqlRoundStore, "_clear_log", lambda store: None)
        live(store, state, aggregated(state.key, silos=()))
    assert files_with(revealed, path) == ["state.sqlite-wal"]
    SqlRoundStore(path, FEDERATION).close()
    assert files_with(revealed, path) == []


def test_a_backup_of_a_masked_round_has_nothing_that_was_revealed_for_it(store: SqlRoundStore, path: Path) -> None:
    _, revealed = unmasking(store)
    copied = path.parent / "backup" / "state.sqlite"
    copied.parent.mkdir()
    copy_database(path, copied)
    assert files_with(revealed, copied) == ["state.sqlite"]
    leave_out_what_is_under_way(copied, FEDERATION, T0)
    assert files_with(revealed, copied) == []
    assert files_with(revealed, path) == ["state.sqlite-wal"], "the round under way is not touched"


@pytest.mark.parametrize("then", ["a transition", "a look", "the end"])
def test_a_reader_puts_that_off_and_holds_nobody_up(then: str, store: SqlRoundStore, path: Path) -> None:
    """Until whatever the store does next: an idle coordinator has no transition for days."""
    state, revealed = unmasking(store)
    reader = sqlite3.connect(path)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM machine").fetchone()
    began = time.monotonic()
    closed = live(store, state, aggregated(state.key, silos=()))
    assert time.monotonic() - began < BUSY_TIMEOUT_MS / 2000
    assert files_with(revealed, path) != []
    reader.close()
    match then:
        case "a transition":
            store.transition(closed, [], at=T0, now=T0)
        case "a look":
            store.silos()
        case "the end":
            store.close()
    assert files_with(revealed, path) == []


def test_a_log_that_could_not_be_emptied_leaves_the_connection_as_it_was(store: SqlRoundStore) -> None:
    """One that would not wait any more would fail where another process writes."""
    borrowed = store._database.raw_connection()
    deny = {"wal_checkpoint"}
    assert borrowed.driver_connection is not None
    borrowed.driver_connection.set_authorizer(lambda _, name, *rest: int(name in deny))
    borrowed.close()
    store._log_is_clear = False
    store.silos()
    assert not store._log_is_clear
    deny.clear()
    with store._transaction() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == BUSY_TIMEOUT_MS


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    path.write_bytes(b"this is no database" * 1000)
    with pytest.raises(StorageError, match=r"state\.sqlite cannot be read or written"):
        SqlRoundStore(path, FEDERATION)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything; the folder test below runs for root too")
def test_an_unwritable_file_is_named(store: SqlRoundStore, path: Path) -> None:
    store.close()
    path.chmod(stat.S_IRUSR)
    with pytest.raises(StorageError, match=r"state\.sqlite"):
        SqlRoundStore(path, FEDERATION).transition(IDLE, [], at=T0, now=T0)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"missing/state\.sqlite"):
        SqlRoundStore(tmp_path / "missing" / "state.sqlite", FEDERATION)


# --- invitations and silos


def test_an_invitation_is_spent_once(store: SqlRoundStore) -> None:
    store.invite(invitation())
    assert store.invitations() == (invitation(),)
    store.enrol(enrolled_silo(at=T0 + 1), secret_digest=invitation().secret_digest)
    assert store.invitations() == ()
    with pytest.raises(AuthenticationError, match="spent, expired or replaced"):
        store.enrol(enrolled_silo(at=T0 + 2), secret_digest=invitation().secret_digest)
    found = store.silo(A)
    assert found is not None
    assert found.enrolled_unix_s == T0 + 1


def test_an_expired_invitation_enrols_nobody(store: SqlRoundStore) -> None:
    store.invite(invitation(SiloName("insurer-d")))
    with pytest.raises(AuthenticationError):
        store.enrol(enrolled_silo(SiloName("insurer-d"), at=T0 + 100), secret_digest=invitation().secret_digest)
    assert store.silo(SiloName("insurer-d")) is None


def test_a_newer_invitation_replaces_the_open_one(store: SqlRoundStore) -> None:
    store.invite(invitation(secret=b"older"))
    store.invite(invitation(secret=b"newer"))
    assert store.invitations() == (invitation(secret=b"newer"),)
    with pytest.raises(AuthenticationError):
        store.enrol(enrolled_silo(), secret_digest=invitation(secret=b"older").secret_digest)


def test_an_invitation_is_for_one_silo(store: SqlRoundStore) -> None:
    store.invite(invitation(A))
    with pytest.raises(AuthenticationError):
        store.enrol(enrolled_silo(B), secret_digest=invitation(A).secret_digest)


def test_enrolling_again_replaces_the_keys_and_keeps_one_silo(store: SqlRoundStore) -> None:
    store.invite(invitation())
    renewed = replace(enrolled_silo(at=T0 + 9), identity_public_key=b"n" * 32, certificate_serial="b2")
    store.enrol(renewed, secret_digest=invitation().secret_digest)
    assert store.silo(A) == renewed
    assert [silo.silo for silo in store.silos()] == [A, B, C]


def test_nobody_renews_access_that_was_revoked_meanwhile(store: SqlRoundStore) -> None:
    """The call was let in, and is answered once the revocation is in the records."""
    identity = Identity(FEDERATION, Role.VIEWER, "victor")

    def issued(serial: str) -> IssuedCertificate:
        entry = Certificate(serial=serial, digest="", identity=identity, issued_unix_s=T0, expires_unix_s=T0 + 10)
        return IssuedCertificate(pem=b"", entry=entry, authority="a" * 64)

    store.grant(issued("a"), trust="b" * 64)
    store.grant(issued("b"), trust="b" * 64, renews=True)
    store.revoke(identity, T0 + 1)
    with pytest.raises(AuthorisationError, match="was revoked meanwhile"):
        store.grant(issued("c"), trust="b" * 64, renews=True)
    store.grant(issued("d"), trust="b" * 64)
    good = {item.serial for item in store.certificates() if item.identity == identity and item.revoked_unix_s is None}
    assert good == {"d"}


def test_expired_certificates_leave_the_register_a_month_later(store: SqlRoundStore) -> None:
    identity = Identity(FEDERATION, Role.VIEWER, "victor")

    def one(serial: str, at: float) -> Certificate:
        return Certificate(serial=serial, digest="", identity=identity, issued_unix_s=at, expires_unix_s=at + 10)

    store.register(one("a", T0))
    store.register(one("b", T0 + EXPIRED_KEPT_S))
    assert {item.serial for item in store.certificates() if item.identity == identity} == {"a", "b"}
    store.register(one("c", T0 + EXPIRED_KEPT_S + 11))
    assert {item.serial for item in store.certificates() if item.identity == identity} == {"b", "c"}


def test_a_clock_that_was_years_ahead_for_a_moment_leaves_everybody_in_the_register(store: SqlRoundStore) -> None:
    """The coordinator renews its own certificate at once when its clock says so."""
    before = store.certificates()
    own = Identity(FEDERATION, Role.OPERATOR, "local")
    ahead = T0 + 10 * 365 * 86_400
    store.register(Certificate(serial="o", digest="", identity=own, issued_unix_s=ahead, expires_unix_s=ahead + 10))
    assert {item.serial for item in before} < {item.serial for item in store.certificates()}


def test_the_newest_keys_of_a_silo_are_kept_by_its_name(store: SqlRoundStore) -> None:
    """Also where it is enrolled anew: whoever comes back under that name is told of them."""
    assert store.announced() == {}
    for digest in (b"a" * 32, b"b" * 32):
        store.announce(A, digest)
        assert store.announced() == {A: digest}
    store.invite(invitation())
    store.enrol(
        replace(enrolled_silo(at=T0 + 9), identity_public_key=b"n" * 32), secret_digest=invitation().secret_digest
    )
    assert store.announced() == {A: b"b" * 32}


def test_when_a_silo_was_last_seen_is_kept(store: SqlRoundStore) -> None:
    store.seen(A, T0 + 77)
    found = store.silo(A)
    assert found is not None
    assert found.last_seen_unix_s == T0 + 77


# --- rounds


def test_a_whole_round_reads_back_with_its_numbers(store: SqlRoundStore) -> None:
    live(store, Idle(population=frozenset({A, B})), *whole_round())
    (row,) = store.rounds(PLAN, 0)
    assert (row.round, row.attempt, row.outcome, row.detail) == (1, 1, "applied", "")
    assert (row.opened_unix_s, row.closed_unix_s) == (T0 + 1, T0 + 7)
    assert row.model == model_after(1)
    # 4 of 10 and 10 of 10
    assert row.macro_exact_match == pytest.approx(0.7)
    assert row.micro_exact_match == pytest.approx(14 / 20)
    first, second = row.silos
    assert (first.silo, first.outcome, first.examples, first.loss_reduction) == (A, "committed", 30, 2.0)
    assert (first.weight, first.share, first.delta_norm) == (20.0, 0.5, 0.5)
    assert second.evaluation == evaluation(10)


def test_signatures_and_receipts_are_kept_with_the_round(store: SqlRoundStore) -> None:
    live(store, Idle(population=frozenset({A, B})), *whole_round())
    assert store.committed_update(key(), A) == update(A).digest
    assert store.committed_update(key(1, 2), A) is None
    assert store.committed_update(key(), C) is None
    assert store.evaluation(key(), B) == evaluation(10)
    assert store.evaluation(key(2), B) is None
    for model, round_number in ((INITIAL, 0), (model_after(1), 1)):
        signed = store.signed_model(PLAN, model)
        assert signed is not None
        assert (signed.round, signed.signature) == (round_number, SIGNATURE)
    assert store.signed_model(PLAN, model_after(9)) is None


def test_the_initial_evaluation_is_a_row_of_its_own(store: SqlRoundStore) -> None:
    live(
        store,
        Idle(population=frozenset({A, B})),
        started(evaluate_initial=True),
        ready(A),
        ready(B),
        reported(A, key(0)),
        reported(B, key(0)),
    )
    zeroth, first = store.rounds(PLAN, 0)
    assert (zeroth.round, zeroth.outcome) == (0, "evaluated")
    assert zeroth.macro_exact_match == pytest.approx(0.4)
    assert [(silo.silo, silo.outcome) for silo in zeroth.silos] == [(A, "evaluated"), (B, "evaluated")]
    assert (first.round, first.outcome, first.closed_unix_s) == (1, "running", None)
    assert [silo.outcome for silo in first.silos] == ["training", "training"]


def test_abandoned_attempts_keep_their_reason_and_who_was_late(store: SqlRoundStore) -> None:
    state = live(
        store, Idle(population=frozenset({A, B})), started(), ready(A), ready(B), committed(A), declined(B), ready(B)
    )
    live(store, state, DeadlinePassed(now=T0 + 600, deadline=T0 + 600))
    first, second, third = store.rounds(PLAN, 0)
    assert (first.attempt, first.outcome) == (1, "abandoned")
    assert "bank-b: training_failed" in first.detail
    assert [(silo.silo, silo.outcome) for silo in first.silos] == [(A, "committed"), (B, "declined")]
    assert (second.attempt, second.outcome) == (2, "abandoned")
    assert [silo.outcome for silo in second.silos] == ["late", "late"]
    assert (third.attempt, third.outcome) == (3, "running")
    assert [row.attempt for row in store.rounds(PLAN, 2)] == [2, 3]
    assert set(store.closed_attempts(9)) == {key(1, 1), key(1, 2)}
    assert store.has_rounds(PLAN)
    assert not store.has_rounds(digest_of(b"another"))


def test_an_evaluation_done_again_after_a_stop_belongs_to_the_round_that_made_the_model(store: SqlRoundStore) -> None:
    *earlier, _ = whole_round()
    state = live(store, Idle(population=frozenset({A, B})), *earlier, PlanStopped(now=T0 + 20))
    live(store, state, started(rounds=1), reported(A, key(1, 2)), reported(B, key(1, 2), exact_matches=6))
    (row,) = store.rounds(PLAN, 0)
    assert (row.attempt, row.outcome) == (1, "applied")
    assert row.macro_exact_match == pytest.approx(0.5)
