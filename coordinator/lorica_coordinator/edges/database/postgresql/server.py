"""PostgreSQL for the coordinator's state: SERIALIZABLE, durable when a transaction has ended, and tried again a few
times where another transaction was in the way.

What it says of itself names neither password nor values: those of rows may be what a silo sent.
"""

import secrets
import time
from collections.abc import Callable
from typing import Final, TypeVar

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import SQLAlchemyError, TimeoutError
from sqlalchemy.pool import NullPool

from lorica_coordinator.edges.database.postgresql.place import DatabasePlace
from lorica_security.errors import ConfigurationError, StorageError

R = TypeVar("R")

OLDEST_VERSION: Final = 14
TRIES: Final = 10
"""Of one transaction, where others were in its way each time."""
_FIRST_PAUSE_S: Final = 0.005
_DOUBLINGS: Final = 5
CONNECT_S: Final = 10
_SESSION: Final = {
    "statement_timeout": "30s",
    "lock_timeout": "15s",
    "idle_in_transaction_session_timeout": "4s",
    "synchronous_commit": "on",
}
_KEEPALIVE: Final = {
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
_IN_THE_WAY: Final = ("40001", "40P01")
_DEFECTS: Final = {
    "25006": "it is read-only: name the server that is written to",
    "53100": "its disk is full: give it room",
    "53300": "it has too many connections: raise max_connections, or end others'",
    "57014": "a statement took longer than 30 seconds: see what else the server does, and its disk",
    "55P03": "a lock was held for more than 15 seconds: see in pg_stat_activity who holds it",
    "42501": "the role may not do this: make it the owner of the database and its schema",
    "42P01": "a table is missing: restore the database from its backup",
    "42703": "a column is missing: run `coordinator upgrade`, or restore the database from its backup",
}
_ELSE: Final = "check that the server runs and is reached, and [storage] database; rounds go on then"


class GaveWay(StorageError):
    """Another transaction was in the way: nothing of this one happened, and it may be tried again."""


class PostgresqlDatabase:
    """Where a RoundStore keeps its tables; may be used from several threads."""

    answers_may_be_lost = True

    def __init__(self, place: DatabasePlace) -> None:
        """Connects to nothing yet. Raises ConfigurationError where its driver is not installed."""
        self.name = place.name
        try:
            self.engine = _engine(place)
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"[storage] database is in PostgreSQL, and the package {error.name} is not installed: "
                "pip install 'psycopg[binary]>=3.2,<4'"
            ) from error

    def failed(self, error: SQLAlchemyError) -> StorageError:
        state = str(getattr(getattr(error, "orig", None), "sqlstate", None) or "")
        reason = "no connection was free" if isinstance(error, TimeoutError) else str(error.__cause__ or error)
        reason = " ".join(reason.split())[:400]
        if state in _IN_THE_WAY:
            return GaveWay(f"{self.name}: another transaction was in the way ({reason})")
        return StorageError(f"{self.name} cannot be read or written ({reason}): {_DEFECTS.get(state, _ELSE)}")

    def in_tries(self, work: Callable[[], R]) -> R:
        """What `work`, one transaction, returns. Raises StorageError where others were in its way TRIES times."""
        for number in range(TRIES):
            try:
                return work()
            except GaveWay as error:
                last = error
                # A random part: two that met once do not meet again for having waited alike.
                time.sleep(_FIRST_PAUSE_S * 2 ** min(number, _DOUBLINGS) * (1 + secrets.randbelow(1000) / 1000))
        raise StorageError(
            f"{self.name}: a transaction gave way to others {TRIES} times: see pg_stat_activity for who writes there"
        ) from last

    def clear_log(self) -> bool:
        """Its log is the server's, and keeps everything: what may not stay there is sealed."""
        return True

    def require_supported(self, connection: Connection) -> None:
        """Raises ConfigurationError for a server that is too old, or a database whose text is not UTF-8."""
        version = int((connection.dialect.server_version_info or (0,))[0])
        if version < OLDEST_VERSION:
            raise ConfigurationError(
                f"{self.name} is PostgreSQL {version}: {OLDEST_VERSION} or a newer one is needed, upgrade the server"
            )
        encoding = connection.exec_driver_sql("SHOW server_encoding").scalar()
        if encoding != "UTF8":
            raise ConfigurationError(
                f"{self.name} holds text as {encoding}: make the database anew with ENCODING 'UTF8' TEMPLATE template0"
            )


def _engine(place: DatabasePlace) -> Engine:
    return create_engine(
        place.url.set(host=None, port=None, query={}),
        isolation_level="SERIALIZABLE",
        pool_pre_ping=True,
        pool_size=4,
        max_overflow=8,
        pool_timeout=CONNECT_S,
        hide_parameters=True,
        connect_args=_arguments(place),
    )


def session_engine(place: DatabasePlace) -> Engine:
    """For a session of its own, which is opened and closed by whoever wants one."""
    return create_engine(
        place.url.set(host=None, port=None, query={}),
        poolclass=NullPool,
        hide_parameters=True,
        connect_args={**_arguments(place), "tcp_user_timeout": "5000", "connect_timeout": "5"},
    )


def _arguments(place: DatabasePlace) -> dict[str, str]:
    return {
        **place.parameters,
        **_KEEPALIVE,
        "connect_timeout": str(CONNECT_S),
        "application_name": "lorica-coordinator",
        "options": " ".join(f"-c {key}={value}" for key, value in _SESSION.items()),
        "client_encoding": "utf8",
    }
