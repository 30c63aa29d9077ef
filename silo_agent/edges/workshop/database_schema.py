"""`silo-agent schema URL`: the tables and columns of a live SQLite or PostgreSQL database, in the form of schema.json.

The connection is read-only, no row is read, and neither the result nor an error holds the URL's user or password.
"""

import sqlite3
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TypedDict

from sqlalchemy import Connection, Engine, Inspector, create_engine, inspect, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine.interfaces import ReflectedColumn
from sqlalchemy.exc import SAWarning, SQLAlchemyError
from sqlalchemy.pool import NullPool
from sqlalchemy.types import Boolean, Date, DateTime, Float, Integer, Interval, NullType, Numeric, Time, TypeEngine

from lorica_security.errors import ConfigurationError, DataError
from silo_agent.sql_sandbox import DatabaseTarget, PostgresqlTarget, SqliteTarget
from silo_agent.sql_sandbox.sqlite_session import open_parameters

_SECONDS = 30

_SCHEMAS = r"""
SELECT nspname, nspname = coalesce(pg_catalog.current_schema(), ''), pg_catalog.has_schema_privilege(oid, 'USAGE')
FROM pg_catalog.pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'
ORDER BY 2 DESC, 1
"""
"""All but the system's own, the one that a bare name is looked up in first."""
_RELATIONS = """
SELECT n.nspname, c.relname,
    pg_catalog.has_table_privilege(c.oid, 'SELECT') OR pg_catalog.has_any_column_privilege(c.oid, 'SELECT'),
    ARRAY(
        SELECT a.attname::text FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
            AND NOT pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT')
        ORDER BY a.attnum
    )
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p', 'f', 'v', 'm')
ORDER BY c.relkind IN ('v', 'm'), c.relname COLLATE "C"
"""
"""Tables, partitioned and foreign ones among them, then views, materialised ones among them; each with the columns that
are not granted."""

_NUMBERS = (Integer, Float, Numeric, Boolean, postgresql.MONEY, postgresql.OID)
_TIMES = (Date, DateTime, Time, Interval, postgresql.INTERVAL)


class ColumnEntry(TypedDict):
    name: str
    sql_type: str
    type: str
    primary_key: bool
    foreign_key: bool


class TableEntry(TypedDict):
    name: str
    columns: list[ColumnEntry]


class SchemaEntry(TypedDict):
    """A schema.json, ready for json.dumps."""

    db_id: str
    source: str
    tables: list[TableEntry]


@dataclass(frozen=True, slots=True)
class LiveSchema:
    """The schema of a live database. `left_out` says what of the database is not in it, and why."""

    entry: SchemaEntry
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Name:
    """A table or a view. `schema` is None in SQLite, and for the schema that a bare name is looked up in.

    `denied` are columns that the role may not select.
    """

    table: str
    schema: str | None = None
    denied: frozenset[str] = frozenset()

    @property
    def shown(self) -> str:
        return self.table if self.schema is None else f"{self.schema}.{self.table}"


def read_schema(target: DatabaseTarget, *, db_id: str | None = None, only: Collection[str] = ()) -> LiveSchema:
    """Tables and views that the role may read, tables first, each by name, with the columns that it may read, in order.

    PostgreSQL: of every schema, or of those in `only`; the role's default schema comes first, names of the others are
    `schema.table`. `db_id` is the file's or database's name unless given. Raises DataError where the database cannot be
    read or is empty, and ConfigurationError where `only` names a schema that is not there.
    """
    if only and isinstance(target, SqliteTarget):
        raise ConfigurationError(f"database {target.shown} is SQLite, which has no schemas: leave --only out")
    engine = _engine(target)
    try:
        with warnings.catch_warnings(), engine.connect() as connection:
            # SQLAlchemy warns of each type that it does not know, such as int(11) in SQLite; those are handled below.
            warnings.simplefilter("ignore", SAWarning)
            inspector = inspect(connection)
            left_out: list[str] = []
            if isinstance(target, SqliteTarget):
                names = [
                    _Name(table)
                    for table in (*sorted(inspector.get_table_names()), *sorted(inspector.get_view_names()))
                ]
            else:
                names = list(_readable(connection, target, only, left_out))
            tables = [_table(inspector, name) for name in names]
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise DataError(f"schema of {target.shown} cannot be read: {_reason(target, error)}") from None
    finally:
        engine.dispose()
    tables = [table for table in tables if table["columns"]]
    if not tables:
        why = f" ({'; '.join(left_out[:3])})" if left_out else ""
        raise DataError(
            f"database {target.shown} has no table that this role may see{why}: check the URL and the role's grants"
        )
    name = target.path.stem if isinstance(target, SqliteTarget) else target.database
    return LiveSchema({"db_id": db_id or name, "source": target.shown, "tables": tables}, tuple(left_out))


def _readable(
    connection: Connection, target: PostgresqlTarget, only: Collection[str], left_out: list[str]
) -> Iterator[_Name]:
    """What the role may select from, schema by schema; what it may not is added to `left_out`."""
    schemas = connection.execute(text(_SCHEMAS)).all()
    if unknown := sorted(set(only) - {name for name, *_ in schemas}):
        known = ", ".join(name for name, *_ in schemas)
        raise ConfigurationError(f"database {target.shown} has no schema {unknown[0]!r}: --only may name {known}")
    relations = connection.execute(text(_RELATIONS)).all()
    for schema, is_default, usable in schemas:
        held = [(table, readable, denied) for of, table, readable, denied in relations if of == schema]
        allowed = [(table, denied) for table, readable, denied in held if readable]
        if only and schema not in only:
            left_out.append(f"schema {schema}: --only does not name it")
        elif not usable:
            left_out.append(f"schema {schema}: this role has no USAGE on it")
        elif not held:
            left_out.append(f"schema {schema}: it holds no table")
        elif not allowed:
            left_out.append(f"schema {schema}: this role has no SELECT on any of its {len(held)} tables")
        else:
            left_out += [
                f"table {schema}.{table}: this role has no SELECT on it" for table, readable, _ in held if not readable
            ]
            for table, denied in allowed:
                left_out += [f"column {schema}.{table}.{column}: this role has no SELECT on it" for column in denied]
                yield _Name(table, None if is_default else schema, frozenset(denied))


def _engine(target: DatabaseTarget) -> Engine:
    if isinstance(target, PostgresqlTarget):
        options = f"-c default_transaction_read_only=on -c statement_timeout={_SECONDS * 1000}"
        return create_engine(
            target.url.replace("postgresql://", "postgresql+psycopg://", 1),
            poolclass=NullPool,
            connect_args={"options": options, "connect_timeout": _SECONDS},
            hide_parameters=True,
        )
    if not target.path.is_file():
        raise DataError(f"database {target.path} is not a file: give the path of an SQLite database")

    def connect() -> sqlite3.Connection:
        try:
            parameters = open_parameters(target)
        except PermissionError as error:
            raise DataError(f"database {target.path} cannot be read: {error.strerror}") from error
        return sqlite3.connect(target.uri(**parameters), uri=True, timeout=_SECONDS)

    return create_engine("sqlite://", creator=connect, poolclass=NullPool, hide_parameters=True)


def _table(inspector: Inspector, name: _Name) -> TableEntry:
    primary = set(inspector.get_pk_constraint(name.table, name.schema)["constrained_columns"])
    foreign = {
        column for key in inspector.get_foreign_keys(name.table, name.schema) for column in key["constrained_columns"]
    }
    return {
        "name": name.shown,
        "columns": [
            _column(column, primary_key=column["name"] in primary, foreign_key=column["name"] in foreign)
            for column in inspector.get_columns(name.table, name.schema)
            if column["name"] not in name.denied
        ],
    }


def _column(column: ReflectedColumn, *, primary_key: bool, foreign_key: bool) -> ColumnEntry:
    kind = column["type"]
    return {
        "name": column["name"],
        "sql_type": "unknown" if isinstance(kind, NullType) else str(kind),
        "type": _meaning(kind),
        "primary_key": primary_key,
        "foreign_key": foreign_key,
    }


def _meaning(kind: TypeEngine[object]) -> str:
    if isinstance(kind, _TIMES):
        return "time"
    return "number" if isinstance(kind, _NUMBERS) else "text"


def _reason(target: DatabaseTarget, error: Exception) -> str:
    cause = error.__cause__ or error
    line = target.redact(str(cause)) if isinstance(target, PostgresqlTarget) else " ".join(str(cause).split())
    return line[:300]
