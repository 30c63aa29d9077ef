"""One coordinator leads on a database, and one that was overtaken writes nothing, however late it comes to write.

What can go wrong is made to happen: the leader is killed, stopped and continued, its session cut, the server started
anew. Sessions are cut by the server itself.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from lorica.demo.ports import free_ports
from lorica_coordinator.edges.database.open_store import leadership_of
from lorica_coordinator.edges.database.postgresql.leadership import (
    LATEST_TERM,
    LOCK,
    STANDBY,
    Leadership,
    alone,
    read_only,
)
from lorica_coordinator.edges.database.postgresql.place import DatabasePlace
from lorica_coordinator.edges.database.postgresql.server import PostgresqlDatabase
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.database.sealing.key_vault import FolderKeyVault
from lorica_coordinator.edges.kept.kept_file import ObjectName
from lorica_coordinator.service.ports import Overtaken
from lorica_coordinator.settings import Settings
from lorica_coordinator.vectors.key_place import MARK
from lorica_security.errors import ConfigurationError, Conflict, LoricaError, StorageError
from lorica_security.identifiers import FederationName
from tests.support.postgresql import SUPERUSER, PostgresqlServer, running_postgresql
from tests.support.rounds import FEDERATION, IDLE, STOPPED, T0, A
from tests.unit.test_rounds_store import enrolled_silo, invitation

IDENTITY = "ab" * 32


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


@pytest.fixture
def place(server: PostgresqlServer, tmp_path: Path, request: pytest.FixtureRequest) -> DatabasePlace:
    name = f"d{abs(hash(request.node.name)) % 10**9}"
    server.execute(f"CREATE DATABASE {name}")
    return DatabasePlace.parse(f"postgresql+psycopg://{SUPERUSER}@/{name}?host={server.folder}", tmp_path)


PATH = f"bundles/{'a' * 64}.bundle"


class Candidate:
    """A process that would lead, without the process."""

    def __init__(
        self, place: DatabasePlace, *, federation: FederationName = FEDERATION, identity: str = IDENTITY,
        session_s: float = 60.0, beat_s: float = 3600.0, doubt_s: float = 3600.0, keys: Path | None = None,
        kept_of: int = 0, key_place: Path | None = None,
    ) -> None:  # fmt: skip
        self.database = PostgresqlDatabase(place)
        self.keys = keys
        self.leadership = Leadership(
            place, self.database, federation, identity, session_s=session_s, beat_s=beat_s, doubt_s=doubt_s,
            later_than=lambda: 0 if keys is None else FolderKeyVault(keys, 0).newest_term(),
            kept_of=lambda: kept_of, key_place=key_place,
        )  # fmt: skip

    def take(self) -> bool:
        return self.leadership.take(lambda: SqlRoundStore(self.database, FEDERATION).close())

    def store(self) -> SqlRoundStore:
        vault = None if self.keys is None else FolderKeyVault(self.keys, self.leadership.term)
        return SqlRoundStore(self.database, FEDERATION, vault, self.leadership.fence)


def cut_the_session_that_leads(server: PostgresqlServer, place: DatabasePlace) -> None:
    found = server.rows(
        "SELECT pg_terminate_backend(l.pid, 5000) FROM pg_locks l JOIN pg_database d ON d.oid = l.database "
        f"WHERE l.locktype = 'advisory' AND d.datname = '{place.url.database}'"
    )
    assert found == [(True,)]


def everything(server: PostgresqlServer, place: DatabasePlace) -> list[Any]:
    """Every row of every table, as its transaction and place have it: a row written anew is another one."""
    names = server.rows(
        "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1", database=str(place.url.database)
    )
    return [
        (name, server.rows(f"SELECT xmin, ctid, * FROM {name} ORDER BY ctid", database=str(place.url.database)))
        for (name,) in names
    ]


def test_one_leads_and_another_takes_over_when_its_session_ends(place: DatabasePlace) -> None:
    first, second = Candidate(place), Candidate(place)
    assert first.take()
    first.leadership.hold()
    assert not second.take()
    first.store().transition(STOPPED, [], at=T0, now=T0)
    first.leadership.release()
    assert second.take()
    assert (first.leadership.term, second.leadership.term) == (1, 2)
    assert second.store().load(T0) == STOPPED
    with pytest.raises(Overtaken, match="another coordinator leads, in a later term than 1"):
        first.leadership.hold()
    second.leadership.hold()
    second.leadership.release()


WRITES: dict[str, Callable[[SqlRoundStore], object]] = {
    "transition": lambda store: store.transition(IDLE, [], at=T0, now=T0),
    "seen": lambda store: store.seen(A, T0 + 9),
    "invite": lambda store: store.invite(invitation(A)),
    "enrol": lambda store: store.enrol(enrolled_silo(A), secret_digest=invitation(A).secret_digest),
    "forget_details": lambda store: store.forget_details(T0 + 10**9),
    "void_invitations": lambda store: store.void_invitations(pins=()),
    "announce": lambda store: store.announce(A, bytes(32)),
    "load": lambda store: store.load(T0),
}


def test_who_was_overtaken_writes_nothing_and_is_told(
    place: DatabasePlace, server: PostgresqlServer, tmp_path: Path
) -> None:
    first, second = Candidate(place, keys=tmp_path / "keys"), Candidate(place, keys=tmp_path / "keys")
    assert first.take()
    stale = first.store()
    stale.invite(invitation(A))
    stale.enrol(enrolled_silo(A), secret_digest=invitation(A).secret_digest)
    stale.transition(STOPPED, [], at=T0, now=T0)
    cut_the_session_that_leads(server, place)
    assert second.take()
    before = everything(server, place)
    for write in WRITES.values():
        with pytest.raises(Overtaken, match="writes nothing any more; started again, it stands by"):
            write(stale)
    assert everything(server, place) == before
    second.leadership.release()


def test_a_transaction_under_way_ends_before_the_next_term_begins(
    place: DatabasePlace, server: PostgresqlServer
) -> None:
    """Or is undone by it: no transaction of an earlier term is saved after the next one has begun."""
    first, second = Candidate(place), Candidate(place)
    assert first.take()
    store = first.store()
    cut_the_session_that_leads(server, place)
    with store._transaction() as connection:
        connection.execute(text("SELECT 1"))
        waits = Leadership(place, second.database, FEDERATION, IDENTITY)
        assert waits._lock()
        with second.database.engine.connect() as other:
            other.execute(text("SET LOCAL lock_timeout = 50"))
            with pytest.raises(OperationalError, match="lock timeout"):
                other.execute(text("UPDATE leadership SET term = term + 1"))
        waits.release()
    assert second.take()
    second.leadership.release()


def test_a_session_that_was_cut_is_taken_up_again_where_nobody_led_since(
    place: DatabasePlace, server: PostgresqlServer
) -> None:
    first = Candidate(place)
    assert first.take()
    cut_the_session_that_leads(server, place)
    first.leadership.hold()
    first.store().transition(STOPPED, [], at=T0, now=T0)
    assert not Candidate(place).take()
    first.leadership.release()


def test_a_lock_that_is_free_again_is_not_for_who_was_overtaken(place: DatabasePlace, server: PostgresqlServer) -> None:
    first, second = Candidate(place), Candidate(place)
    assert first.take()
    cut_the_session_that_leads(server, place)
    assert second.take()
    second.leadership.release()
    with pytest.raises(Overtaken):
        first.leadership.hold()
    assert second.take(), "and it holds no lock"
    second.leadership.release()


def test_a_leader_that_asks_for_nothing_loses_its_session(place: DatabasePlace, server: PostgresqlServer) -> None:
    """As a process that is stopped: its host answers the server's probes, and it never proves that it lives."""
    first, second = Candidate(place, session_s=1.0), Candidate(place)
    assert second.take(), "which makes the tables: the other one asks for nothing while it begins, either"
    second.leadership.release()
    assert first.take()
    for _ in range(200):
        if second.take():
            break
        server.rows("SELECT pg_sleep(0.05)")
    assert second.leadership.term == 3
    with pytest.raises(Overtaken):
        first.leadership.hold()
    second.leadership.release()


def test_one_that_starts_slowly_is_proved_alive_meanwhile(place: DatabasePlace, server: PostgresqlServer) -> None:
    first, second = Candidate(place, session_s=0.3, beat_s=0.02), Candidate(place)

    def slowly() -> None:
        SqlRoundStore(first.database, FEDERATION).close()
        for _ in range(8):
            server.rows("SELECT pg_sleep(0.1)")
            assert not second.take()

    assert first.leadership.take(slowly)
    assert not second.take()
    first.leadership.release()
    assert second.take(), "as soon as it let go"
    second.leadership.release()


def test_one_that_is_overtaken_before_its_term_has_begun_begins_none(
    place: DatabasePlace, server: PostgresqlServer
) -> None:
    first, second = Candidate(place, beat_s=0.02), Candidate(place)

    def overtaken() -> None:
        SqlRoundStore(first.database, FEDERATION).close()
        with first.leadership._one_at_a_time:  # or its next beat has the lock again
            cut_the_session_that_leads(server, place)
            assert second.take()
        until_true(first.leadership.ended.done, server)

    with pytest.raises(Overtaken):
        first.leadership.take(overtaken)
    second.leadership.hold()
    assert second.leadership.term == 1
    second.store().transition(STOPPED, [], at=T0, now=T0)
    second.leadership.release()


def test_a_number_that_two_terms_have_fences_all_the_same(place: DatabasePlace, server: PostgresqlServer) -> None:
    """A server that falls back to a replica which lags knows nothing of the newest term."""
    first, second = Candidate(place), Candidate(place)
    assert first.take()
    stale = first.store()
    cut_the_session_that_leads(server, place)
    server.execute("UPDATE leadership SET term = 0, token = ''", database=str(place.url.database))
    assert second.take()
    assert second.leadership.term == first.leadership.term == 1
    with pytest.raises(Overtaken):
        stale.transition(STOPPED, [], at=T0, now=T0)
    second.leadership.release()
    with pytest.raises(Overtaken):
        first.leadership.hold()
    first.leadership.release()


@pytest.mark.parametrize("term", [LATEST_TERM, 2**63 - 1])
def test_no_term_is_begun_that_no_name_has_room_for(place: DatabasePlace, server: PostgresqlServer, term: int) -> None:
    """Files of such a term are found by nobody."""
    assert str(ObjectName(LATEST_TERM, PATH, "index")).startswith(f"t{LATEST_TERM}/")
    assert ObjectName.parse(str(ObjectName(LATEST_TERM, PATH, "index"))) is not None
    assert ObjectName.parse(str(ObjectName(LATEST_TERM + 1, PATH, "index"))) is None
    first = Candidate(place)
    assert first.take()
    first.leadership.release()
    server.execute(f"UPDATE leadership SET term = {term} WHERE id = 1", database=str(place.url.database))
    for _ in range(2):
        with pytest.raises(StorageError, match=rf"has the term {term} in its table leadership.*database of before"):
            Candidate(place).take()
    assert server.rows("SELECT term FROM leadership WHERE id = 1", database=str(place.url.database)) == [(term,)]
    server.execute(f"UPDATE leadership SET term = {LATEST_TERM - 1} WHERE id = 1", database=str(place.url.database))
    last = Candidate(place)
    assert last.take()
    assert last.leadership.term == LATEST_TERM
    last.leadership.release()


def test_a_term_begins_after_those_that_left_keys_whatever_the_database_says(
    place: DatabasePlace, server: PostgresqlServer, tmp_path: Path
) -> None:
    """A dump of an earlier instant was brought back: keys of the terms since open rows of the database as it was."""
    keys = tmp_path / "keys"
    first = Candidate(place, keys=keys)
    assert first.take()
    first.leadership.release()
    FolderKeyVault(keys, 7).make()
    second = Candidate(place, keys=keys)
    assert second.take()
    assert second.leadership.term == 8
    second.store().transition(STOPPED, [], at=T0, now=T0)
    assert list(keys.glob("*")) == []
    second.leadership.release()


def test_a_database_behind_the_bucket_is_refused_however_often_it_is_tried(
    place: DatabasePlace, server: PostgresqlServer, tmp_path: Path
) -> None:
    """It was put back: neither starts that fail nor keys of later terms bring it to the term of the files."""
    keys = tmp_path / "keys"
    with pytest.raises(StorageError, match=r"knows term 0, and .* has files of term 1"):
        Candidate(place, kept_of=1).take()
    first = Candidate(place)
    assert first.take()
    first.leadership.release()
    FolderKeyVault(keys, 9).make()
    before = everything(server, place)
    for _ in range(8):
        with pytest.raises(
            StorageError, match=r"knows term 1, and \[storage\] blobs has files of term 3: the database"
        ):
            Candidate(place, keys=keys, kept_of=3).take()
    assert everything(server, place) == before, "no term was begun"
    second = Candidate(place, kept_of=1)
    assert second.take(), "with files of its own newest term; and no lock was left"
    assert second.leadership.term == 2
    second.leadership.release()


def test_no_term_is_begun_where_the_folder_of_keys_is_another_one(
    place: DatabasePlace, server: PostgresqlServer, tmp_path: Path
) -> None:
    mount, database = tmp_path / "mount", str(place.url.database)
    mount.mkdir(mode=0o700)
    first = Candidate(place, key_place=mount)
    assert first.take()
    first.leadership.release()
    mark = (mount / MARK).read_text()
    assert server.rows("SELECT token FROM leadership WHERE id = 2", database=database) == [(mark.strip(),)]
    mount.rename(tmp_path / "mounted-elsewhere")
    mount.mkdir(mode=0o700)
    before = everything(server, place)
    for _ in range(3):
        with pytest.raises(StorageError, match=f"{MARK} is not there, and the database knows the folder"):
            Candidate(place, key_place=mount).take()
    assert everything(server, place) == before
    assert not list(mount.iterdir())
    mount.rmdir()
    (tmp_path / "mounted-elsewhere").rename(mount)
    second = Candidate(place, key_place=mount)
    assert second.take()
    assert (second.leadership.term, (mount / MARK).read_text()) == (2, mark)
    second.leadership.release()


def until_true(asked: Callable[[], bool], server: PostgresqlServer) -> None:
    for _ in range(400):
        if asked():
            return
        server.process.poll()
        threading.Event().wait(0.05)
    raise AssertionError("it did not come to that")


def test_one_in_doubt_ends_though_none_stood_by_when_it_last_looked(
    place: DatabasePlace, server: PostgresqlServer
) -> None:
    """Silos stay with who has their connection: it must not keep them while one leads that has come since."""
    first, second = Candidate(place, beat_s=0.02, doubt_s=0.0), Candidate(place)
    assert first.take()
    assert first.leadership.standbys == 0
    assert first.leadership.leads

    def away() -> None:
        with pytest.raises(StorageError, match=r"could not be told for 0 s: it ends, so that silos go to whoever"):
            first.leadership.ended.result(60)
        assert not first.leadership.leads

    server.restart(meanwhile=away)
    first.leadership.release()
    assert second.take()
    second.leadership.release()


def test_one_that_stands_by_goes_on_where_its_session_was_lost(place: DatabasePlace, server: PostgresqlServer) -> None:
    first, second = Candidate(place), Candidate(place)
    assert first.take()
    assert not second.take()
    ended = server.rows(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        f"WHERE application_name = '{STANDBY}' AND datname = '{place.url.database}'"
    )
    assert ended == [(True,)]
    assert not second.take()
    first.leadership.release()
    assert second.take()
    second.leadership.release()


def test_one_in_doubt_goes_on_asking_for_a_while(place: DatabasePlace, server: PostgresqlServer) -> None:
    first = Candidate(place, beat_s=0.02, doubt_s=3600.0)
    assert first.take()
    server.restart(meanwhile=lambda: until_true(lambda: not first.leadership.leads, server))
    until_true(lambda: first.leadership.leads, server)
    assert not first.leadership.ended.done()
    first.leadership.release()


def test_the_state_of_another_coordinator_is_refused_by_name(place: DatabasePlace) -> None:
    first = Candidate(place)
    assert first.take()
    first.leadership.release()
    for other in (
        Candidate(place, identity="cd" * 32),
        Candidate(place, federation=FederationName("elsewhere")),
    ):
        with pytest.raises(
            Conflict, match=rf"holds the state of another coordinator \(federation {FEDERATION}, identity"
        ):
            other.take()
    assert first.take(), "and they hold no lock"
    assert first.leadership.term == 2
    first.leadership.release()


def test_one_that_could_not_lead_does_not_stand_by_either(
    place: DatabasePlace, server: PostgresqlServer, tmp_path: Path
) -> None:
    mount, empty = tmp_path / "mount", tmp_path / "empty"
    for folder in (mount, empty):
        folder.mkdir(mode=0o700)
    first, second = Candidate(place, key_place=mount), Candidate(place, key_place=mount)
    assert first.take()
    others: tuple[tuple[dict[str, Any], type[LoricaError], str], ...] = (
        ({"identity": "cd" * 32}, Conflict, rf"another coordinator \(federation {FEDERATION}, identity key abab"),
        ({"federation": FederationName("elsewhere")}, Conflict, rf"another coordinator \(federation {FEDERATION}, id"),
        ({"key_place": None}, ConfigurationError, r'attempt_keys = "", and .* knows a folder of keys that several'),
        ({"key_place": empty}, StorageError, f"empty/{MARK} is not there, and the database knows the folder"),
    )
    for given, kind, said in others:
        with pytest.raises(kind, match=said):
            Candidate(place, **{"key_place": mount, **given}).take()
        first.leadership.hold()
        assert first.leadership.standbys == 0
    assert not second.take()
    assert second.leadership.holder == f"process {os.getpid()} on {socket.gethostname()}"
    first.leadership.hold()
    assert first.leadership.standbys == 1
    first.leadership.release()
    before = everything(server, place)
    for given, kind, said in others:
        with pytest.raises(kind, match=said):
            Candidate(place, **{"key_place": mount, **given}).take()
    assert everything(server, place) == before
    assert not list(empty.iterdir())
    assert second.take()
    second.leadership.release()


def test_one_that_stands_by_is_compared_anew_when_another_one_leads(place: DatabasePlace, tmp_path: Path) -> None:
    """The database may know a folder of keys since."""
    first, second, third = Candidate(place), Candidate(place), Candidate(place, key_place=tmp_path)
    assert first.take()
    assert not second.take()
    first.leadership.release()
    assert third.take()
    with pytest.raises(ConfigurationError, match="mount that folder here, and name it"):
        second.take()
    third.leadership.hold()
    assert third.leadership.standbys == 0
    third.leadership.release()


def test_who_does_not_lead_only_looks(place: DatabasePlace) -> None:
    first = Candidate(place)
    with pytest.raises(StorageError, match="has no tables yet: `coordinator serve` makes them"):
        SqlRoundStore(first.database, FEDERATION, None, read_only)
    assert first.take()
    first.store().transition(STOPPED, [], at=T0, now=T0)
    with closing(SqlRoundStore(first.database, FEDERATION, None, read_only)) as looking:
        assert looking.load(T0) == STOPPED
        with pytest.raises(StorageError, match="it is read-only"):
            looking.transition(IDLE, [], at=T0, now=T0)
    with (
        pytest.raises(Conflict, match="leads on this database: stop it"),
        Candidate(place).database.engine.begin() as connection,
    ):
        alone(connection)
    first.leadership.release()


def test_a_server_that_was_started_anew_is_led_on(place: DatabasePlace, server: PostgresqlServer) -> None:
    first = Candidate(place)
    assert first.take()

    def away() -> None:
        for _ in range(2):
            with pytest.raises(StorageError, match="cannot be read or written"):
                first.leadership.hold()

    server.restart(meanwhile=away)
    first.leadership.hold()
    first.store().transition(STOPPED, [], at=T0, now=T0)
    assert first.leadership.term == 1
    first.leadership.release()


def test_a_state_in_the_folder_is_not_left_behind_unnoticed(place: DatabasePlace, tmp_path: Path) -> None:
    url = f"postgresql+psycopg://{SUPERUSER}@/{place.url.database}?host={place.host}"
    parsed = Settings.parse(f'federation = "{FEDERATION}"\n[storage]\ndatabase = "{url}"\n', "federation.toml")
    settings = parsed.model_copy(update={"state": str(tmp_path)})
    with closing(SqlRoundStore(tmp_path / "state.sqlite", FEDERATION)) as folder:
        folder.invite(invitation(A))
        folder.enrol(enrolled_silo(A), secret_digest=invitation(A).secret_digest)
    found = leadership_of(settings, tmp_path, FEDERATION, IDENTITY)
    assert found is not None
    with pytest.raises(ConfigurationError, match=r"state\.sqlite has 1 silos, .* has no tables: nothing is moved"):
        found[0].take(found[1])
    (tmp_path / "state.sqlite").unlink()
    assert found[0].take(found[1])
    found[0].release()


# --- processes


def coordinator(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "lorica_coordinator.cli", *arguments, "--dir", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ)


def until(process: "subprocess.Popen[str]", said: str) -> None:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if said in line:
            return
    raise AssertionError("".join(lines)[-2000:])


@pytest.mark.slow
def test_one_that_stands_by_takes_over_from_a_killed_one_alone(
    server: PostgresqlServer, place: DatabasePlace, tmp_path: Path
) -> None:
    folder = tmp_path / "net"
    names = ("--silos-port", "--enrolment-port", "--metrics-port", "--status-port")
    ports = [word for name, port in zip(names, free_ports(4), strict=True) for word in (name, str(port))]
    database = str(place.url.database)
    url = f"postgresql+psycopg://{SUPERUSER}@/{database}?host={server.folder}"
    subprocess.run(
        [sys.executable, "-m", "lorica_coordinator.cli", "init", str(folder), "--no-plan", "--host", "localhost",
         "--database", url, *ports],
        check=True, capture_output=True,
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config")},
    )  # fmt: skip
    first = coordinator(folder, "serve")
    until(first, "serving")
    second = coordinator(folder, "serve")
    third = None
    try:
        until(second, "stands by")
        waiting = f"SELECT pid FROM pg_stat_activity WHERE application_name = '{STANDBY}' AND datname = '{database}'"
        assert server.rows(waiting) == [], "for the folder, before it asks who leads"
        rotated = coordinator(folder, "ca", "rotate")
        _, said = rotated.communicate(timeout=60)
        assert rotated.returncode == 0, said
        authority = folder / "keys/ca-2.key"
        before = authority.read_bytes()
        # One that is stopped loses its session and has the folder: nobody serves what it may still write.
        first.send_signal(signal.SIGSTOP)
        with psycopg.connect(server.url(user=SUPERUSER, database=database)) as session:
            session.execute("SELECT pg_advisory_lock(%s)", (LOCK,))
        assert server.rows("SELECT term FROM leadership", database=database) == [(1,)]
        first.send_signal(signal.SIGCONT)
        until(first, "leads on")
        assert second.poll() is None
        first.kill()
        until(second, "serving")
        assert server.rows("SELECT term FROM leadership", database=database) == [(2,)]
        assert authority.read_bytes() == before, "the authority that was begun while it stood by is there"
        third = coordinator(folder, "serve")
        until(third, "stands by")
        second.terminate()
        assert second.wait(60) == 0
        until(third, "serving")
        assert server.rows("SELECT term FROM leadership", database=database) == [(3,)]
        third.terminate()
        assert third.wait(60) == 0
    finally:
        for process in (first, second, third):
            if process is not None:
                process.kill()
                process.wait(60)
                assert process.stderr is not None
                process.stderr.close()
