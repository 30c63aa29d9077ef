"""One coordinator leads, and it alone writes the state: an advisory lock elects it, a term fences what it writes.

Of processes on one folder the folder's own lock decides first, which ends with its holder's life alone
(commands/host_commands.py): this keeps those of other folders apart.

The lock belongs to one session of PostgreSQL. That session is proved alive every BEAT_S; where the proof does not come,
since its process was killed, stopped or cut off, the server ends the session after SESSION_S and the lock is free.
Whoever gets it raises the term, in a row that each transaction of the leader's locks and compares: one of an earlier
term writes nothing to the database any more, however late it comes, and its process ends.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import structlog
from sqlalchemy import Connection, Engine, insert, select, text, update
from sqlalchemy.exc import SQLAlchemyError

from lorica_coordinator.edges.database.postgresql.place import DatabasePlace
from lorica_coordinator.edges.database.postgresql.server import PostgresqlDatabase, session_engine
from lorica_coordinator.edges.database.round_tables import leadership as table
from lorica_coordinator.service.ports import Overtaken
from lorica_security.errors import Conflict
from lorica_security.identifiers import FederationName

_log = structlog.get_logger(__name__)

BEAT_S: Final = 2.0
SESSION_S: Final = 10
LOCK: Final = 0x6C6F72696361  # "lorica"
_ROW: Final = 1


class Leadership:
    """Of one process. `take` once, then `hold` every BEAT_S from one thread; `fence` in every transaction."""

    def __init__(
        self,
        place: DatabasePlace,
        database: PostgresqlDatabase,
        federation: FederationName,
        identity: str,
        *,
        session_s: float = SESSION_S,
    ) -> None:
        """`identity`: the coordinator's public identity key, in hexadecimal; whose state this is."""
        self._database = database
        self._sessions: Engine = session_engine(place)
        self._session: Connection | None = None
        self._federation, self._identity = federation, identity
        self._session_s = session_s
        self.term = 0

    def take(self, prepare: Callable[[], None]) -> bool:
        """Lead from here on; False where somebody else does. With the lock held `prepare` makes the tables.

        Raises Conflict for the state of another coordinator, StorageError naming the database.
        """
        if not self._lock():
            return False
        try:
            prepare()
            self._database.in_tries(self._begin_term)
        except BaseException:
            self.release()
            raise
        return True

    def take_alone(self) -> bool:
        """Keep everybody else from leading, without a term: tables of another release may have none."""
        return self._lock()

    def hold(self) -> None:
        """Prove that this process leads; where its session is gone, and nobody led since, it goes on with another one.

        Raises Overtaken, or StorageError while that cannot be told.
        """
        if self._session is not None:
            try:
                self._session.execute(text("SELECT 1"))
                return
            except SQLAlchemyError as error:
                _log.warning("the session that leads was lost", database=self._database.name, error=_first_line(error))
                self.release()
        if not self._lock():
            raise self._overtaken()
        try:
            with self._database.engine.connect() as connection:
                found = connection.execute(select(table.c.term).where(table.c.id == _ROW)).scalar()
        except SQLAlchemyError as error:
            self.release()
            raise self._database.failed(error) from error
        if found != self.term:
            self.release()
            raise self._overtaken()
        _log.info("leads on, with another session", database=self._database.name, term=self.term)

    def resign(self) -> None:
        """Let go of the lock at a clean end. It is free when this returns: the server takes a moment to see that a
        session is over, and a command that follows at once would find that somebody leads."""
        if self._session is not None and not self._session.invalidated:
            with suppress(SQLAlchemyError):
                self._session.execute(text("SELECT pg_advisory_unlock_all()"))
        self.release()

    @property
    def database(self) -> PostgresqlDatabase:
        return self._database

    def fence(self, connection: Connection) -> None:
        """In a transaction that is to be the leader's: nobody can raise the term before it ends. Raises Overtaken."""
        mine = select(table.c.term).where(table.c.id == _ROW, table.c.term == self.term).with_for_update(read=True)
        if connection.execute(mine).first() is None:
            raise self._overtaken()

    def release(self) -> None:
        """Let go of the lock, with its session."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(SQLAlchemyError):
                session.invalidate()
                session.close()

    def _lock(self) -> bool:
        try:
            session = self._sessions.connect().execution_options(isolation_level="AUTOCOMMIT")
            try:
                # The server's own probes and its end of an idle session: a process that is stopped answers no less to
                # the first, and never asks in time for the second.
                milliseconds = int(self._session_s * 1000)
                for name, value in (
                    ("idle_session_timeout", milliseconds),
                    ("tcp_keepalives_idle", 3),
                    ("tcp_keepalives_interval", 2),
                    ("tcp_keepalives_count", 3),
                ):
                    session.execute(text(f"SET {name} = {value}"))
                if session.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": LOCK}).scalar():
                    self._session = session
                    return True
            except BaseException:
                session.close()
                raise
            session.close()
            return False
        except SQLAlchemyError as error:
            raise self._database.failed(error) from error

    def _begin_term(self) -> None:
        values = {"federation": self._federation, "identity": self._identity, "holder": _holder()}
        try:
            with self._database.engine.begin() as connection:
                row = connection.execute(select(table).where(table.c.id == _ROW)).one_or_none()
                if row is None:
                    self.term = 1
                    connection.execute(insert(table).values(id=_ROW, term=1, **values))
                    return
                if (row.federation, row.identity) != (self._federation, self._identity):
                    raise Conflict(
                        f"{self._database.name} holds the state of another coordinator (federation {row.federation}, "
                        f"identity key {row.identity[:16]}...): name another database in [storage] database, or serve "
                        "the folder whose keys these are"
                    )
                self.term = row.term + 1
                connection.execute(update(table).where(table.c.id == _ROW).values(term=self.term, **values))
        except SQLAlchemyError as error:
            raise self._database.failed(error) from error

    def _overtaken(self) -> Overtaken:
        return Overtaken(
            f"another coordinator leads, in a later term than {self.term}: this process writes nothing any more; "
            "started again, it stands by"
        )


@contextmanager
def alone(leadership: Leadership) -> Iterator[None]:
    """Raises Conflict where a coordinator leads."""
    if not leadership.take_alone():
        raise Conflict("a coordinator leads on this database: stop it, and those that stand by, first")
    try:
        yield
    finally:
        leadership.release()


def beside(federation: FederationName, identity: str) -> Callable[[Connection], None]:
    """The fence of a command that adds to the audit log beside the leader, whose log it is as well: it takes nothing
    over, and no term begins or ends meanwhile."""
    mine = select(table.c.term).where(table.c.federation == federation, table.c.identity == identity)

    def fence(connection: Connection) -> None:
        if connection.execute(mine.with_for_update(read=True)).first() is None:
            raise Conflict(
                "the database holds no state of this coordinator: give this command where the coordinator's keys are, "
                "after the first `coordinator serve`"
            )

    return fence


def read_only(connection: Connection) -> None:
    """What a store does first in a transaction of who does not lead: it looks."""
    connection.execute(text("SET TRANSACTION READ ONLY"))


def _holder() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"[:255]


def _first_line(error: SQLAlchemyError) -> str:
    return " ".join(str(error.__cause__ or error).split())[:200]
