"""SQLite for the coordinator's state: how its file is opened, and which settings make a transaction durable."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from lorica_security.errors import StorageError
from lorica_security.host import ballast

_log = structlog.get_logger(__name__)
R = TypeVar("R")

BUSY_TIMEOUT_MS = 10_000
"""How long a transaction waits for another process's."""
_LOG_PAGES = 4096
"""Up to which the write-ahead log grows before it is brought into the database: 16 MiB, which a masked attempt of 64
silos stays below. What silos reveal for it is then in the log alone, and the log is emptied when the attempt ends."""
_FULL = "disk is full"
"""What SQLite says of SQLITE_FULL."""


class SqliteDatabase:
    """Where a RoundStore keeps its tables: a file. May be used from several threads."""

    answers_may_be_lost = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)
        self.engine = durable_engine(path)

    def failed(self, error: SQLAlchemyError) -> StorageError:
        reason = " ".join(str(error.__cause__ or error).split())
        if _FULL in reason:
            ballast.give_up_above(self._path)  # whoever tries again has room
        return StorageError(
            f"{self._path} cannot be read or written ({reason}): check the disk's free space and the permissions, "
            "or restore the file from backup"
        )

    def in_tries(self, work: Callable[[], R]) -> R:
        """One writes at a time, and who would write waits for it: nothing is tried again."""
        return work()

    def require_supported(self, connection: Connection) -> None:
        """The driver brings its own SQLite."""

    def clear_log(self) -> bool:
        """Bring the log's pages into the database and empty it; False where another process reads just now."""
        connection = self.engine.raw_connection()
        cursor = connection.cursor()
        try:
            cursor.execute("PRAGMA busy_timeout = 0")
            busy, _, _ = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return not busy
        except sqlite3.Error as error:
            _log.warning("the write-ahead log could not be emptied, it is tried again", error=str(error))
            return False
        finally:
            cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            connection.close()


def database_engine(path: Path) -> Engine:
    """The database in this file, with the driver's own settings."""
    return create_engine(f"sqlite:///{path}")


def durable_engine(path: Path) -> Engine:
    """The same for the store: what a transaction wrote is on the disk when it has ended."""
    engine = database_engine(path)
    event.listen(engine, "connect", _set_up)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


def _set_up(connection: Any, _: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # the driver would begin before some statements only, and not before DDL
    cursor = connection.cursor()
    for pragma in (
        f"busy_timeout = {BUSY_TIMEOUT_MS}",
        "journal_mode = WAL",
        "synchronous = FULL",
        f"wal_autocheckpoint = {_LOG_PAGES}",
        "foreign_keys = ON",
        "secure_delete = ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
