"""SQLite for the coordinator's state: how its file is opened, and which settings make a transaction durable."""

from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.pool import ConnectionPoolEntry

BUSY_TIMEOUT_MS = 10_000
"""How long a transaction waits for another process's."""
_LOG_PAGES = 4096
"""Up to which the write-ahead log grows before it is brought into the database: 16 MiB, which a masked attempt of 64
silos stays below. What silos reveal for it is then in the log alone, and the log is emptied when the attempt ends."""


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
