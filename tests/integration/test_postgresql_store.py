"""The round store in PostgreSQL: what holds in SQLite holds there, and what silos revealed is in no file of the server.

The contract is tests/unit/test_rounds_store.py's: each test of it that asks for nothing but a store runs here as well.
"""

import inspect
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy import text

from lorica_coordinator.edges.database.postgresql.place import DatabasePlace
from lorica_coordinator.edges.database.postgresql.server import TRIES, PostgresqlDatabase
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.database.round_tables import ADDED_TO, FIRST_REVISION, TABLES_REVISION, metadata
from lorica_coordinator.edges.database.sealing.key_vault import FolderKeyVault
from lorica_coordinator.edges.database.state_json import journal_of
from lorica_coordinator.edges.upkeep.upgrade import migrate, upgrade_server
from lorica_coordinator.rounds.events import PlanStopped
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.states import Aggregating, State, Stopped
from lorica_coordinator.service.ports import Overtaken
from lorica_security.errors import ConfigurationError, StorageError
from tests.support.certificates import authority_and_server
from tests.support.masked_rounds import MaskedRounds
from tests.support.postgresql import SUPERUSER, PostgresqlServer, running_postgresql
from tests.support.rounds import FEDERATION, IDLE, ONE_OF_EACH_STATE, STOPPED, T0, A, B, C
from tests.unit import test_rounds_store as contract

globals().update(
    {
        name: test
        for name, test in vars(contract).items()
        if name.startswith("test_")
        and list(inspect.signature(test).parameters) == ["store"]
        and name
        not in (
            "test_writes_are_synchronised_to_the_disk",  # SQLite's pragmas
            "test_a_log_that_could_not_be_emptied_leaves_the_connection_as_it_was",
        )
    }
)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


def place_of(
    server: PostgresqlServer, tmp: Path, *, database: str = "postgres", user: str = SUPERUSER
) -> DatabasePlace:
    return DatabasePlace.parse(f"postgresql+psycopg://{user}@/{database}?host={server.folder}", tmp)


@pytest.fixture(scope="module")
def engine(server: PostgresqlServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresqlDatabase]:
    made = PostgresqlDatabase(place_of(server, tmp_path_factory.mktemp("settings")))
    SqlRoundStore(made, FEDERATION)
    yield made
    made.engine.dispose()


@pytest.fixture
def database(engine: PostgresqlDatabase) -> PostgresqlDatabase:
    """Empty tables."""
    names = ", ".join(set(metadata.tables) - {"alembic_version", "schema"} - {table.name for table in ADDED_TO})
    with engine.engine.begin() as connection:
        connection.execute(text(f"TRUNCATE {names}"))
    return engine


@pytest.fixture
def vault(tmp_path: Path) -> FolderKeyVault:
    return FolderKeyVault(tmp_path / "keys", 1)


@pytest.fixture
def store(database: PostgresqlDatabase, vault: FolderKeyVault) -> SqlRoundStore:
    made = SqlRoundStore(database, FEDERATION, vault)
    for silo in (A, B, C):
        contract.enrol(made, silo)
    return made


def again(store: SqlRoundStore, vault: FolderKeyVault) -> SqlRoundStore:
    assert isinstance(store.place, PostgresqlDatabase)
    return SqlRoundStore(store.place, FEDERATION, vault)


@pytest.mark.parametrize("state", ONE_OF_EACH_STATE.values(), ids=list(ONE_OF_EACH_STATE))
def test_every_state_comes_back_as_it_was(store: SqlRoundStore, vault: FolderKeyVault, state: State) -> None:
    store.transition(state, [], at=T0, now=T0)
    assert store.load(T0) == state
    assert again(store, vault).load(T0) == state


# --- what silos revealed


def masked(until: str = "") -> MaskedRounds:
    """A masked round whose silos have revealed their shares, or one in this phase of the protocol."""
    rounds = MaskedRounds()
    rounds.train()
    rounds.open()
    if until:
        rounds.until(until)
    else:
        rounds.run()
    return rounds


def pieces_of(journal: tuple[bytes, ...]) -> list[bytes]:
    return [event[at : at + 40] for event in journal for at in range(0, max(1, len(event) - 40), 40)]


def files_with(pieces: list[bytes], server: PostgresqlServer) -> list[str]:
    """Files of the whole cluster, its log of writes and its own log as well, that hold one of these."""
    server.execute("CHECKPOINT")
    found = []
    for path in sorted(server.folder.rglob("*")):
        if path.is_file() and path.name != "pg_internal.init":  # a cache of its catalogue, which comes and goes
            content = path.read_bytes()
            if any(piece in content for piece in pieces):
                found.append(str(path))
    return found


def lived_through(store: SqlRoundStore) -> tuple[bytes, ...]:
    """A masked attempt, saved as it goes, until the plan is stopped; its journal."""
    rounds = masked("unmasking")
    store.transition(rounds.state, [], at=T0, now=T0)
    rounds.run()
    store.transition(rounds.state, [], at=T0, now=T0)
    assert isinstance(rounds.state, Aggregating)
    journal = journal_of(rounds.state)
    stopped, _ = step(rounds.state, PlanStopped(now=T0))
    assert isinstance(stopped, Stopped)
    given_up = replace(stopped, masked=None)
    store.transition(given_up, [], at=T0, now=T0)
    assert store.load(T0) == given_up
    return journal


def test_what_silos_sent_for_a_masked_sum_is_in_no_file_of_the_server(
    database: PostgresqlDatabase, server: PostgresqlServer, vault: FolderKeyVault
) -> None:
    """Sealed it is not; in clear the same search finds it, in the heap and in the log of writes, after it is over."""
    journal = lived_through(SqlRoundStore(database, FEDERATION, vault))
    assert files_with(pieces_of(journal), server) == []
    unsealed = lived_through(SqlRoundStore(database, FEDERATION))
    found = files_with(pieces_of(unsealed), server)
    assert any("pg_wal" in name for name in found)
    assert any("base" in name for name in found)


@pytest.mark.parametrize("until", ["share keys", "unmasking", ""])
def test_without_its_key_an_attempt_is_told_as_lost(until: str, store: SqlRoundStore, vault: FolderKeyVault) -> None:
    rounds = masked(until)
    store.transition(rounds.state, [], at=T0, now=T0)
    assert again(store, vault).load(T0) == rounds.state
    vault.leave()
    restarted = again(store, vault)
    left = restarted.load(T0)
    assert restarted.lost_attempt() is (until != "share keys")
    assert left == replace(rounds.state, **({"secure": None} if until else {"masked": None}))  # type: ignore[arg-type]
    assert journal_of(left) == ()


# --- transactions


def test_a_transaction_that_others_are_in_the_way_of_is_done_again(store: SqlRoundStore) -> None:
    """A real conflict: each time, another transaction writes the row that this one has read."""
    database, left = store.place.engine, [3]

    def get_in_the_way(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "last_seen" in statement and "UPDATE" in statement and left[0]:
            left[0] -= 1
            with other.begin() as second:
                second.execute(text("UPDATE silos SET last_seen = last_seen + 1"))

    from sqlalchemy import create_engine

    other = create_engine(database.url, isolation_level="SERIALIZABLE", connect_args=_arguments(store))

    def first_look(connection: Any) -> None:
        connection.exec_driver_sql("SELECT count(*) FROM silos")  # the snapshot is taken here

    sqlalchemy_event.listen(database, "begin", first_look)
    sqlalchemy_event.listen(database, "before_cursor_execute", get_in_the_way)
    try:
        store.seen(A, T0 + 50)
        assert left == [0]
        left[0] = 10**6
        with pytest.raises(StorageError, match=rf"gave way to others {TRIES} times: see pg_stat_activity"):
            store.seen(A, T0 + 600)
        assert left == [10**6 - TRIES]
    finally:
        sqlalchemy_event.remove(database, "begin", first_look)
        sqlalchemy_event.remove(database, "before_cursor_execute", get_in_the_way)
        other.dispose()
    silo = store.silo(A)
    assert silo is not None
    assert silo.last_seen_unix_s == T0 + 50 + TRIES


def _arguments(store: SqlRoundStore) -> dict[str, str]:
    with store.place.engine.connect() as connection:
        info = connection.connection.driver_connection.info  # type: ignore[union-attr]
        return {"host": info.host, "user": info.user, "dbname": info.dbname}


def test_a_transition_whose_answer_is_lost_is_known_to_be_saved(
    store: SqlRoundStore, server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is cut once the server has committed, before the coordinator hears of it."""
    dialect = store.place.engine.dialect
    commit, cut = dialect.do_commit, [1]

    def commit_and_cut(connection: Any) -> None:
        commit(connection)
        if cut[0]:
            cut[0] -= 1
            raise dialect.dbapi.OperationalError("server closed the connection")  # type: ignore[union-attr]

    monkeypatch.setattr(dialect, "do_commit", commit_and_cut)
    store.transition(STOPPED, [], at=T0, now=T0)
    assert cut == [0]
    assert store.load(T0) == STOPPED


def test_one_that_nobody_could_ask_about_ends_the_process_when_it_was_saved(
    store: SqlRoundStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.load(T0)
    dialect = store.place.engine.dialect
    commit, begin = dialect.do_commit, dialect.do_begin

    def commit_and_away(connection: Any) -> None:
        commit(connection)
        monkeypatch.setattr(dialect, "do_begin", away)
        raise dialect.dbapi.OperationalError("server closed the connection")  # type: ignore[union-attr]

    def away(connection: Any) -> None:
        raise dialect.dbapi.OperationalError("connection refused")  # type: ignore[union-attr]

    monkeypatch.setattr(dialect, "do_commit", commit_and_away)
    with pytest.raises(StorageError, match=r"closed the connection.*rounds go on then"):
        store.transition(STOPPED, [], at=T0, now=T0)
    monkeypatch.setattr(dialect, "do_commit", commit)
    monkeypatch.setattr(dialect, "do_begin", begin)
    with pytest.raises(Overtaken, match="whose answer was lost on the way: start again"):
        store.transition(before, [], at=T0, now=T0)
    assert store.load(T0) == STOPPED, "nothing was written over it"


def test_one_that_is_saved_after_it_was_asked_for_ends_the_process(
    store: SqlRoundStore, server: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is cut while the server still commits: a look sees the state before, and then it is saved."""
    store.transition(IDLE, [], at=T0, now=T0)
    dialect = store.place.engine.dialect
    commit = dialect.do_commit

    def cut(connection: Any) -> None:
        monkeypatch.setattr(dialect, "do_commit", commit)
        raise dialect.dbapi.OperationalError("server closed the connection")  # type: ignore[union-attr]

    monkeypatch.setattr(dialect, "do_commit", cut)
    monkeypatch.setattr("lorica_coordinator.edges.database.round_store.secrets.token_hex", lambda count: "late" * 8)
    with pytest.raises(StorageError):
        store.transition(STOPPED, [], at=T0, now=T0)
    server.execute(f"UPDATE machine SET saved_as = '{'late' * 8}'")
    with pytest.raises(Overtaken, match="whose answer was lost on the way: start again"):
        store.transition(IDLE, [], at=T0, now=T0)


def test_a_database_that_was_put_back_ends_the_process(store: SqlRoundStore, server: PostgresqlServer) -> None:
    store.transition(IDLE, [], at=T0, now=T0)
    (found,) = server.rows("SELECT saved_as FROM machine")
    store.transition(STOPPED, [], at=T0, now=T0)
    server.execute(f"UPDATE machine SET saved_as = '{found[0]}'")
    with pytest.raises(Overtaken, match="newest transition in the database is not the one that was saved last"):
        store.transition(IDLE, [], at=T0, now=T0)


# --- a server that is not as it must be


def test_a_database_that_is_away_is_named_and_used_again_when_it_is_back(
    store: SqlRoundStore, server: PostgresqlServer, tmp_path: Path
) -> None:
    store.transition(STOPPED, [], at=T0, now=T0)
    server.restart(meanwhile=lambda: _is_refused(store, place_of(server, tmp_path)))
    assert store.load(T0) == STOPPED
    store.transition(IDLE, [], at=T0, now=T0)
    assert store.load(T0) == IDLE


def _is_refused(store: SqlRoundStore, place: DatabasePlace) -> None:
    for attempt in (lambda: store.load(T0), lambda: SqlRoundStore(PostgresqlDatabase(place), FEDERATION)):
        with pytest.raises(StorageError, match=r"postgresql:///postgres cannot be read.*check that the server runs"):
            attempt()


def test_a_database_that_is_read_only_is_named(store: SqlRoundStore, server: PostgresqlServer, tmp_path: Path) -> None:
    """As a standby is, or a server whose disk was full."""
    server.execute("CREATE ROLE guest LOGIN SUPERUSER", "ALTER ROLE guest SET default_transaction_read_only = on")
    with closing(SqlRoundStore(PostgresqlDatabase(place_of(server, tmp_path, user="guest")), FEDERATION)) as opened:
        before = opened.load(T0)
        with pytest.raises(StorageError, match="it is read-only: name the server that is written to"):
            opened.transition(STOPPED, [], at=T0, now=T0)
        assert opened.load(T0) == before


def test_a_slow_database_is_named(store: SqlRoundStore) -> None:
    def look_slowly() -> None:
        with store._transaction() as connection:
            connection.execute(text("SET LOCAL statement_timeout = 1"))
            connection.execute(text("SELECT pg_sleep(5)"))

    with pytest.raises(StorageError, match="a statement took longer than 30 seconds"):
        look_slowly()


def test_a_database_of_something_else_or_another_release_is_refused(server: PostgresqlServer, tmp_path: Path) -> None:
    server.execute(
        "CREATE DATABASE shop", "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0", "CREATE DATABASE older"
    )
    server.execute("CREATE TABLE customers (name text)", database="shop")
    with pytest.raises(StorageError, match=r"postgresql:///shop has tables of revision none.*no release"):
        SqlRoundStore(PostgresqlDatabase(place_of(server, tmp_path, database="shop")), FEDERATION)
    with pytest.raises(ConfigurationError, match="latin holds text as LATIN1: make the database anew with ENCODING"):
        SqlRoundStore(PostgresqlDatabase(place_of(server, tmp_path, database="latin")), FEDERATION)
    older = PostgresqlDatabase(place_of(server, tmp_path, database="older"))
    with older.engine.begin() as connection:
        migrate(connection, FIRST_REVISION)
    with pytest.raises(StorageError, match=r"older has tables of revision 0004.*run `coordinator upgrade`"):
        SqlRoundStore(older, FEDERATION)
    with pytest.raises(ConfigurationError, match="is no revision from 0011 to"):
        upgrade_server(older, to="0005")
    done = upgrade_server(older)
    assert (done.before, done.after, done.copy) == (FIRST_REVISION, TABLES_REVISION, None)
    SqlRoundStore(older, FEDERATION).close()
    with older.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert [it for it in compare_metadata(context, metadata) if "alembic_version" not in str(it)] == []
    older.engine.dispose()


def test_a_server_that_is_too_old_is_refused(store: SqlRoundStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.place.engine.dialect, "server_version_info", (13, 4))
    with pytest.raises(ConfigurationError, match="is PostgreSQL 13: 14 or a newer one is needed"):
        SqlRoundStore(store.place, FEDERATION)  # type: ignore[arg-type]


# --- TLS


def test_a_server_is_who_its_certificate_says_or_is_not_spoken_to(tmp_path: Path) -> None:
    """Its certificate is for an address: a root of somebody else's does not fit, and neither does a name."""
    root, pair = authority_and_server("127.0.0.1")
    (tmp_path / "root.pem").write_bytes(root)
    (tmp_path / "other.pem").write_bytes(authority_and_server("127.0.0.1")[0])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def database(host: str, root: str) -> PostgresqlDatabase:
        address = f"{SUPERUSER}@{host}:{port}/postgres?sslmode=verify-full&sslrootcert={tmp_path}/{root}.pem"
        return PostgresqlDatabase(DatabasePlace.parse(f"postgresql+psycopg://{address}", tmp_path))

    with running_postgresql(tls=pair, port=port):
        for host, file, said in (("127.0.0.1", "other", "SSL error"), ("localhost", "root", "does not match")):
            with pytest.raises(StorageError, match=said):
                SqlRoundStore(database(host, file), FEDERATION)
        verified = database("127.0.0.1", "root")
        SqlRoundStore(verified, FEDERATION)
        with verified.engine.connect() as connection:
            look = text("SELECT ssl, version FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
            assert connection.execute(look).one() == (True, "TLSv1.3")
        verified.engine.dispose()
