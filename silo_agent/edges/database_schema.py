"""`silo-agent schema URL`: the tables and columns of a live SQLite or PostgreSQL database, in the form of schema.json.

The connection is read-only, no row is read, and neither the result nor an error holds the URL's user or password.
"""

import sqlite3
import warnings
from typing import TypedDict

from sqlalchemy import Engine, Inspector, create_engine, inspect
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine.interfaces import ReflectedColumn
from sqlalchemy.exc import SAWarning, SQLAlchemyError
from sqlalchemy.pool import NullPool
from sqlalchemy.types import Boolean, Date, DateTime, Float, Integer, Interval, NullType, Numeric, Time, TypeEngine

from security.errors import DataError
from silo_agent.sql_sandbox import DatabaseTarget, PostgresqlTarget, SqliteTarget

_SECONDS = 30

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


def read_schema(target: DatabaseTarget, *, db_id: str | None = None) -> SchemaEntry:
    """Tables and views of the database (PostgreSQL: of the role's default schema), tables first, each by name; columns in order.

    `db_id` is the file's or database's name unless given. Raises DataError where the database cannot be read or is empty.
    """
    engine = _engine(target)
    try:
        with warnings.catch_warnings():
            # SQLAlchemy warns of each type that it does not know, such as int(11) in SQLite; those are handled below.
            warnings.simplefilter("ignore", SAWarning)
            inspector = inspect(engine)
            names = (*sorted(inspector.get_table_names()), *sorted(inspector.get_view_names()))
            tables = [_table(inspector, name) for name in names]
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise DataError(f"schema of {target.shown} cannot be read: {_reason(target, error)}") from None
    finally:
        engine.dispose()
    tables = [table for table in tables if table["columns"]]
    if not tables:
        raise DataError(
            f"database {target.shown} has no table that this role may see: check the URL and the role's grants"
        )
    name = target.path.stem if isinstance(target, SqliteTarget) else target.database
    return {"db_id": db_id or name, "source": target.shown, "tables": tables}


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
        return sqlite3.connect(target.uri(mode="ro"), uri=True, timeout=_SECONDS)

    return create_engine("sqlite://", creator=connect, poolclass=NullPool, hide_parameters=True)


def _table(inspector: Inspector, table: str) -> TableEntry:
    primary = set(inspector.get_pk_constraint(table)["constrained_columns"])
    foreign = {column for key in inspector.get_foreign_keys(table) for column in key["constrained_columns"]}
    return {
        "name": table,
        "columns": [
            _column(column, primary_key=column["name"] in primary, foreign_key=column["name"] in foreign)
            for column in inspector.get_columns(table)
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
