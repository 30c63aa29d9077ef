"""One coordinator leads, and it alone writes the state: an advisory lock elects it, a term fences what it writes.

Of processes on one folder the folder's own lock decides first, which ends with its holder's life alone
(commands/host_commands.py): this keeps those of other folders apart.

The lock belongs to one session of PostgreSQL. That session is proved alive every BEAT_S, by a thread that does nothing
else; where the proof does not come, since its process was killed, stopped or cut off, the server ends the session after
SESSION_S and the lock is free. Whoever gets it raises the term, in a row that each transaction of the leader's locks
and compares: one of an earlier term writes nothing to the database any more, however late it comes, and its process
ends. A term is a number and a random token: where a server falls back to a replica that lags, one number may be begun
twice.

A process may be stopped between any two of its statements, and go on when another one leads. So it raises the term that
it read in the session with the lock, and no other one, and leads once that same session has read its own.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
from sqlalchemy import Connection, Engine, Row, Select, insert, select, text, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from lorica_coordinator.edges.database.postgresql.place import DatabasePlace
from lorica_coordinator.edges.database.postgresql.server import PostgresqlDatabase, session_engine
from lorica_coordinator.edges.database.round_tables import leadership as table
from lorica_coordinator.service.ports import Overtaken
from lorica_coordinator.vectors.key_place import MARK, marked
from lorica_security.errors import ConfigurationError, Conflict, StorageError
from lorica_security.identifiers import FederationName

_log = structlog.get_logger(__name__)

BEAT_S: Final = 1.0
SESSION_S: Final = 4.0
"""How long the server waits for a sign of the session that leads: four beats."""
DOUBT_S: Final = 30.0
"""After which a process that cannot tell whether it leads ends: another one may lead, and silos go there."""
LATEST_TERM: Final = 10**10 - 1
"""What the names of files in a bucket have digits for."""
LOCK: Final = 0x6C6F72696361  # "lorica"
STANDBY: Final = "lorica-standby"
"""What the session of one that stands by is called, in pg_stat_activity."""
_COUNT: Final = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = :standby"
)
_COLUMNS: Final = text(
    "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(:table) AND attnum > 0 AND NOT attisdropped"
)
_ROW: Final = 1
_PLACE: Final = 2
"""The row whose token is the text that the folder of keys is known by."""
_Begun = tuple[int, str]
"""A term's number and token."""
_Rows = dict[int, Row[Any]]
"""Of the table of terms, by id."""


class Leadership:
    """Of one process. `take` once: from then on its session is proved alive. `fence` in every transaction."""

    def __init__(
        self,
        place: DatabasePlace,
        database: PostgresqlDatabase,
        federation: FederationName,
        identity: str,
        *,
        later_than: Callable[[], int] = lambda: 0,
        kept_of: Callable[[], int] = lambda: 0,
        key_place: Path | None = None,
        session_s: float = SESSION_S,
        beat_s: float = BEAT_S,
        doubt_s: float = DOUBT_S,
    ) -> None:
        """`identity`: the coordinator's public identity key, in hexadecimal; whose state this is. `later_than`: a term
        that has been, whatever the database says. `kept_of`: the newest term that files in a bucket are of; a database
        that does not know it is an earlier one. `key_place`: the folder of keys that several coordinators see."""
        self._database = database
        self._sessions: Engine = session_engine(place)
        self._session: Connection | None = None  # which has the lock
        self._candidate: Connection | None = None  # of one that stands by
        self._federation, self.identity = federation, identity
        self._later_than, self._kept_of, self._key_place = later_than, kept_of, key_place
        self._session_s, self._beat_s, self._doubt_s = session_s, beat_s, doubt_s
        self._one_at_a_time = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.ended: Future[None] = Future()
        """Raises why this process leads no more: Overtaken, or StorageError where that cannot be told."""
        self.term, self.token = 0, ""
        self.standbys = 0
        """How many stood by when that was last asked."""
        self.holder = ""
        """Who led, for people, when `take` last found that somebody does; "" where no term had begun yet."""
        self._compared: tuple[Connection, _Rows] | None = None  # what this one stands by with
        self.leads = False
        """As far as is known: not while its session is lost."""

    def take(self, prepare: Callable[[], None]) -> bool:
        """Lead from here on; False where somebody else does: it is counted as one that stands by until `release`. With
        the lock held `prepare` makes the tables, and refuses what can be.

        Raises what `prepare` raises, Conflict for the state of another coordinator, StorageError naming the database;
        also where that is of an earlier instant than the bucket, or the folder of keys is another one;
        ConfigurationError where none is named. No term is begun then, and it stands by for none.
        """
        if not self._lock():
            self._stand_by()
            return False
        try:
            self.term, self.token = 0, ""
            self._beat()
            begun: _Begun | None = None
            while begun is None or self._newest() != begun:  # one without the lock has begun a term in between
                found = self._newest()
                prepare()
                kept_of = self._kept_of()
                if self.ended.done():  # what is done above may take long
                    self.ended.result()
                begun = self._database.in_tries(partial(self._begin_term, found, kept_of))
            with self._one_at_a_time:
                self.term, self.token = begun
                self.leads = True
        except BaseException:
            self.release()
            raise
        return True

    def hold(self) -> None:
        """Prove that this process leads; where its session is gone, and nobody led since, it goes on with another one.

        Raises Overtaken, or StorageError while that cannot be told.
        """
        with self._one_at_a_time:
            try:
                self._hold()
            except BaseException:
                self.leads = False
                raise
            self.leads = self.term > 0

    def _hold(self) -> None:
        if self._session is not None:
            try:
                self.standbys = self._session.execute(_COUNT, {"standby": STANDBY}).scalar() or 0
                return
            except SQLAlchemyError as error:
                _log.warning("the session that leads was lost", database=self._database.name, error=_first_line(error))
                self._let_go()
                if self.term == 0:
                    raise self._lost() from error
        if self.term == 0:
            raise self._lost()
        if not self._lock():
            self._let_go()
            raise self._overtaken()
        try:
            with self._database.engine.connect() as connection:
                mine = connection.execute(self._mine()).first() is not None
        except SQLAlchemyError as error:
            self._let_go()
            raise self._database.failed(error) from error
        if not mine:
            self._let_go()
            raise self._overtaken()
        _log.info("leads on, with another session", database=self._database.name, term=self.term)

    def _beat(self) -> None:
        self._thread = threading.Thread(target=self._keep_holding, name="leadership", daemon=True)
        self._thread.start()

    def _keep_holding(self) -> None:
        """Until `release`, or it leads no more: then nothing is left to be held."""
        doubted: float | None = None
        while not self._stop.wait(self._beat_s):
            try:
                self.hold()
                doubted = None
            except Overtaken as error:
                return self.ended.set_exception(error)
            except StorageError as error:
                now = time.monotonic()
                if doubted is None:
                    doubted = now
                    _log.error("whether this coordinator leads cannot be told, it is asked again", error=str(error))
                if now - doubted >= self._doubt_s:  # whoever stood by when that was last asked: one may have come since
                    return self.ended.set_exception(
                        StorageError(
                            f"whether this coordinator leads could not be told for {self._doubt_s:.0f} s: it ends, so "
                            "that silos go to whoever leads; started again, it leads or stands by once the database "
                            f"is there ({error})"
                        )
                    )

    @property
    def database(self) -> PostgresqlDatabase:
        return self._database

    def fence(self, connection: Connection) -> None:
        """In a transaction that is to be the leader's: nobody can raise the term before it ends. Raises Overtaken."""
        if connection.execute(self._mine().with_for_update(read=True)).first() is None:
            raise self._overtaken()

    def release(self) -> None:
        """Let go of the lock, with its session; and stand by no more. It is free when this returns: the server takes a
        moment to see that a session is over, and whoever follows at once would find that somebody leads."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self._session_s)  # one that hangs in a dead session has no lock by then
        self.leads = False
        if self._one_at_a_time.acquire(blocking=False):
            try:
                if self._session is not None:
                    with suppress(SQLAlchemyError):
                        self._session.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": LOCK})
                self._let_go()
            finally:
                self._one_at_a_time.release()
        self._database.engine.dispose()

    def _mine(self) -> Select[tuple[int]]:
        return select(table.c.term).where(table.c.id == _ROW, table.c.term == self.term, table.c.token == self.token)

    def _let_go(self) -> None:
        for session in (self._session, self._candidate):
            if session is not None:
                with suppress(SQLAlchemyError):
                    session.invalidate()
                    session.close()
        self._session = self._candidate = None

    def _lock(self) -> bool:
        """Raises StorageError; a session of one that stood by may have been lost meanwhile."""
        try:
            if self._candidate is not None:
                with suppress(SQLAlchemyError):
                    return self._lock_in(self._candidate)
                self._let_go()
            self._candidate = self._new_session()
            return self._lock_in(self._candidate)
        except SQLAlchemyError as error:
            self._let_go()
            raise self._database.failed(error) from error

    def _lock_in(self, session: Connection) -> bool:
        if not session.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": LOCK}).scalar():
            return False
        session.execute(text("RESET application_name"))
        self._session, self._candidate = session, None
        return True

    def _new_session(self) -> Connection:
        session = self._sessions.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            # The server's own probes and its end of an idle session: a process that is stopped answers no less to the
            # first, and never asks in time for the second.
            for name, value in (
                ("idle_session_timeout", int(self._session_s * 1000)),
                ("tcp_keepalives_idle", 3),
                ("tcp_keepalives_interval", 2),
                ("tcp_keepalives_count", 3),
            ):
                session.execute(text(f"SET {name} = {value}"))
        except BaseException:
            session.close()
            raise
        return session

    def _newest(self) -> _Begun | None:
        """The newest term; None without one. Read in the session that got the lock: nobody else has had it since.

        Raises Overtaken where that session was lost, else as `take` does for what the database has.
        """
        with self._one_at_a_time:
            if self._session is None:
                raise self._lost()
            try:
                rows = _rows(self._session)
            except SQLAlchemyError as error:
                self._let_go()
                raise self._lost() from error
        self._require_ours(rows)
        return (rows[_ROW].term, rows[_ROW].token) if _ROW in rows else None

    def _stand_by(self) -> None:
        """In the session that did not get the lock: it is named one that stands by once what the database has was
        compared, which is done anew where that changes. Raises as `take` does."""
        assert self._candidate is not None
        try:
            rows = _rows(self._candidate)
            if (self._candidate, rows) == self._compared:
                return
            self._require_ours(rows)
            self._candidate.execute(text(f"SET application_name = '{STANDBY}'"))
        except SQLAlchemyError:
            return self._let_go()  # it is asked again, in another session
        except BaseException:
            self.release()
            raise
        self._compared = self._candidate, rows
        self.holder = rows[_ROW].holder if _ROW in rows else ""

    def _require_ours(self, rows: _Rows) -> None:
        whose, place = rows.get(_ROW), rows.get(_PLACE)
        if whose is not None:
            self._require_own(whose)
        if place is None:
            return
        if self._key_place is None:
            raise ConfigurationError(
                f'[storage] attempt_keys = "", and {self._database.name} knows a folder of keys that several '
                f"coordinators see, by the text {place.token[:64]} in its {MARK}: mount that folder here, and name it "
                "in [storage] attempt_keys"
            )
        marked(self._key_place, place.token)

    def _require_own(self, whose: Row[Any]) -> None:
        if (whose.federation, whose.identity) != (self._federation, self.identity):
            raise Conflict(
                f"{self._database.name} holds the state of another coordinator (federation {whose.federation}, "
                f"identity key {whose.identity[:16]}...): name another database in [storage] database, or serve "
                "the folder whose keys these are"
            )

    def _lost(self) -> Overtaken:
        return Overtaken(
            "the session that had the lock was lost before a term began: another coordinator may lead; started again, "
            "this one stands by, or leads"
        )

    def _begin_term(self, found: _Begun | None, kept_of: int) -> _Begun | None:
        """None where the newest term is another one than was found."""
        token = secrets.token_hex(16)
        whose = {"federation": self._federation, "identity": self.identity}
        values = {**whose, "holder": _holder(), "token": token}
        try:
            with self._database.engine.begin() as connection:
                row = connection.execute(select(table).where(table.c.id == _ROW)).one_or_none()
                if row is not None:
                    self._require_own(row)
                if (row and (row.term, row.token)) != found:
                    return None
                newest = 0 if row is None else row.term
                self._require_not_behind(newest, kept_of)
                if self._key_place is not None:
                    self._know_place(connection, self._key_place, whose)
                term = max(newest, self._later_than()) + 1
                if term > LATEST_TERM:
                    raise StorageError(
                        f"{self._database.name} has the term {newest} in its table leadership, or files are named by "
                        f"such a one, and {LATEST_TERM} is the latest: somebody changed it; find out who, and put back "
                        "a database of before"
                    )
                if row is None:
                    connection.execute(insert(table).values(id=_ROW, term=term, **values))
                else:
                    connection.execute(update(table).where(table.c.id == _ROW).values(term=term, **values))
        except IntegrityError:
            return None  # the first term ever was begun by two
        except SQLAlchemyError as error:
            raise self._database.failed(error) from error
        return term, token

    def _require_not_behind(self, newest: int, kept_of: int) -> None:
        """Before a term is begun: each that is refused would bring the database nearer to what it lacks."""
        if newest < kept_of:
            raise StorageError(
                f"{self._database.name} knows term {newest}, and [storage] blobs has files of term {kept_of}: the "
                "database was brought back from an earlier instant, or another coordinator has this prefix; bring "
                "the bucket back of the same instant, or name a new prefix in [storage] blobs where the state folder "
                "has every file"
            )

    def _know_place(self, connection: Connection, folder: Path, whose: dict[str, str]) -> None:
        known = connection.execute(select(table.c.token).where(table.c.id == _PLACE)).scalar()
        found = marked(folder, known or "")
        if known is None:
            connection.execute(
                insert(table).values(id=_PLACE, term=0, holder="the folder of keys", token=found, **whose)
            )

    def _overtaken(self) -> Overtaken:
        return Overtaken(
            f"another coordinator leads, in a later term than {self.term}: this process writes nothing any more; "
            "started again, it stands by"
        )


def alone(connection: Connection, *, put_back: bool = False) -> None:
    """First in a transaction that changes the tables, of whichever release: nobody leads before it has ended, and then
    the term is over of whoever led, and hangs. Of a database that was `put_back` the token alone ends it: another
    number would bring it nearer to what it lacks. Raises Conflict where a coordinator leads."""
    require_nobody_leads(connection)
    if columns := _columns(connection):
        over = update(table).where(table.c.id == _ROW).values(holder=_holder())
        if "token" in columns:
            over = over.values(token=secrets.token_hex(16))
        if not put_back or "token" not in columns:
            over = over.values(term=table.c.term + 1)
        connection.execute(over)


def require_nobody_leads(connection: Connection) -> None:
    """Nor does anybody before the transaction has ended. Raises Conflict naming who does."""
    if not connection.execute(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": LOCK}).scalar():
        rows = _rows(connection)
        holder = rows[_ROW].holder if _ROW in rows else "a coordinator"
        raise Conflict(f"{holder} leads on this database: stop it, and those that stand by, first")


def beside(federation: FederationName, identity: str) -> Callable[[Connection], None]:
    """The fence of a command that adds to the audit log beside the leader, whose log it is as well: it takes nothing
    over, and no term begins or ends meanwhile."""
    ours = select(table.c.id).where(table.c.federation == federation, table.c.identity == identity)
    held = ours.with_for_update(read=True)

    def fence(connection: Connection) -> None:
        if connection.execute(held).first() is None:
            raise Conflict(
                "the database holds no state of this coordinator: give this command where the coordinator's keys are, "
                "after the first `coordinator serve`"
            )

    return fence


def read_only(connection: Connection) -> None:
    """What a store does first in a transaction of who does not lead: it looks."""
    connection.execute(text("SET TRANSACTION READ ONLY"))


def _rows(connection: Connection) -> _Rows:
    """None where there are no tables yet, or those of another release, which whoever leads refuses."""
    if "token" not in _columns(connection):
        return {}
    return {row.id: row for row in connection.execute(select(table))}


def _columns(connection: Connection) -> set[str]:
    """Of the table of terms, in whichever revision it is; none where it is not there."""
    return set(connection.execute(_COLUMNS, {"table": table.name}).scalars())


def _holder() -> str:
    return holder_text(os.getpid())


def holder_text(process: int) -> str:
    """What the database has of who leads: a process of this machine."""
    return f"process {process} on {socket.gethostname()}"[:255]


def who_leads(database: PostgresqlDatabase) -> str:
    """Or led last, as `holder_text` has it; "" where no term was begun. Raises StorageError."""
    try:
        with database.engine.connect() as connection:
            rows = _rows(connection)
    except SQLAlchemyError as error:
        raise database.failed(error) from error
    finally:
        database.engine.dispose()
    return rows[_ROW].holder if _ROW in rows else ""


def _first_line(error: SQLAlchemyError) -> str:
    return " ".join(str(error.__cause__ or error).split())[:200]
