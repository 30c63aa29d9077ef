"""SQL that a model wrote, against a real PostgreSQL server: each attack by name, and after each an honest question.

Two walls are tested apart: what a user meets (the first look and the refusal of volatile functions), and, with that
first look taken away, what the cursor's grammar, the read-only transaction and the role stop by themselves.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest

from lorica_security.errors import DataError, UnsafeSql
from silo_agent.sql_sandbox import (
    ExecutionOutcome,
    Limits,
    PostgresqlTarget,
    QueryFailed,
    Sandbox,
    execution_match,
    parse_database,
    postgresql_session,
    run_select,
)
from silo_agent.sql_sandbox.postgresql_session import PostgresqlSession
from silo_agent.sql_sandbox.statement import Statement
from tests.support import taken_worker
from tests.support.postgresql import PostgresqlServer, running_postgresql

LIMITS = Limits(seconds=1, rows=1000, result_bytes=2**20, memory_bytes=64 * 2**20)
PASSWORD = "s3cr/et@?#"  # every character that an URL would misread

SETUP = (
    f"CREATE ROLE reader LOGIN PASSWORD '{PASSWORD}'",
    "CREATE TABLE patient (id INTEGER PRIMARY KEY, name TEXT, born DATE, fee NUMERIC(8, 2), tags TEXT[], doc JSONB, "
    "picture BYTEA)",
    "INSERT INTO patient VALUES (1, 'Ada', '2020-01-02', 2.50, '{a,b}', '{\"k\": 1}', '\\x00ff'), (2, 'Bo', NULL, "
    "3, NULL, NULL, NULL)",
    "CREATE TABLE secret (word TEXT)",
    "INSERT INTO secret VALUES ('abracadabra')",
    "CREATE SEQUENCE counter",
    "GRANT SELECT ON patient TO reader",
    "GRANT USAGE ON SEQUENCE counter TO reader",
    "CREATE FUNCTION spy() RETURNS TEXT LANGUAGE sql STABLE SECURITY DEFINER AS 'SELECT word FROM secret'",
    "CREATE FUNCTION meddle() RETURNS INTEGER LANGUAGE plpgsql AS 'BEGIN DELETE FROM patient; RETURN 1; END'",
    "CREATE FUNCTION twice(x INTEGER) RETURNS INTEGER LANGUAGE sql IMMUTABLE AS 'SELECT 2 * x'",
)


@dataclass(frozen=True)
class Clinic:
    """A server with a least-privilege role, and a warm sandbox as that role."""

    server: PostgresqlServer
    box: Sandbox

    def refuse(self, sql: str, reason: str) -> None:
        """`sql` is refused for `reason`, and has done nothing."""
        with pytest.raises(UnsafeSql, match=reason):
            self.box.run(sql)
        self.require_unharmed()

    def require_unharmed(self) -> None:
        assert self.server.rows(
            "SELECT count(*), (SELECT count(*) FROM pg_class WHERE relname = 'loot') FROM patient"
        ) == [(2, 0)]
        assert self.box.run("SELECT name FROM patient WHERE id = 2").rows == (("Bo",),)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as server:
        server.execute(*SETUP)
        yield server


@pytest.fixture(scope="module")
def target(server: PostgresqlServer) -> PostgresqlTarget:
    target = parse_database(server.url(user="reader", password=PASSWORD))
    assert isinstance(target, PostgresqlTarget)
    return target


@pytest.fixture(scope="module")
def warm(server: PostgresqlServer, target: PostgresqlTarget) -> Iterator[Clinic]:
    with Sandbox(target, LIMITS) as box:
        yield Clinic(server, box)


# Honest statements


def test_a_select_gives_columns_and_canonical_values(warm: Clinic) -> None:
    result = warm.box.run("SELECT * FROM patient ORDER BY id ;")
    assert result.columns == ("id", "name", "born", "fee", "tags", "doc", "picture")
    assert result.rows == (
        (1, "Ada", "2020-01-02", 2.5, "{a,b}", '{"k": 1}', "\\x00ff"),
        (2, "Bo", None, 3, None, None, None),
    )
    assert result.ordered


def test_values_that_python_has_no_type_for(warm: Clinic) -> None:
    sql = "SELECT 'NaN'::float8, '-infinity'::float8, 'infinity'::date, 1e40::numeric, 1e400::numeric, interval '26 hours', now() IS NOT NULL, '%s'"
    assert warm.box.run(sql).rows == (("NaN", "-Infinity", "infinity", 1e40, "1" + "0" * 400, "PT26H", True, "%s"),)


def test_execution_match(warm: Clinic) -> None:
    gold = "SELECT avg(fee) FROM patient"
    assert (
        execution_match(warm.box, gold_sql=gold, predicted_sql="SELECT sum(fee) / count(*) FROM patient").outcome
        is ExecutionOutcome.MATCH
    )
    assert (
        execution_match(warm.box, gold_sql=gold, predicted_sql="SELECT fee").outcome is ExecutionOutcome.PREDICTED_ERROR
    )


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT random() < 2",
        "SELECT twice(21) = 42",
        "SELECT upper(name) = 'ADA' FROM patient WHERE id = 1",
        "SELECT 'pg_sleep' IS NOT NULL",
    ],
)
def test_harmless_functions_run(warm: Clinic, sql: str) -> None:
    assert warm.box.run(sql).rows == ((True,),)


@pytest.mark.parametrize(
    "sql",
    ["SELECT nope FROM patient", "SELECT 1 / 0", "SELECT * FROM missing", "SELECT name FROM patient WHERE id = $1"],
)
def test_a_statement_that_cannot_run_is_an_error_and_no_refusal(warm: Clinic, sql: str) -> None:
    with pytest.raises(QueryFailed, match="SQL failed") as caught:
        warm.box.run(sql)
    assert "DECLARE" not in str(caught.value)


# Hostile statements, as a user would meet them


def test_what_is_only_prepared_does_not_run(warm: Clinic) -> None:
    """A statement that fails where somebody is there fails in neither case: nobody was looked for."""
    for there in ("id IS NOT NULL", "id IS NULL"):
        warm.box.prepare(f"SELECT 1 / (CASE WHEN EXISTS (SELECT 1 FROM patient WHERE {there}) THEN 0 ELSE 1 END)")
    with pytest.raises(QueryFailed, match="division by zero"):
        warm.box.run("SELECT 1 / (CASE WHEN EXISTS (SELECT 1 FROM patient) THEN 0 ELSE 1 END)")
    with pytest.raises(QueryFailed, match="SQL failed"):
        warm.box.prepare("SELECT nothing FROM patients")
    with pytest.raises(UnsafeSql):
        warm.box.prepare("SELECT pg_read_file('/etc/passwd')")


def test_pg_read_file(warm: Clinic) -> None:
    warm.refuse("SELECT pg_read_file('/etc/passwd')", "function pg_read_file")


def test_copy_to_program(warm: Clinic, tmp_path: Path) -> None:
    warm.refuse(f"COPY patient TO PROGRAM 'touch {tmp_path}/loot'", "only one SELECT")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "sql", ["COPY patient FROM '/etc/passwd'", "COPY (SELECT * FROM patient) TO '/tmp/loot'", "COPY patient TO STDOUT"]
)
def test_copy(warm: Clinic, sql: str) -> None:
    warm.refuse(sql, "only one SELECT")


@pytest.mark.parametrize(
    "call",
    [
        "pg_sleep(60)",
        "PG_SLEEP (60)",
        '"pg_sleep"(60)',
        "pg_catalog.pg_sleep(60)",
        "pg_sleep/* */(60)",
        "pg_sleep -- x\n (60)",
        "pg_sleep_for('1 minute')",
    ],
)
def test_pg_sleep_however_it_is_written(warm: Clinic, call: str) -> None:
    warm.refuse(f"SELECT {call}", "function pg_sleep")


def test_a_function_name_in_unicode_escapes(warm: Clinic) -> None:
    warm.refuse('SELECT U&"\\0070g_sleep"(60)', "Unicode escapes")


@pytest.mark.parametrize(
    "call", ["lo_export(1, '/tmp/loot')", "lo_import('/etc/passwd')", "lo_from_bytea(0, 'x')", "lo_unlink(1)"]
)
def test_large_objects(warm: Clinic, call: str) -> None:
    warm.refuse(f"SELECT {call}", "function lo_")


@pytest.mark.parametrize(
    "setting", ["transaction_read_only', 'off", "statement_timeout', '0", "role', 'owner", "application_name', 'x"]
)
def test_set_config(warm: Clinic, setting: str) -> None:
    warm.refuse(f"SELECT set_config('{setting}', false)", "function set_config")


@pytest.mark.parametrize(
    "call", ["query_to_xml('SELECT pg_sleep(60)', true, true, '')", "ts_stat('SELECT ...')", "nextval('counter')"]
)
def test_functions_that_run_sql_or_change_state(warm: Clinic, call: str) -> None:
    warm.refuse(f"SELECT {call}", "is volatile")


@pytest.mark.parametrize(
    "call",
    [
        "pg_terminate_backend(1)",
        "pg_cancel_backend(1)",
        "pg_advisory_lock(1)",
        "pg_notify('a', 'b')",
        "pg_logical_emit_message(false, 'a', 'b')",
        "pg_export_snapshot()",
    ],
)
def test_functions_whose_effect_outlives_a_rollback(warm: Clinic, call: str) -> None:
    warm.refuse(f"SELECT {call}", "is volatile")


def test_a_function_with_its_owners_rights(warm: Clinic) -> None:
    warm.refuse("SELECT spy()", "function spy")


def test_a_function_of_the_site_that_writes(warm: Clinic) -> None:
    warm.refuse("SELECT meddle()", "function meddle")


@pytest.mark.parametrize(
    "sql",
    [
        "SET ROLE owner",
        "RESET ROLE",
        "SET SESSION AUTHORIZATION owner",
        "SET transaction_read_only = off",
        "BEGIN",
        "COMMIT",
    ],
)
def test_session_commands(warm: Clinic, sql: str) -> None:
    warm.refuse(sql, "only one SELECT")


@pytest.mark.parametrize(
    "sql", ["SELECT 1; SELECT 2", "SELECT 1; DROP TABLE patient", "SELECT 1; COMMIT; DELETE FROM patient"]
)
def test_two_statements(warm: Clinic, sql: str) -> None:
    warm.refuse(sql, "more than one statement")


def test_do_block(warm: Clinic) -> None:
    warm.refuse("DO $$ BEGIN DELETE FROM patient; END $$", "only one SELECT")


@pytest.mark.parametrize(
    "sql",
    [
        "WITH d AS (DELETE FROM patient RETURNING *) SELECT * FROM d",
        "SELECT * INTO loot FROM patient",
        "SELECT * FROM patient FOR UPDATE",
    ],
)
def test_writes_within_a_select(warm: Clinic, sql: str) -> None:
    warm.refuse(sql, "only reading")


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO patient (id) VALUES (3)",
        "CREATE TEMP TABLE loot AS SELECT 1",
        "EXPLAIN ANALYZE SELECT 1",
        "LISTEN x",
        "TABLE patient",
    ],
)
def test_anything_but_a_select(warm: Clinic, sql: str) -> None:
    warm.refuse(sql, "only one SELECT")


def test_dblink_is_absent(warm: Clinic) -> None:
    with pytest.raises(QueryFailed, match="function dblink"):
        warm.box.run("SELECT * FROM dblink('dbname=postgres', 'DELETE FROM patient') AS t (x TEXT)")
    warm.require_unharmed()


@pytest.mark.parametrize("table", ["secret", "pg_authid"])
def test_a_table_that_was_not_granted(warm: Clinic, table: str) -> None:
    warm.refuse(f"SELECT * FROM {table}", "permission denied")


def test_generate_series_bomb_in_rows(warm: Clinic) -> None:
    warm.refuse("SELECT * FROM generate_series(1, 1001)", "limit rows")
    assert len(warm.box.run("SELECT * FROM generate_series(1, 1000)").rows) == 1000


def test_generate_series_bomb_in_time(warm: Clinic) -> None:
    warm.refuse("SELECT count(*) FROM generate_series(1, 100000000000)", "limit seconds")


def test_a_result_of_few_wide_rows(warm: Clinic) -> None:
    warm.refuse("SELECT repeat('x', 200000) FROM generate_series(1, 6)", "limit result_bytes")


def test_a_value_that_fills_the_workers_memory(warm: Clinic) -> None:
    warm.refuse(
        "SELECT repeat('x', 200000000)", "limit (memory_bytes|seconds|result_bytes)|more than the server allows"
    )


def test_deep_nesting(warm: Clinic, target: PostgresqlTarget) -> None:
    with Sandbox(target, replace(LIMITS, seconds=60)) as patient:  # on a busy machine a second is soon over
        replace(warm, box=patient).refuse(f"SELECT {'(' * 20000}1{')' * 20000}", "nested too deeply")


def test_an_external_xml_entity_is_not_read(warm: Clinic) -> None:
    document = '<!DOCTYPE a [<!ENTITY e SYSTEM "file:///etc/passwd">]><a>&e;</a>'
    with contextlib.suppress(QueryFailed):  # a server built without libxml
        assert "root:" not in str(warm.box.run(f"SELECT xpath('/a/text()', xmlparse(document '{document}'))").rows)
    warm.require_unharmed()


# The database's own walls: the first look and the look at function names taken away


@pytest.fixture
def bare(target: PostgresqlTarget, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresqlSession]:
    def anything(sql: str, *, dialect: str) -> Statement:
        return Statement(sql, ordered=False)

    monkeypatch.setattr(postgresql_session, "one_select", anything)
    monkeypatch.setattr(PostgresqlSession, "_refuse_unsafe_functions", lambda self, text: None)
    session = PostgresqlSession(target, LIMITS, session_name="bare")
    yield session
    session._connection.close()


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO patient (id) VALUES (3)",
        "SELECT 1; COMMIT; DELETE FROM patient",
        "SELECT 1; SELECT 2",
        "WITH d AS (DELETE FROM patient RETURNING *) SELECT * FROM d",
        "SELECT * INTO loot FROM patient",
        "SELECT * INTO TEMP loot FROM patient",
        "SELECT * FROM patient FOR UPDATE",
        "COPY patient TO PROGRAM 'id'",
        "DO $$ BEGIN PERFORM 1; END $$",
        "SET ROLE owner",
        "SELECT pg_read_file('/etc/passwd')",
        "SELECT lo_export(1, '/tmp/loot')",
        "SELECT set_config('transaction_read_only', 'off', false)",
        "SELECT set_config('role', 'owner', false)",
        "SELECT nextval('counter')",
        "SELECT meddle()",
        "SELECT pg_sleep(60)",
    ],
)
def test_the_database_alone_stops(bare: PostgresqlSession, warm: Clinic, sql: str) -> None:
    with pytest.raises((UnsafeSql, QueryFailed)):
        bare.run(sql)
    warm.require_unharmed()
    assert bare.run("SELECT count(*) FROM patient").rows == ((2,),)


def test_nothing_of_a_statement_outlives_it(bare: PostgresqlSession, server: PostgresqlServer) -> None:
    bare.run(
        "SELECT set_config('statement_timeout', '0', false), set_config('search_path', 'loot', false), "
        "pg_advisory_lock(7)"
    )
    bare.run("SELECT lo_from_bytea(0, 'x')")
    with pytest.raises(UnsafeSql, match="limit seconds"):
        bare.run("SELECT pg_sleep(60) FROM patient")
    assert server.rows("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(0,)]
    assert server.rows("SELECT count(*) FROM pg_largeobject_metadata") == [(0,)]


# The role is checked before any statement


@pytest.mark.parametrize(
    ("commands", "reason"),
    [
        (("ALTER ROLE mighty SUPERUSER",), "SUPERUSER"),
        (("ALTER ROLE mighty CREATEROLE",), "CREATEROLE"),
        (("ALTER ROLE mighty CREATEDB",), "CREATEDB"),
        (("ALTER ROLE mighty BYPASSRLS",), "BYPASSRLS"),
        (("ALTER ROLE mighty REPLICATION",), "REPLICATION"),
        (("GRANT pg_read_server_files TO mighty",), "pg_read_server_files"),
        (("GRANT pg_write_server_files TO mighty",), "pg_write_server_files"),
        (("GRANT pg_execute_server_program TO mighty",), "pg_execute_server_program"),
        (("GRANT owner TO mighty",), "SUPERUSER.*owner"),
        (("GRANT INSERT ON patient TO mighty",), "may write to patient"),
        (("GRANT UPDATE (name) ON patient TO mighty",), "may write to patient"),
        (("GRANT TRUNCATE ON patient TO mighty",), "may write to patient"),
        (
            (
                "ALTER ROLE mighty NOINHERIT",
                "CREATE ROLE clerks",
                "GRANT DELETE ON patient TO clerks",
                "GRANT clerks TO mighty",
            ),
            "may write to patient",
        ),
        (("CREATE TABLE own (x INTEGER)", "ALTER TABLE own OWNER TO mighty"), "may write to own"),
        (("GRANT DELETE ON patient TO PUBLIC",), "may write to patient"),
    ],
)
def test_a_role_that_may_do_more_than_read_is_refused(
    server: PostgresqlServer, commands: tuple[str, ...], reason: str
) -> None:
    server.execute("CREATE ROLE mighty LOGIN", "GRANT SELECT ON patient TO mighty")
    try:
        server.execute(*commands)
        with pytest.raises(DataError, match=rf"{reason}.*make a role that only reads"):
            run_select(parse_database(server.url(user="mighty")), "SELECT 1", LIMITS)
    finally:
        server.execute("REVOKE DELETE ON patient FROM PUBLIC", "DROP OWNED BY mighty", "DROP ROLE mighty")
        if any("clerks" in command for command in commands):
            server.execute("DROP OWNED BY clerks", "DROP ROLE clerks")


def test_the_superuser_is_refused(server: PostgresqlServer) -> None:
    with pytest.raises(DataError, match="SUPERUSER"):
        run_select(parse_database(server.url(user="owner")), "SELECT 1", LIMITS)


def test_a_role_that_reads_everything_is_accepted(server: PostgresqlServer) -> None:
    server.execute("CREATE ROLE librarian LOGIN", "GRANT pg_read_all_data TO librarian")
    assert run_select(parse_database(server.url(user="librarian")), "SELECT word FROM secret", LIMITS).rows == (
        ("abracadabra",),
    )


# A worker that was taken over


def test_a_worker_that_was_taken_over_has_its_connection_and_nothing_else(
    server: PostgresqlServer, target: PostgresqlTarget
) -> None:
    with taken_worker.taken_over(target, LIMITS) as box:
        for attack, argument in (
            ("read", "/etc/passwd"),
            ("connect", server.folder / ".s.PGSQL.5432"),
            ("list", server.folder),
            *((attack, "") for attack in taken_worker.WITHOUT_A_FILE),
        ):
            assert taken_worker.outcome(box, attack, argument) in taken_worker.DENIED, attack


# Connections


def test_an_unreachable_server_is_named_without_its_password(tmp_path: Path) -> None:
    target = parse_database(f"postgresql://reader:s3cret@/clinic?host={tmp_path}")
    with pytest.raises(DataError, match="postgresql:///clinic cannot be reached") as caught:
        run_select(target, "SELECT 1", LIMITS)
    assert "s3cret" not in str(caught.value)


def backends(server: PostgresqlServer, state: str) -> int:
    (row,) = server.rows(f"SELECT count(*) FROM pg_stat_activity WHERE usename = 'reader' AND state = '{state}'")
    return int(str(row[0]))


def wait_until(server: PostgresqlServer, state: str, count: int) -> None:
    with psycopg.connect(server.url(user="owner"), autocommit=True) as connection:
        for _ in range(200):
            if backends(server, state) == count:
                return
            connection.execute("SELECT pg_sleep(0.05)")
    raise AssertionError(f"{backends(server, state)} backends in state {state}, expected {count}")


def test_a_connection_that_the_server_closed_is_made_anew(server: PostgresqlServer, target: PostgresqlTarget) -> None:
    with Sandbox(target, LIMITS) as box:
        assert box.run("SELECT 1").rows == ((1,),)
        server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'reader' AND application_name <> ''"
        )
        assert box.run("SELECT 2").rows == ((2,),)


def test_a_statement_that_a_killed_worker_left_running_is_ended(
    server: PostgresqlServer, target: PostgresqlTarget
) -> None:
    idle = backends(server, "active")
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            box.run("SELECT count(*) FROM generate_series(1, 100000000000)")
        except UnsafeSql as error:
            caught.append(error)

    with Sandbox(target, Limits(seconds=60)) as box:
        assert box._process is not None
        worker = box._process.pid
        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(server, "active", idle + 1)
        os.kill(worker, signal.SIGKILL)
        thread.join()
    assert "process ended" in str(caught[0])
    wait_until(server, "active", idle)
