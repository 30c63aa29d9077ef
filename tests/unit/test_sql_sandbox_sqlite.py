"""SQL that a model wrote, against SQLite: each attack by name, and after each the file's bytes and an honest
question."""

import hashlib
import os
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lorica_security.errors import ConfigurationError, DataError, UnsafeSql
from silo_agent.sql_sandbox import (
    Limits,
    QueryFailed,
    ResultKind,
    Rows,
    Sandbox,
    SqliteTarget,
    parse_database,
    run_select,
)
from silo_agent.sql_sandbox.sqlite_session import open_for_reading

LIMITS = Limits(seconds=1, rows=1000, result_bytes=2**20, memory_bytes=64 * 2**20)
ENDLESS = "WITH RECURSIVE x(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x)"


def make_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE patient (id INTEGER PRIMARY KEY, name TEXT, age REAL, picture BLOB);
        INSERT INTO patient VALUES (1, 'Ada', 36.5, x'00ff'), (2, 'Bo', NULL, NULL), (3, 'Cy', 9, x'');
        CREATE VIEW adult AS SELECT name FROM patient WHERE age >= 18;
        CREATE VIRTUAL TABLE note USING fts5(body);
        INSERT INTO note VALUES ('a cough');
        """
    )
    connection.close()


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@dataclass(frozen=True)
class Clinic:
    """A database in a folder of its own, and a warm sandbox on it."""

    path: Path
    box: Sandbox
    before: dict[str, str]

    def refuse(self, sql: str, reason: str) -> None:
        """`sql` is refused for `reason`, and has done nothing."""
        with pytest.raises(UnsafeSql, match=reason):
            self.box.run(sql)
        self.require_unharmed()

    def require_unharmed(self) -> None:
        assert contents(self.path.parent) == self.before
        assert self.box.run("SELECT name FROM patient WHERE id = 2").rows == (("Bo",),)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clinic]:
    folder = tmp_path_factory.mktemp("clinic")
    path = folder / "cli?nic #1 %20.db"
    make_database(path)
    with Sandbox(SqliteTarget(path), LIMITS) as box:
        yield Clinic(path, box, contents(folder))


@pytest.fixture
def patient(warm: Clinic) -> Iterator[Clinic]:
    """One whose limit of seconds is never met first, however busy the machine is."""
    with Sandbox(SqliteTarget(warm.path), replace(LIMITS, seconds=60)) as box:
        yield replace(warm, box=box)


# Honest statements


def test_a_select_gives_columns_and_canonical_values(warm: Clinic) -> None:
    rows = warm.box.run("SELECT id, name AS who, age, picture FROM patient ORDER BY id ;")
    assert rows == Rows(
        ("id", "who", "age", "picture"),
        ((1, "Ada", 36.5, "\\x00ff"), (2, "Bo", None, None), (3, "Cy", 9.0, "\\x")),
        ordered=True,
    )


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("WITH old AS (SELECT * FROM patient WHERE age > 30) SELECT name FROM old", (("Ada",),)),
        ("SELECT name FROM adult", (("Ada",),)),
        ("SELECT body FROM note WHERE note MATCH 'cough'", (("a cough",),)),
        ("SELECT sum(value) FROM json_each('[1, 2, 3]')", ((6,),)),
        ('SELECT name FROM patient WHERE name = "Ada"', (("Ada",),)),  # GeoQuery's gold SQL quotes values like that
        ("SELECT id FROM patient WHERE id < 2 UNION SELECT id FROM patient WHERE id > 2", ((1,), (3,))),
        ("SELECT 'a;b' ; ;", (("a;b",),)),
        ("SELECT 9e999, -9e999, 0.5", (("Infinity", "-Infinity", 0.5),)),
        ("SELECT CAST(x'61ff' AS TEXT)", (("a\\xff",),)),
    ],
)
def test_honest_statements_run(warm: Clinic, sql: str, expected: tuple[object, ...]) -> None:
    assert warm.box.run(sql).rows == expected


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT name FROM patient", False),
        ("SELECT name FROM patient ORDER BY name", True),
        ("SELECT name FROM (SELECT name FROM patient ORDER BY name)", False),
        ("SELECT row_number() OVER (ORDER BY name) FROM patient", False),
        ("WITH x AS (SELECT name FROM patient ORDER BY 1) SELECT * FROM x ORDER BY name LIMIT 2", True),
        ("SELECT 'ORDER BY' FROM patient", False),
    ],
)
def test_order_is_that_of_the_top_level_alone(warm: Clinic, sql: str, ordered: bool) -> None:
    assert warm.box.run(sql).ordered is ordered


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("SELECT name FROM patient WHERE id > 9", ResultKind.EMPTY),
        ("SELECT max(id) FROM patient WHERE id > 9", ResultKind.NULL_OR_ZERO),
        ("SELECT count(*) FROM patient WHERE id > 9", ResultKind.NULL_OR_ZERO),
        ("SELECT count(*) FROM patient", ResultKind.ROWS),
        ("SELECT 0, 0", ResultKind.ROWS),
    ],
)
def test_results_that_say_little_are_told_apart(warm: Clinic, sql: str, kind: ResultKind) -> None:
    assert warm.box.run(sql).kind is kind


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT nope FROM patient",
        "SELECT FROM",
        "SELECT * FROM missing",
        "SELECT sum(9223372036854775807) FROM patient",
    ],
)
def test_a_statement_that_cannot_run_is_an_error_and_no_refusal(warm: Clinic, sql: str) -> None:
    with pytest.raises(QueryFailed, match="SQL failed"):
        warm.box.run(sql)


# Hostile statements, as a user would meet them


def test_attach_of_another_file(warm: Clinic) -> None:
    warm.refuse("ATTACH DATABASE '/tmp/other.db' AS other", "only one SELECT")


def test_load_extension(warm: Clinic) -> None:
    warm.refuse("SELECT load_extension('/tmp/evil.so')", "function load_extension is not allowed")


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO patient VALUES (4, 'Di', 1, NULL)",
        "UPDATE patient SET name = 'x'",
        "DELETE FROM patient",
        "DROP TABLE patient",
        "CREATE TABLE loot (x)",
        "CREATE TEMP TABLE loot AS SELECT * FROM patient",
        "REPLACE INTO patient VALUES (1, 'x', 1, NULL)",
        "ALTER TABLE patient RENAME TO x",
        "REINDEX",
        "ANALYZE",
        "VACUUM",
    ],
)
def test_writes(warm: Clinic, sql: str) -> None:
    warm.refuse(sql, "only one SELECT")


@pytest.mark.parametrize(
    "sql",
    [
        "WITH x AS (SELECT 1) DELETE FROM patient",
        "WITH x AS (SELECT 1) INSERT INTO patient SELECT 4, 'x', 1, NULL",
        "WITH x AS (SELECT 1) UPDATE patient SET name = 'x'",
    ],
)
def test_writes_behind_with(warm: Clinic, sql: str) -> None:
    warm.refuse(sql, "not one SELECT")


@pytest.mark.parametrize("sql", ["PRAGMA writable_schema = ON", "PRAGMA query_only = OFF", "PRAGMA journal_mode = WAL"])
def test_pragma(warm: Clinic, sql: str) -> None:
    warm.refuse(sql, "only one SELECT")


@pytest.mark.parametrize("sql", ["SELECT * FROM pragma_table_info('patient')", "SELECT * FROM pragma_database_list"])
def test_pragma_as_a_table(warm: Clinic, sql: str) -> None:
    warm.refuse(sql, "refused by the database")


def test_vacuum_into_another_file(warm: Clinic, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    warm.refuse(f"VACUUM INTO '{copy}'", "only one SELECT")
    assert not copy.exists()


@pytest.mark.parametrize(
    "sql", ["SELECT 1; SELECT 2", "SELECT 1; DROP TABLE patient", "SELECT 1;-- \nDELETE FROM patient"]
)
def test_two_statements(warm: Clinic, sql: str) -> None:
    warm.refuse(sql, "more than one statement")


@pytest.mark.parametrize(
    "sql", ["BEGIN", "SAVEPOINT x", "COMMIT", "EXPLAIN SELECT 1", "VALUES (1)", "", " ; ; ", "-- nothing"]
)
def test_anything_but_a_select(warm: Clinic, sql: str) -> None:
    warm.refuse(sql, "SQL refused")


def test_endless_recursion_that_returns_nothing(warm: Clinic) -> None:
    warm.refuse(f"{ENDLESS} SELECT count(*) FROM x", "limit seconds")


def test_endless_recursion_that_returns_rows(warm: Clinic) -> None:
    warm.refuse(f"{ENDLESS} SELECT n FROM x", "limit rows")


def test_a_result_of_too_many_rows(warm: Clinic) -> None:
    numbers = "json_each('[' || replace(hex(zeroblob(50)), '00', '1,') || '1]')"
    warm.refuse(f"SELECT a.value FROM {numbers} a, {numbers} b", "limit rows")


def test_a_result_of_exactly_the_row_limit_is_complete(warm: Clinic) -> None:
    assert len(warm.box.run(f"{ENDLESS} SELECT n FROM x LIMIT 1000").rows) == 1000
    warm.refuse(f"{ENDLESS} SELECT n FROM x LIMIT 1001", "limit rows")


def test_a_result_of_few_wide_rows(warm: Clinic) -> None:
    warm.refuse(f"{ENDLESS} SELECT hex(zeroblob(100000)) FROM x LIMIT 6", "limit result_bytes")


@pytest.mark.parametrize(
    "value",
    [
        "zeroblob(1000000000)",
        "randomblob(1000000000)",
        "hex(zeroblob(1000000))",
        "group_concat(hex(zeroblob(100000))) FROM json_each('[1,1,1,1,1,1]')",
    ],
)
def test_a_value_that_fills_memory(warm: Clinic, value: str) -> None:
    warm.refuse(f"SELECT {value}", "limit result_bytes")


def test_a_format_that_fills_memory(warm: Clinic) -> None:
    # SQLite notices the length only after it has written; which limit stops it first depends on the machine.
    warm.refuse("SELECT printf('%.*c', 1000000000, 'x')", "limit (seconds|memory_bytes|result_bytes)")


def test_a_string_that_doubles_for_ever(warm: Clinic) -> None:
    warm.refuse(
        "WITH RECURSIVE x(s) AS (SELECT 'a' UNION ALL SELECT s || s FROM x) SELECT max(length(s)) FROM x",
        "limit result_bytes",
    )


def test_a_sort_that_fills_memory(patient: Clinic) -> None:
    patient.refuse(f"{ENDLESS} SELECT randomblob(100000) FROM x ORDER BY 1 LIMIT 1000000", "limit memory_bytes")


def test_a_join_that_keeps_the_planner_busy(warm: Clinic) -> None:
    # No step of the virtual machine runs while SQLite plans, so only the parent's kill can end this one.
    joins = " ".join(f"JOIN patient p{i}" for i in range(61))
    warm.refuse(f"SELECT count(*) FROM patient p {joins}", "limit seconds")


@pytest.mark.parametrize(
    "sql", ["SELECT fts3_tokenizer('simple')", "SELECT fts3_tokenizer('simple', x'4141414141414141')"]
)
def test_fts3_tokenizer_pointer(warm: Clinic, sql: str) -> None:
    warm.refuse(sql, "function fts3_tokenizer is not allowed")


@pytest.mark.parametrize("table", ["dbstat", "sqlite_stmt"])
def test_virtual_tables_that_show_what_is_no_table(warm: Clinic, table: str) -> None:
    with pytest.raises((UnsafeSql, QueryFailed)):
        warm.box.run(f"SELECT * FROM {table}")
    warm.require_unharmed()


@pytest.mark.parametrize(
    "call", ["readfile('/etc/passwd')", "writefile('/tmp/loot', 'x')", "edit('x')", "eval('DROP TABLE patient')"]
)
def test_functions_of_the_shell(warm: Clinic, call: str) -> None:
    with pytest.raises((UnsafeSql, QueryFailed)):
        warm.box.run(f"SELECT {call}")
    warm.require_unharmed()


def test_another_file_by_uri(warm: Clinic) -> None:
    with pytest.raises(QueryFailed, match="no such table"):
        warm.box.run("SELECT * FROM 'file:/etc/passwd?mode=ro'.x")
    warm.require_unharmed()


@pytest.mark.parametrize(
    "expression",
    ["(" * 20_000 + "1" + ")" * 20_000, "NOT " * 20_000 + "1", "CASE WHEN 1 THEN " * 3000 + "1" + " END" * 3000],
)
def test_deep_nesting(patient: Clinic, expression: str) -> None:
    patient.refuse(f"SELECT {expression}", "nested too deeply")


def test_many_compound_terms(warm: Clinic) -> None:
    with pytest.raises((UnsafeSql, QueryFailed)):
        warm.box.run(" UNION ALL ".join(["SELECT 1"] * 5000))
    warm.require_unharmed()


@pytest.mark.parametrize("sql", ["SELECT 1\0; DROP TABLE patient", "SELECT '\ud800'", "SELECT \x1b[2J"])
def test_control_characters(warm: Clinic, sql: str) -> None:
    warm.refuse(sql, "control characters")


@pytest.mark.parametrize("length", [110_000, 160_000])
def test_a_statement_of_great_length(warm: Clinic, length: int) -> None:
    warm.refuse(f"SELECT '{'x' * length}'", "longer than")


# The database layer alone: what a statement meets that the first look misread


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO patient VALUES (4, 'Di', 1, NULL)",
        "UPDATE patient SET name = 'x'",
        "DELETE FROM patient",
        "DROP TABLE patient",
        "CREATE TABLE loot (x)",
        "CREATE TEMP TABLE loot (x)",
        "CREATE TRIGGER t AFTER INSERT ON patient BEGIN SELECT 1; END",
        "CREATE VIRTUAL TABLE v USING fts5(x)",
        "ATTACH ':memory:' AS m",
        "ATTACH 'file:/etc/passwd?mode=ro' AS m",
        "DETACH main",
        "PRAGMA writable_schema = ON",
        "PRAGMA query_only = OFF",
        "PRAGMA data_version = 3",
        "PRAGMA temp_store_directory = '/tmp'",
        "BEGIN IMMEDIATE",
        "SAVEPOINT s",
        "REINDEX",
        "ANALYZE",
        "SELECT load_extension('x')",
        "SELECT fts3_tokenizer('simple')",
    ],
)
def test_the_authorizer_alone_stops(warm: Clinic, sql: str) -> None:
    connection, authorizer = open_for_reading(SqliteTarget(warm.path), LIMITS, deadline=time.monotonic() + 5)
    try:
        with pytest.raises(sqlite3.DatabaseError):
            connection.execute(sql)
        assert authorizer.denied is not None
    finally:
        connection.close()
    warm.require_unharmed()


def test_the_database_alone_stops_vacuum_and_two_statements(warm: Clinic, tmp_path: Path) -> None:
    connection, _ = open_for_reading(SqliteTarget(warm.path), LIMITS, deadline=time.monotonic() + 5)
    try:
        with pytest.raises(sqlite3.Error):
            connection.execute(f"VACUUM INTO '{tmp_path / 'copy.db'}'")
        with pytest.raises((sqlite3.Error, sqlite3.Warning)):
            connection.execute("SELECT 1; DELETE FROM patient")
    finally:
        connection.close()
    assert not any(tmp_path.iterdir())
    warm.require_unharmed()


def test_the_read_only_handle_alone_stops_a_write_and_leaves_no_journal(warm: Clinic) -> None:
    connection, _ = open_for_reading(SqliteTarget(warm.path), LIMITS, deadline=time.monotonic() + 5)
    connection.set_authorizer(None)
    try:
        connection.execute("PRAGMA query_only = OFF")
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("DELETE FROM patient")
        assert contents(warm.path.parent) == warm.before
    finally:
        connection.close()
    warm.require_unharmed()


# Databases in a difficult state


def run_python(code: str) -> None:
    """Run `code` in a process that ends without closing anything."""
    assert (
        subprocess.run([sys.executable, "-c", f"import os, sqlite3\n{code}\nos._exit(7)"], check=False).returncode == 7
    )


def test_a_wal_database_is_read_without_a_file_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "wal.db"
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.executescript("CREATE TABLE t (a); INSERT INTO t VALUES (1);")
    with Sandbox(SqliteTarget(path), LIMITS) as box:
        assert box.run("SELECT * FROM t").rows == ((1,),)
        writer.executescript("INSERT INTO t VALUES (2);")
        assert box.run("SELECT * FROM t").rows == ((1,), (2,))
        writer.close()
        before = contents(tmp_path)
        assert list(before) == ["wal.db"]
        assert box.run("SELECT * FROM t").rows == ((1,), (2,))
        assert contents(tmp_path) == before


def test_a_wal_left_by_a_crash_is_read(tmp_path: Path) -> None:
    path = tmp_path / "wal.db"
    run_python(
        f"c = sqlite3.connect({str(path)!r}); c.execute('PRAGMA journal_mode=WAL'); c.executescript('CREATE TABLE t "
        "(a); INSERT INTO t VALUES (5)')"
    )
    before = contents(tmp_path)
    assert (tmp_path / "wal.db-wal").stat().st_size > 0
    assert run_select(SqliteTarget(path), "SELECT * FROM t", LIMITS).rows == ((5,),)
    assert contents(tmp_path) == before
    (tmp_path / "wal.db-shm").unlink()
    with pytest.raises(DataError, match="VACUUM INTO"):
        run_select(SqliteTarget(path), "SELECT * FROM t", LIMITS)
    assert sorted(contents(tmp_path)) == ["wal.db", "wal.db-wal"]


def test_a_hot_journal_is_reported_and_not_rolled_back(tmp_path: Path) -> None:
    path = tmp_path / "hot.db"
    run_python(
        f"c = sqlite3.connect({str(path)!r}); c.execute('CREATE TABLE t (a)')\n"
        "c.executemany('INSERT INTO t VALUES (?)', [('x' * 1000,)] * 500); c.commit()\n"
        "c.execute('PRAGMA cache_size = 1'); c.execute(\"UPDATE t SET a = a || 'y'\")"
    )
    before = contents(tmp_path)
    assert "hot.db-journal" in before
    with pytest.raises(DataError, match="cannot be opened for reading only"):
        run_select(SqliteTarget(path), "SELECT count(*) FROM t", LIMITS)
    assert contents(tmp_path) == before


def test_a_database_locked_by_a_writer_is_no_fault_of_the_statement(tmp_path: Path) -> None:
    path = tmp_path / "locked.db"
    make_database(path)
    with Sandbox(SqliteTarget(path), Limits(seconds=0.2)) as box:
        writer = sqlite3.connect(path, isolation_level=None)
        writer.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DataError, match="locked by a writer") as caught:
            box.run("SELECT count(*) FROM patient")
        assert not isinstance(caught.value, QueryFailed)
        writer.execute("ROLLBACK")
        writer.close()
        assert box.run("SELECT count(*) FROM patient").rows == ((3,),)


def test_an_index_of_a_log_that_never_settles_holds_a_statement_up_no_longer_than_its_limit(tmp_path: Path) -> None:
    """SQLite would try again for ten seconds, whatever its timeout: a reader takes the index for half written."""
    path = tmp_path / "wal.db"
    make_database(path)
    with path.open("r+b") as file:
        file.seek(18)
        file.write(b"\2\2")
    (tmp_path / "wal.db-wal").write_bytes(struct.pack(">8I", 0x377F0682, 3007000, 4096, 0, 1, 2, 3, 4))
    (tmp_path / "wal.db-shm").write_bytes(bytes(32768))
    with pytest.raises(DataError, match=r"was not opened within 0.1 s \(limit seconds\)"):
        run_select(SqliteTarget(path), "SELECT 1", replace(LIMITS, seconds=0.1))


def test_a_missing_file_is_named_and_not_created(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.db is not a file"):
        run_select(SqliteTarget(tmp_path / "nothing.db"), "SELECT 1", LIMITS)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_bytes(b"dear sir or madam, " * 100)
    with pytest.raises(DataError, match=r"letter\.txt is damaged or no SQLite database"):
        run_select(SqliteTarget(tmp_path / "letter.txt"), "SELECT 1", LIMITS)


# Limits and names


@pytest.mark.parametrize(
    "values",
    [
        {"seconds": 0},
        {"seconds": 1e9},
        {"seconds": float("nan")},
        {"rows": 0},
        {"result_bytes": 1},
        {"memory_bytes": 1},
    ],
)
def test_impossible_limits_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="is not within"):
        Limits(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("sqlite:////srv/clinic.db", Path("/srv/clinic.db")),
        ("/srv/clinic.db", Path("/srv/clinic.db")),
        ("sqlite:///data/clinic.db", Path(os.getcwd()) / "data/clinic.db"),
        ("clinic.db", Path(os.getcwd()) / "clinic.db"),
    ],
)
def test_sqlite_databases_are_named_by_url_or_path(text: str, path: Path) -> None:
    assert parse_database(text) == SqliteTarget(path)


@pytest.mark.parametrize("text", ["", "sqlite://", "sqlite:///", "sqlite://host/x.db", "mysql://u:secret@h/d", "a\0b"])
def test_other_databases_are_refused_without_their_password(text: str) -> None:
    with pytest.raises(ConfigurationError, match="database") as caught:
        parse_database(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u:se/cret@h/d",
        "postgresql://u:1/cret@h/d",
        "postgresql://u:1?cret@h/d",
        "postgresql://u:1#cret@h/d",
        "postgresql://u:se@cret@h/d",
        "postgresql://u:1?cret=@h/d",
        "postgresql://h/d?password=cret",
        "postgresql://u:cret@h",
        "postgresql://u:cret@[::1/d",
        "postgresql://u:cret@h:port/d",
    ],
)
def test_an_ambiguous_postgresql_url_is_refused_without_echo(text: str) -> None:
    with pytest.raises(ConfigurationError, match="PostgreSQL URL") as caught:
        parse_database(text)
    assert "cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_postgresql_target_shows_no_user_password_or_parameter() -> None:
    target = parse_database("postgresql+psycopg://anna:se%2Fcret@db.example:5433/clinic%20a?sslmode=require")
    assert target.shown == "postgresql://db.example:5433/clinic%20a"
    assert "cret" not in repr(target)
    assert "anna" not in repr(target)
