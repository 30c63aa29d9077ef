"""From the tables of one release to those of another: `coordinator upgrade`, by hand, with the coordinator stopped.

A copy of the database comes first, made by SQLite itself. All revisions between the two are one transaction: a crash
leaves the tables as they were or as they are to be.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from lorica_coordinator.edges.database.database_copy import copy_database
from lorica_coordinator.edges.database.postgresql.chained_rows import ChainedRows
from lorica_coordinator.edges.database.postgresql.leadership import alone, require_nobody_leads
from lorica_coordinator.edges.database.postgresql.server import PostgresqlDatabase
from lorica_coordinator.edges.database.round_tables import FIRST_REVISION, TABLES_REVISION, revisions
from lorica_coordinator.edges.database.sqlite_database import database_engine
from lorica_coordinator.edges.database.tables_revision import require_current, revision_of
from lorica_coordinator.edges.upkeep.upgrade_copies import copy_of
from lorica_security.errors import ConfigurationError, StorageError

FIRST_IN_POSTGRESQL = "0011"


@dataclass(frozen=True, slots=True)
class Upgraded:
    """`copy` is the database as it was before; None where nothing had to be changed."""

    before: str
    after: str
    copy: Path | None


def upgrade(path: Path, *, now: datetime, to: str = TABLES_REVISION) -> Upgraded:
    """Bring the tables of the database at `path` to revision `to`, up or down. The caller holds the folder's lock.

    Raises ConfigurationError for a revision that this release does not know, StorageError naming the file and the
    remedy.
    """
    _require_revision(to, FIRST_REVISION)
    if not path.is_file():
        raise StorageError(f"{path} is missing: restore it from a backup, or correct `state` of federation.toml")
    with in_transaction(path) as connection:
        before = revision_of(connection)
    if before is None:
        raise StorageError(f"{path} has no tables: restore it from a backup")
    if before == to:
        return Upgraded(before, to, None)
    if not (before.isdecimal() and FIRST_REVISION <= before <= TABLES_REVISION):
        require_current(before, str(path))
    while (copied := copy_of(path, before, now)).exists():  # of an upgrade that was cut off this second
        now += timedelta(seconds=1)
    copy_database(path, copied)
    with in_transaction(path) as connection:
        migrate(connection, to)
    return Upgraded(before, to, copied)


def require_to_upgrade(database: PostgresqlDatabase, *, to: str) -> None:
    """What `upgrade_server` refuses before it changes anything, while nothing tells of it in the log. Raises as it
    does."""
    _require_revision(to, FIRST_IN_POSTGRESQL)
    try:
        with database.engine.begin() as connection:
            database.require_supported(connection)
            require_nobody_leads(connection)
    except SQLAlchemyError as error:
        raise database.failed(error) from error


def was_put_back(rows: ChainedRows, *, has_log: bool) -> bool:
    """Whether the database lacks what is known of the `rows` of its log, and is not settled. It is settled in the
    tables of this release, so an upgrade may come first: it writes nothing to the log, and begins no term."""
    if not has_log:  # of a release that kept it in the folder
        return rows.newest.exists()
    return any(rows.at(known.sequence) != known for known in rows.all_known())


def upgrade_server(database: PostgresqlDatabase, *, to: str = TABLES_REVISION, put_back: bool = False) -> Upgraded:
    """The same in PostgreSQL, in one transaction, which nobody leads in and which ends the term of whoever led; a copy
    is the server's own tools' to make. `put_back`: as `was_put_back` says.

    Raises ConfigurationError, Conflict where a coordinator leads, StorageError naming the database.
    """
    _require_revision(to, FIRST_IN_POSTGRESQL)

    def once() -> Upgraded:
        try:
            with database.engine.begin() as connection:
                database.require_supported(connection)
                alone(connection, put_back=put_back)
                before = revision_of(connection)
                if before is None:
                    raise StorageError(f"{database.name} has no tables: restore it from its backup")
                if before != to:
                    if not (before.isdecimal() and FIRST_REVISION <= before <= TABLES_REVISION):
                        require_current(before, database.name)
                    migrate(connection, to)
        except SQLAlchemyError as error:
            raise database.failed(error) from error
        return Upgraded(before, to, None)

    return database.in_tries(once)


def _require_revision(to: str, first: str) -> None:
    if not (to.isdecimal() and first <= to <= TABLES_REVISION and len(to) == len(TABLES_REVISION)):
        raise ConfigurationError(f"--to {to[:40]!r} is no revision from {first} to {TABLES_REVISION}")


def migrate(connection: Connection, to: str) -> None:
    """In the transaction that is open. Raises what SQLAlchemy raises."""
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(resources("lorica_coordinator.edges.database.migrations")))
    config.set_main_option("path_separator", "os")
    adopted = connection.dialect.has_table(connection, revisions.name)
    present = (revision_of(connection) or "") if adopted else ""
    if present != to:
        (command.upgrade if present < to else command.downgrade)(config, to)
    if connection.dialect.name == "sqlite" and (broken := connection.exec_driver_sql("PRAGMA foreign_key_check").all()):
        raise StorageError(f"the revisions would leave rows that refer to nothing ({broken[0]}): nothing was changed")


@contextmanager
def in_transaction(path: Path) -> Iterator[Connection]:
    """A transaction, in which a table may be made anew while others refer to it."""
    engine = database_engine(path)
    event.listen(engine, "connect", _set_up)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    try:
        with engine.begin() as connection:
            yield connection
    except SQLAlchemyError as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise StorageError(f"{path} cannot be upgraded ({reason}): it is as it was") from error
    finally:
        engine.dispose()


def _set_up(connection: Any, _: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # as in sqlite_database.py
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")
