"""A statement against PostgreSQL, by a role that cannot write, in a read-only transaction that is always rolled back.

The role is checked once, before any statement. Then, for each: session reset, limits, BEGIN READ ONLY, DECLARE CURSOR
over the extended protocol (whose grammar admits exactly one SELECT), batches of rows, ROLLBACK.

Read-only is not enough: a SELECT may call functions whose effect no rollback undoes (signals, advisory locks, SQL given
as text, set_config on the limits themselves). PostgreSQL marks them volatile, so volatile and SECURITY DEFINER
functions are refused by name, whoever may execute them.
"""

import contextlib
import re
import time
from collections.abc import Callable

import psycopg
from psycopg import errors, sql
from psycopg.abc import Buffer
from psycopg.adapt import Loader

from lorica_security.errors import DataError, LoricaError, UnsafeSql
from silo_agent.sql_sandbox.results import Limits, QueryFailed, RowCollector, Rows, Stale
from silo_agent.sql_sandbox.statement import one_select
from silo_agent.sql_sandbox.target import PostgresqlTarget

_CONNECT_SECONDS = 10
_BATCH = 200
# Shutdown, crash, start-up, dropped database; too many connections.
_UNAVAILABLE = {"57P01", "57P02", "57P03", "57P04", "53300", "53400"}
_NO_MEMORY = ("out of memory", "results from command")
"""How libpq's own lack of memory reads, within this process's limit: its word for it, and the row that came with it as
a second result."""
_KEPT_TYPES = {"bool", "int2", "int4", "int8", "oid", "float4", "float8", "numeric"}
_HARMLESS = ("random", "random_normal", "gen_random_uuid", "clock_timestamp", "timeofday")

# U&"..." spells an identifier in escapes, past any look at names.
_UNICODE_ESCAPES = re.compile(r"\bU&[\"']", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d][\w$]*")
_CALLED_WORD = re.compile(r"([^\W\d][\w$]*)\"?\s*\(")

_POWERS = """
SELECT r.rolname, CASE WHEN r.rolsuper THEN 'SUPERUSER' WHEN r.rolcreaterole THEN 'CREATEROLE'
    WHEN r.rolcreatedb THEN 'CREATEDB' WHEN r.rolreplication THEN 'REPLICATION'
    WHEN r.rolbypassrls THEN 'BYPASSRLS' ELSE 'a predefined role' END
FROM pg_catalog.pg_roles r
WHERE pg_catalog.pg_has_role(session_user, r.oid, 'MEMBER')
  AND (r.rolsuper OR r.rolcreaterole OR r.rolcreatedb OR r.rolreplication OR r.rolbypassrls
       OR (r.rolname ~ '^pg_' AND r.rolname <> 'pg_read_all_data'))
ORDER BY (r.rolname = session_user) DESC, r.rolname LIMIT 1
"""
_WRITABLE = """
SELECT c.oid::pg_catalog.regclass::pg_catalog.text
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    CROSS JOIN pg_catalog.pg_roles r
WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
  AND pg_catalog.pg_has_role(session_user, r.oid, 'MEMBER')
  AND (pg_catalog.has_table_privilege(r.oid, c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
       OR pg_catalog.has_any_column_privilege(r.oid, c.oid, 'INSERT, UPDATE, REFERENCES'))
ORDER BY 1 LIMIT 1
"""
_UNSAFE_FUNCTIONS = (
    "SELECT DISTINCT pg_catalog.lower(proname) FROM pg_catalog.pg_proc WHERE provolatile = 'v' OR prosecdef"
)
# A worker that was killed leaves its statement running in the server until it next writes to the socket.
_END_ABANDONED = """
SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity
WHERE usename = session_user AND application_name = %s AND pid <> pg_catalog.pg_backend_pid()
"""
_REMEDY = (
    "make a role that only reads (CREATE ROLE lorica_reader LOGIN PASSWORD '...'; GRANT USAGE ON SCHEMA public TO "
    "lorica_reader; GRANT SELECT ON ALL TABLES IN SCHEMA public TO lorica_reader) and use it in the URL"
)


class PostgresqlSession:
    """Runs statements over one connection; one that the server has closed is for another worker to make anew."""

    def __init__(self, target: PostgresqlTarget, limits: Limits, *, session_name: str) -> None:
        """Connects; raises DataError where that fails or the role may do more than read.

        `session_name` becomes application_name; another connection of the same name is a killed predecessor and is
        ended.
        """
        self._target = target
        self._limits = limits
        self._session_name = session_name
        self._connection = self._connect()

    def run(self, text: str) -> Rows:
        """The complete result of `text`; raises UnsafeSql, QueryFailed, DataError."""
        return self._worked(text, self._fetch)

    def prepare(self, text: str) -> None:
        """Have the server plan `text`, and run nothing of it; raises as `run` does."""
        self._worked(text, self._declare)

    def _worked(self, text: str, work: Callable[[str, float], tuple[RowCollector, tuple[str, ...]]]) -> Rows:
        deadline = time.monotonic() + self._limits.seconds
        statement = one_select(text, dialect="postgres")
        try:
            self._reset()
            self._refuse_unsafe_functions(statement.text)
            try:
                self._begin()
                collector, columns = work(statement.text, deadline)
            finally:
                self._end()
        except psycopg.Error as error:
            raise self._translated(error) from error
        return Rows(columns, tuple(collector.rows), statement.ordered)

    def _declare(self, text: str, deadline: float) -> tuple[RowCollector, tuple[str, ...]]:
        """A cursor, from which nothing is fetched: the server parses and plans its statement."""
        with self._connection.cursor(name="lorica", scrollable=False) as cursor:
            self._set_time_left(deadline)
            cursor.execute(text.encode())
            return RowCollector(self._limits), tuple(column.name for column in cursor.description or ())

    def _fetch(self, text: str, deadline: float) -> tuple[RowCollector, tuple[str, ...]]:
        collector = RowCollector(self._limits)
        with self._connection.cursor(name="lorica", scrollable=False) as cursor:
            self._set_time_left(deadline)
            cursor.execute(text.encode())
            columns = tuple(column.name for column in cursor.description or ())
            while True:
                self._set_time_left(deadline)
                batch = cursor.fetchmany(_BATCH)
                collector.add(batch)
                if len(batch) < _BATCH:
                    return collector, columns

    def _connect(self) -> "psycopg.Connection[tuple[object, ...]]":
        try:
            connection = psycopg.connect(
                self._target.url,
                autocommit=True,
                prepare_threshold=None,
                connect_timeout=_CONNECT_SECONDS,
                client_encoding="UTF8",
                application_name=self._session_name,
            )
        except psycopg.Error as error:
            reason = self._target.redact(str(error))[:300]
            raise DataError(f"database {self._target.shown} cannot be reached: {reason}") from None
        try:
            self._prepare(connection)
        except (psycopg.Error, LoricaError):
            connection.close()
            raise
        return connection

    def _prepare(self, connection: "psycopg.Connection[tuple[object, ...]]") -> None:
        for kind in connection.adapters.types:
            if kind.name not in _KEPT_TYPES:
                connection.adapters.register_loader(kind.oid, _AsText)
            if kind.array_oid:
                connection.adapters.register_loader(kind.array_oid, _AsText)
        if (power := connection.execute(_POWERS).fetchone()) is not None:
            raise DataError(
                f"database {self._target.shown} refused: its role has or may take {power[1]} ({power[0]}): {_REMEDY}"
            )
        if (table := connection.execute(_WRITABLE).fetchone()) is not None:
            raise DataError(f"database {self._target.shown} refused: its role may write to {table[0]}: {_REMEDY}")
        connection.execute(_END_ABANDONED, (self._session_name,))

    def _reset(self) -> None:
        """End what the last statement left (advisory locks, settings); Stale where the server closed the connection."""
        if not self._connection.closed:
            try:
                self._connection.execute("DISCARD ALL")
                return
            except psycopg.OperationalError:
                self._connection.close()
        raise Stale(f"database {self._target.shown} is not available: the server closed the connection")

    def _begin(self) -> None:
        milliseconds = max(1, int(self._limits.seconds * 1000))
        settings = {
            "statement_timeout": str(milliseconds),
            "lock_timeout": str(milliseconds),
            "idle_in_transaction_session_timeout": str(milliseconds + 5000),
            "default_transaction_read_only": "on",
            "cursor_tuple_fraction": "1.0",
            "max_parallel_workers_per_gather": "0",
            "jit": "off",
            "datestyle": "ISO, YMD",
            "intervalstyle": "iso_8601",
            "timezone": "UTC",
            "extra_float_digits": "1",
            "bytea_output": "hex",
        }
        if self._connection.info.server_version >= 140000:
            settings["client_connection_check_interval"] = "1000"
        commands = [
            sql.SQL("SET {} = {}").format(sql.Identifier(name), sql.Literal(value)) for name, value in settings.items()
        ]
        self._connection.execute(
            sql.SQL("; ").join([*commands, sql.SQL("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")])
        )

    def _end(self) -> None:
        """Roll back; a connection that cannot is closed, and the next statement needs another worker."""
        try:
            self._connection.execute("ROLLBACK")
        except psycopg.Error:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()

    def _set_time_left(self, deadline: float) -> None:
        left = int((deadline - time.monotonic()) * 1000)
        if left <= 0:
            raise self._too_slow()
        self._connection.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(sql.Literal(str(left))))

    def _refuse_unsafe_functions(self, text: str) -> None:
        """Raise UnsafeSql where `text` calls, or might call, a function whose effects a rollback does not undo."""
        if _UNICODE_ESCAPES.search(text):
            raise UnsafeSql("SQL refused: it holds Unicode escapes (U&)")
        # Between a name and its bracket a comment may stand: then every word is a suspect, strings included.
        pattern = _WORD if "/*" in text or "--" in text else _CALLED_WORD
        suspects = {word.lower() for word in pattern.findall(text)}
        unsafe = {str(row[0]) for row in self._connection.execute(_UNSAFE_FUNCTIONS)}
        if found := sorted(suspects & unsafe - set(_HARMLESS)):
            raise UnsafeSql(f"SQL refused: function {found[0]} is volatile or runs with another role's rights")

    def _too_slow(self) -> UnsafeSql:
        return UnsafeSql(f"SQL stopped: it ran longer than {self._limits.seconds} s (limit seconds)")

    def _translated(self, error: psycopg.Error) -> LoricaError:
        # The primary message alone: the rest quotes the statement with our DECLARE in front.
        line = self._target.redact(error.diag.message_primary or str(error))[:300]
        if not error.sqlstate and any(words in str(error) for words in _NO_MEMORY):
            return UnsafeSql(
                f"SQL stopped: it needs more than {self._limits.memory_bytes} bytes of memory (limit memory_bytes)"
            )
        if isinstance(error, errors.QueryCanceled | errors.LockNotAvailable):
            return self._too_slow()
        if isinstance(error, errors.InsufficientPrivilege | errors.ReadOnlySqlTransaction):
            return UnsafeSql(f"SQL refused by the database: {line}")
        state = error.sqlstate or ""
        if state[:2] in ("53", "54") and state not in _UNAVAILABLE:
            return UnsafeSql(f"SQL stopped: it needs more than the server allows ({line})")
        if state in _UNAVAILABLE or self._connection.closed:
            return DataError(f"database {self._target.shown} is not available: {line}")
        return QueryFailed(f"SQL failed: {line}")


class _AsText(Loader):
    """Dates, arrays, JSON and the rest as PostgreSQL writes them: no Python type refuses a value that the server
    allows."""

    def load(self, data: Buffer) -> str:
        return bytes(data).decode("utf-8", "backslashreplace")
