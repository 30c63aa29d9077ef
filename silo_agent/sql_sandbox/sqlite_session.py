"""A statement against an SQLite file, opened anew for each: read-only, with an authorizer, limits and a deadline.

Order: open (mode=ro), quiet PRAGMAs, limits, then the authorizer, which from there on lets nothing but reading through.
"""

import contextlib
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path

from lorica_security.errors import DataError, UnsafeSql
from silo_agent.sql_sandbox.results import Limits, QueryFailed, RowCollector, Rows, Stale
from silo_agent.sql_sandbox.statement import SQL_BYTES, one_select
from silo_agent.sql_sandbox.target import FileIdentity, SqliteTarget

# FTS5 asks for the former, FTS3 and FTS4 for the latter; neither takes an argument here.
_HARMLESS_PRAGMAS = frozenset({"data_version", "page_size"})
# Functions that load code, reach files or run SQL of their own; and those of common builds of the shell.
_FORBIDDEN_FUNCTIONS = frozenset(
    {
        "load_extension",
        "fts3_tokenizer",
        "sqlite_log",
        "rtreecheck",
        "optimize",
        "eval",
        "edit",
        "readfile",
        "writefile",
    }
)
# Virtual tables that show raw pages, statements or files instead of the database's own tables.
_FORBIDDEN_TABLES = frozenset(
    {
        "sqlite_dbpage",
        "sqlite_dbdata",
        "sqlite_dbptr",
        "sqlite_stmt",
        "dbstat",
        "bytecode",
        "tables_used",
        "fsdir",
        "zipfile",
    }
)
_DIRECT_ONLY = 0x80000  # SQLITE_DIRECTONLY, as PRAGMA function_list shows it
_PROGRESS_STEPS = 1000
_BATCH = 200
# Bytes 18 and 19 of the file: 2 is WAL (SQLite file format, section 1.3.3).
_VERSIONS = slice(18, 20)

_CLOSE_IT = "open and close it once with its own application, or point the silo at a copy made with VACUUM INTO"


class SqliteSession:
    """Runs statements against one SQLite file."""

    def __init__(self, target: SqliteTarget, limits: Limits, reach: Mapping[Path, FileIdentity]) -> None:
        """`reach`: the files that can be opened. Raises DataError where the database is missing, none, or not
        readable."""
        self._target = target
        self._limits = limits
        self._reach = reach
        connection, _ = self._open(time.monotonic() + limits.seconds)
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error as error:
            raise self._translated(error) from error
        finally:
            connection.close()

    def run(self, sql: str) -> Rows:
        """The complete result of `sql`; raises UnsafeSql, QueryFailed, DataError."""
        deadline = time.monotonic() + self._limits.seconds
        statement = one_select(sql, dialect="sqlite")
        connection, authorizer = self._open(deadline)
        try:
            cursor = connection.execute(statement.text)
            collector = RowCollector(self._limits)
            while batch := cursor.fetchmany(_BATCH):
                collector.add(batch)
            columns = tuple(str(entry[0]) for entry in cursor.description or ())
        except (sqlite3.Error, sqlite3.Warning) as error:
            # SQLite reports some denials as plain errors, so the authorizer itself is asked.
            if authorizer.denied is not None:
                raise UnsafeSql(f"SQL refused by the database: {authorizer.denied} is not allowed") from error
            raise self._translated(error) from error
        finally:
            connection.close()
        return Rows(columns, tuple(collector.rows), statement.ordered)

    def prepare(self, sql: str) -> None:
        """Have SQLite compile `sql`, and run nothing of it; raises as `run` does.

        EXPLAIN compiles under the same authorizer, and its own program reads no table.
        """
        statement = one_select(sql, dialect="sqlite")
        connection, authorizer = self._open(time.monotonic() + self._limits.seconds)
        try:
            connection.execute(f"EXPLAIN {statement.text}").close()
        except (sqlite3.Error, sqlite3.Warning) as error:
            if authorizer.denied is not None:
                raise UnsafeSql(f"SQL refused by the database: {authorizer.denied} is not allowed") from error
            raise self._translated(error) from error
        finally:
            connection.close()

    def _open(self, deadline: float) -> "tuple[sqlite3.Connection, Authorizer]":
        try:
            return open_for_reading(self._target, self._limits, deadline=deadline)
        except PermissionError as error:
            raise self._unreachable(str(error.strerror)) from error
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def _unreachable(self, reason: str) -> DataError:
        """Stale where files came or went since this process entered its jail, whose walls do not move."""
        kind = DataError if self._target.files() == self._reach else Stale
        return kind(
            f"database {self._target.path} cannot be opened for reading only ({reason}), perhaps after a crash of "
            f"its writer: {_CLOSE_IT}"
        )

    def _translated(self, error: sqlite3.Error | sqlite3.Warning) -> Exception:
        """`error` as one of ours; by SQLite's primary result code, which is the low byte of the extended one."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        line = " ".join(str(error).split())[:300]
        if code == sqlite3.SQLITE_INTERRUPT:
            return UnsafeSql(f"SQL stopped: it ran longer than {self._limits.seconds} s (limit seconds)")
        if code == sqlite3.SQLITE_NOMEM:
            return UnsafeSql(
                f"SQL stopped: it needs more than {self._limits.memory_bytes} bytes of memory (limit memory_bytes)"
            )
        if code == sqlite3.SQLITE_TOOBIG:
            return UnsafeSql(f"SQL stopped: a value exceeds {self._limits.result_bytes} bytes (limit result_bytes)")
        if code == sqlite3.SQLITE_AUTH or "one statement at a time" in line:
            return UnsafeSql(f"SQL refused by the database: {line}")
        path = self._target.path
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PROTOCOL):
            return self._unreachable(line)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return DataError(f"database {path} is locked by a writer ({line}): try again when it has finished")
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return DataError(f"database {path} is damaged or no SQLite database ({line}): restore it")
        return QueryFailed(f"SQL failed: {line}")


class Authorizer:
    """SQLite asks it at each step of preparing a statement; `denied` is the first thing that it forbade."""

    def __init__(self, functions: frozenset[str]) -> None:
        self._functions = functions
        self.denied: str | None = None

    def __call__(
        self, action: int, first: str | None, second: str | None, _database: str | None, _source: str | None
    ) -> int:
        forbidden: str | None = None
        if action == sqlite3.SQLITE_READ:
            table = (first or "").lower()
            forbidden = f"reading {table}" if table in _FORBIDDEN_TABLES or table.startswith("pragma_") else None
        elif action == sqlite3.SQLITE_FUNCTION:
            forbidden = f"function {second}" if (second or "").lower() in self._functions else None
        elif action == sqlite3.SQLITE_PRAGMA and first in _HARMLESS_PRAGMAS and second is None:
            pass
        elif action not in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE):
            forbidden = f"action {action} of SQLite's authorizer on {first}"
        if forbidden is None:
            return sqlite3.SQLITE_OK
        self.denied = self.denied or forbidden
        return sqlite3.SQLITE_DENY


def load_code(limits: Limits) -> None:
    """Run a statement on no file: what is imported, or set up, with the first statement is there afterwards."""
    statement = one_select("SELECT 1", dialect="sqlite")
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        _restrict(connection, limits, time.monotonic() + limits.seconds)
        connection.execute(statement.text).fetchall()


def open_for_reading(target: SqliteTarget, limits: Limits, *, deadline: float) -> tuple[sqlite3.Connection, Authorizer]:
    """A connection that can read and nothing else, until `deadline` (time.monotonic); raises DataError,
    PermissionError, sqlite3.Error."""
    if not target.path.is_file():
        raise DataError(f"database {target.path} is not a file: give the path of an SQLite database")
    connection = sqlite3.connect(
        target.uri(**open_parameters(target)),
        uri=True,
        timeout=limits.seconds,
        isolation_level=None,
        cached_statements=0,
    )
    try:
        authorizer = _restrict(connection, limits, deadline)
    except sqlite3.Error:
        connection.close()
        raise
    return connection, authorizer


def open_parameters(target: SqliteTarget) -> dict[str, str]:
    """How to open without writing a byte beside the file either: a WAL database otherwise gets a -shm file.

    No or an empty -wal file means that nobody has written since the last checkpoint, so the file alone is the whole
    database.
    """
    try:
        with target.path.open("rb") as file:
            write_ahead = file.read(_VERSIONS.stop)[_VERSIONS] == b"\x02\x02"
    except PermissionError:
        raise
    except OSError as error:
        raise DataError(f"database {target.path} cannot be read: {error.strerror}") from error
    if not write_ahead:
        return {"mode": "ro"}
    wal = target.beside("-wal")
    if wal.is_file() and wal.stat().st_size:
        return {"mode": "ro", "readonly_shm": "1"}
    return {"mode": "ro", "immutable": "1"}


def _restrict(connection: sqlite3.Connection, limits: Limits, deadline: float) -> Authorizer:
    connection.text_factory = _text
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute("PRAGMA mmap_size = 0")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute(f"PRAGMA hard_heap_limit = {limits.memory_bytes // 2}")
    marked = {
        str(name).lower()
        for name, flags in connection.execute("SELECT name, flags FROM pragma_function_list")
        if int(flags) & _DIRECT_ONLY
    }
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(limits.result_bytes, SQL_BYTES))
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, SQL_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000)
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _PROGRESS_STEPS)
    _connect_virtual_tables(connection)
    authorizer = Authorizer(_FORBIDDEN_FUNCTIONS | marked)
    connection.set_authorizer(authorizer)
    return authorizer


def _connect_virtual_tables(connection: sqlite3.Connection) -> None:
    """Virtual tables declare themselves by what looks to an authorizer like writing, so they do it before there is
    one."""
    names = [
        row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE sql LIKE 'CREATE VIRTUAL TABLE%'")
    ]
    for name in ("json_each", "json_tree", *names):
        quoted = '"' + str(name).replace('"', '""') + '"'
        # One whose module this build of SQLite lacks stays out of reach.
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute(f"PRAGMA table_info({quoted})").fetchall()


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")
