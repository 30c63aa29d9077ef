"""A coordinator that stands by shows it, and one that was cut off from the database, or stopped, writes nothing when it
is back.

The cut is a proxy that passes nothing on: neither side hears of it, as when a switch fails. One is stopped before each
statement with which it comes to lead, and others do whatever they may meanwhile.
"""

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path

import pytest
from sqlalchemy import event

from lorica.demo.ports import free_ports
from lorica_coordinator.edges.database.postgresql.leadership import alone
from lorica_coordinator.edges.database.postgresql.place import DatabasePlace
from lorica_coordinator.edges.database.round_tables import TABLES_REVISION
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.edges.telemetry.standing_by import StandingBy
from lorica_coordinator.edges.upkeep.upgrade import upgrade_server
from lorica_coordinator.opened import Coordinator, leading
from lorica_coordinator.service.ports import Overtaken
from lorica_coordinator.settings import settings_text
from lorica_security.audit.entry import Event
from lorica_security.errors import ConfigurationError, Conflict, StorageError
from lorica_security.host.process_lock import ProcessLock, stands_by
from tests.integration.test_postgresql_leadership import Candidate, cut_the_session_that_leads, everything, until_true
from tests.integration.test_postgresql_settled import Federation
from tests.support.coordinator import initialise
from tests.support.postgresql import SUPERUSER, PostgresqlServer, running_postgresql
from tests.support.rounds import FEDERATION, IDLE, STOPPED, T0
from tests.support.s3_server import running_moto
from tests.support.waiting import until


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


class Cut:
    """Passes bytes on between who connects to `folder`'s socket and the server, until `cut`; `heal` ends what was open
    and passes on again."""

    def __init__(self, folder: Path, server: PostgresqlServer) -> None:
        self._server = str(server.folder / ".s.PGSQL.5432")
        self._at = folder / ".s.PGSQL.5432"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._at))
        self._listener.listen()
        self._open: list[socket.socket] = []
        self._whole = threading.Event()
        self._whole.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        former, self._open = self._open, []
        for one in former:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._whole.set()

    def close(self) -> None:
        """Nobody gets through any more."""
        self._at.unlink(missing_ok=True)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.heal()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                inside, _ = self._listener.accept()
                outside = socket.socket(socket.AF_UNIX)
                outside.connect(self._server)
                self._open += [inside, outside]
                for source, sink in ((inside, outside), (outside, inside)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                self._whole.wait()
                sink.sendall(content)
        if self._whole.is_set():  # nobody hears of an end through a cut
            for one in (source, sink):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


def test_one_that_is_cut_off_from_the_database_writes_nothing_when_it_is_back(
    server: PostgresqlServer, tmp_path: Path
) -> None:
    server.execute("CREATE DATABASE cut")
    way = Cut(tmp_path, server)
    through = DatabasePlace.parse(f"postgresql+psycopg://{SUPERUSER}@/cut?host={tmp_path}", tmp_path)
    place = DatabasePlace.parse(f"postgresql+psycopg://{SUPERUSER}@/cut?host={server.folder}", tmp_path)
    first = Candidate(through, session_s=0.3, beat_s=0.02, keys=tmp_path / "keys")
    second = Candidate(place, keys=tmp_path / "keys")
    assert first.take()
    store = first.store()
    store.transition(STOPPED, [], at=T0, now=T0)
    assert not second.take()
    with ThreadPoolExecutor(1) as pool:
        way.cut()
        under_way = pool.submit(lambda: store.transition(IDLE, [], at=T0, now=T0))
        until_true(second.take, server)
        assert second.leadership.term == 2
        second.store().transition(STOPPED, [], at=T0 + 1, now=T0 + 1)
        before = everything(server, place)
        way.heal()
        with pytest.raises((StorageError, Overtaken)):  # with its connection, or with another one that it is given
            under_way.result(60)
    with pytest.raises(Overtaken):
        first.leadership.ended.result(60)
    with pytest.raises(Overtaken):
        store.transition(IDLE, [], at=T0, now=T0)
    assert everything(server, place) == before
    assert not first.leadership.leads
    for one in (first, second):
        one.leadership.release()
    way.close()


def test_one_in_doubt_ends_where_another_stood_by(server: PostgresqlServer, tmp_path: Path) -> None:
    """Silos stay with who has their connection: it must not keep them while another one leads."""
    server.execute("CREATE DATABASE doubt")
    way = Cut(tmp_path, server)
    through = DatabasePlace.parse(f"postgresql+psycopg://{SUPERUSER}@/doubt?host={tmp_path}", tmp_path)
    place = DatabasePlace.parse(f"postgresql+psycopg://{SUPERUSER}@/doubt?host={server.folder}", tmp_path)
    first, second = Candidate(through, beat_s=0.02, doubt_s=0.0), Candidate(place)
    assert first.take()
    assert not second.take()
    first.leadership.hold()
    assert first.leadership.standbys == 1
    assert first.leadership.leads
    way.close()
    with pytest.raises(StorageError, match=r"could not be told for 0 s: it ends"):
        first.leadership.ended.result(60)
    assert not first.leadership.leads
    until_true(second.take, server)
    for one in (first, second):
        one.leadership.release()


@pytest.fixture
def pair(server: PostgresqlServer, tmp_path: Path) -> tuple[CoordinatorFolder, CoordinatorFolder]:
    """Two folders of one coordinator."""
    name = f"pair{tmp_path.stat().st_ino}"
    server.execute(f"CREATE DATABASE {name}")
    url = f"postgresql+psycopg://{SUPERUSER}@/{name}?host={server.folder}"
    first, second = CoordinatorFolder(tmp_path / "first"), CoordinatorFolder(tmp_path / "second")
    first.root.mkdir()
    KeyStore.create(first.keys, FEDERATION, datetime.now(UTC))
    text = settings_text(FEDERATION, ["localhost"]).replace('database = ""', f'database = "{url}"')
    first.settings.write_text(text)
    shutil.copytree(first.root, second.root)
    return first, second


def take_over(pair: tuple[CoordinatorFolder, CoordinatorFolder], meanwhile: Callable[[Path], None]) -> Coordinator:
    """The first of `pair` leads, the second stands by, `meanwhile` does something to its folder, and it leads."""
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(leading(Coordinator.load(pair[0])))

        def waiting() -> None:
            meanwhile(pair[1].root)
            first.close()

        return second.enter_context(leading(Coordinator.load(pair[1]), waiting=waiting))


def test_one_that_takes_over_begins_with_the_settings_that_its_folder_has_then(
    pair: tuple[CoordinatorFolder, CoordinatorFolder],
) -> None:
    def other_days(folder: Path) -> None:
        file = folder / "federation.toml"
        file.write_text(file.read_text().replace("models_days = 30", "models_days = 31"))

    leads = take_over(pair, other_days)
    assert leads.settings.retention.models_days == 31
    assert leads.leadership is not None
    assert leads.leadership.term == 2


def test_and_not_at_all_where_they_name_no_database_any_more(
    pair: tuple[CoordinatorFolder, CoordinatorFolder],
) -> None:
    def emptied(folder: Path) -> None:
        file = folder / "federation.toml"
        lines = file.read_text().splitlines()
        file.write_text("\n".join('database = ""' if it.startswith("database =") else it for it in lines))

    with pytest.raises(ConfigurationError, match="database was emptied while this coordinator stood by: start it ag"):
        take_over(pair, emptied)


def test_and_not_as_another_coordinator(pair: tuple[CoordinatorFolder, CoordinatorFolder]) -> None:
    def others(folder: Path) -> None:
        shutil.rmtree(folder / "keys")
        KeyStore.create(folder / "keys", FEDERATION, datetime.now(UTC))

    with pytest.raises(Conflict, match="holds the state of another coordinator"):
        take_over(pair, others)


def test_one_that_stands_by_has_the_leaders_files_before_it_takes_over(
    pair: tuple[CoordinatorFolder, CoordinatorFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To take over is no download then: nobody trains meanwhile."""
    path = f"bundles/{'ab' * 32}.bundle"
    keys = tmp_path / "attempt-keys"
    keys.mkdir(mode=0o700)
    with running_moto(tmp_path) as moto, ExitStack() as first, ExitStack() as second:
        for folder in pair:
            text = folder.settings.read_text().replace('blobs = ""', f'blobs = "{moto.url("ahead")}"')
            folder.settings.write_text(text.replace('attempt_keys = ""', f'attempt_keys = "{keys}"'))
        leader = first.enter_context(leading(Coordinator.load(pair[0])))
        there, here = (Coordinator.load(folder).settings.state_folder / path for folder in pair)
        there.parent.mkdir(parents=True)
        there.write_bytes(b"the bundle")
        leader.kept.keep(there)

        def waiting() -> None:
            until(here.is_file, lambda: None, 60)
            capsys.readouterr()
            first.close()

        second.enter_context(leading(Coordinator.load(pair[1]), waiting=waiting))
        assert here.read_bytes() == b"the bundle"
        said = capsys.readouterr()
        assert "are settled" in said.out + said.err
        assert "brought=0" in said.out + said.err, said


def asked(port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    said = answer.status, answer.read().decode()
    connection.close()
    return said


def test_one_that_stands_by_is_alive_and_not_ready_and_frees_its_port(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    file = tmp_path / "federation.toml"
    file.write_text(settings_text("north", ["localhost"], metrics_port=port))
    path = tmp_path / "coordinator.lock"
    with StandingBy(file) as stand_by, ProcessLock(path, "coordinator") as lock:
        stand_by()
        assert not stands_by(path)
        stand_by.lock = lock
        stand_by()
        assert stands_by(path)
        before = path.stat().st_mtime_ns
        stand_by()
        assert path.stat().st_mtime_ns > before
        stand_by._begun.wait(20)
        assert asked(port, "/ready")[0] == 503
        status, text = asked(port, "/metrics")
        assert status == 200
        assert "\nlorica_leading 0.0\n" in text
        assert "\nlorica_leadership_term 0.0\n" in text
        assert "lorica_standby_coordinators" not in text
        assert "lorica_plan_running" not in text, "of rounds it knows nothing"
        stand_by.end()
        assert not stands_by(path)
        with socket.create_server(("127.0.0.1", port)), StandingBy(file) as second:
            second.lock = lock
            second()  # the port is of another coordinator on this machine: it stands by all the same
            assert second._begun.wait(20)


@pytest.mark.parametrize(
    ("host", "listens"), [("127.0.0.1", False), ("localhost", False), ("[::1]", False), ("metrics", True)]
)
def test_on_one_folder_it_listens_on_no_address_that_whoever_leads_next_wants(
    host: str, listens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was started again took it before the one that led next: a name alone may be each one's own address."""
    file, served = tmp_path / "federation.toml", []
    file.write_text(settings_text("north", ["localhost"], metrics_host=host))
    monkeypatch.setattr(StandingBy, "_serve", lambda self, settings: (served.append(host), self._begun.set()))
    with StandingBy(file) as stand_by:
        stand_by()
        stand_by.end()
        assert served == [host] * listens


COMMANDS = (
    ("status",), ("invite", "north"), ("revoke", "north"), ("ca", "rotate"), ("gc",), ("plan", "start", "default"),
)  # fmt: skip


def test_a_command_where_nobody_leads_names_who_does(server: PostgresqlServer, tmp_path: Path) -> None:
    """At once: with a coordinator that stands by on that machine, and without one."""
    first = Federation(server, initialise(tmp_path / "first"), "commands")
    shutil.copytree(first.folder.root, tmp_path / "second")
    first.folder, second = CoordinatorFolder(tmp_path / "second"), first.folder
    with leading(Coordinator.load(second)):
        server.execute("UPDATE leadership SET holder = 'process 7 on north-a'", database="commands")
        for words in COMMANDS:
            said = "process 7 on north-a leads on the database of [storage] database: give this command where that one"
            first.command(*words).is_refusal(Conflict, said)
        with ProcessLock(first.folder.lock, "coordinator") as lock:
            lock.tell(stands_by=True)
            for words in COMMANDS:
                said = f"(process {os.getpid()}) stands by, and process 7 on north-a leads: give this command there"
                first.command(*words).is_refusal(Conflict, said)
            (found,) = [one for one in json.loads(first.command("check", "--json").out) if one["name"] == "process"]
            assert found["outcome"] == "passed"
            assert found["detail"] == f"process {os.getpid()} stands by: another coordinator leads"


def test_an_upgrade_where_another_one_leads_is_refused_and_the_log_tells_of_none(
    server: PostgresqlServer, tmp_path: Path
) -> None:
    federation = Federation(server, initialise(tmp_path / "first"), "wrong_machine")
    elsewhere = CoordinatorFolder(shutil.copytree(federation.folder.root, tmp_path / "second"))
    with leading(Coordinator.load(elsewhere)) as leader:
        audit = leader.audit()
        audit.append(Event.STARTED)
        audit.seal()
        before = len(federation.reading().entries)
        refused = federation.command("upgrade")
        refused.is_refusal(Conflict, f"process {os.getpid()} on", "leads on this database: stop it, and those that")
        federation.command("upgrade", "--to", "0001").is_refusal(ConfigurationError, "is no revision from 0011")
        assert len(federation.reading().entries) == before


# --- stopped at an instant of the adversary's choice


def place_of(server: PostgresqlServer, folder: Path, name: str) -> DatabasePlace:
    server.execute(f"CREATE DATABASE {name}")
    return DatabasePlace.parse(f"postgresql+psycopg://{SUPERUSER}@/{name}?host={server.folder}", folder)


def made(place: DatabasePlace) -> None:
    """With tables, and a term that is over."""
    first = Candidate(place)
    assert first.take()
    first.leadership.release()


@contextmanager
def stopped_before(candidate: Candidate, statement: int, meanwhile: Callable[[], None]) -> Iterator[list[str]]:
    """`meanwhile` happens before that statement, counted from the one that asks for the lock; all are listed."""
    said: list[str] = []

    def before(connection: object, cursor: object, text: str, *rest: object) -> None:
        if said or "pg_try_advisory_lock" in text:
            said.append(text)
            if len(said) == statement:
                meanwhile()

    engines = (candidate.leadership._sessions, candidate.database.engine)
    for engine in engines:
        event.listen(engine, "before_cursor_execute", before)
    try:
        yield said
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", before)


def leads(candidate: Candidate) -> bool:
    try:
        candidate.leadership.hold()
        with candidate.database.engine.begin() as connection:
            candidate.leadership.fence(connection)
    except (StorageError, Overtaken):
        return False
    return candidate.leadership.leads


class Others:
    """What happens while one is stopped: its session has ended, and another one ..."""

    def __init__(self, place: DatabasePlace, server: PostgresqlServer) -> None:
        self.second = Candidate(place)
        self.prepared: list[str] = []
        self.going_on = threading.Event()
        self.taken: Future[bool] | None = None
        self._place, self._server = place, server
        self._pool = ThreadPoolExecutor(1)

    def do(self, deed: str) -> None:
        with suppress(AssertionError):  # it had none yet
            cut_the_session_that_leads(self._server, self._place)
        getattr(self, deed)()

    def leads(self) -> None:
        assert self.second.leadership.take(lambda: None)

    def led_and_ended(self) -> None:
        self.leads()
        self.second.leadership.release()

    def is_about_to_lead(self) -> None:
        locked = threading.Event()

        def slowly() -> None:
            locked.set()
            assert self.going_on.wait(60)

        self.taken = self._pool.submit(lambda: self.second.leadership.take(slowly))
        assert locked.wait(60)

    def changed_the_tables(self) -> None:
        with self.second.database.engine.begin() as connection:
            alone(connection)
        self.prepared.clear()

    def end(self) -> None:
        self.going_on.set()
        if self.taken is not None:
            assert self.taken.result(60)
        self._pool.shutdown()


STATEMENTS = 8
"""From the lock on: lock, name, columns, newest term; newest term, insert or update; columns, newest term."""


@pytest.mark.parametrize("ever", [True, False], ids=["after a term", "the first term"])
@pytest.mark.parametrize("deed", ["leads", "led_and_ended", "is_about_to_lead", "changed_the_tables"])
def test_whenever_one_is_stopped_as_it_comes_to_lead_one_leads(
    server: PostgresqlServer, tmp_path: Path, deed: str, ever: bool
) -> None:
    place = place_of(server, tmp_path, f"s_{deed}_{ever}".lower())
    made(place)
    for statement in range(1, STATEMENTS + 1):
        if not ever:
            server.execute("DELETE FROM leadership", database=str(place.url.database))
        others = Others(place, server)
        first, took = Candidate(place), False
        with (
            stopped_before(first, statement, lambda others=others: others.do(deed)) as said,  # type: ignore[misc]
            suppress(StorageError, Overtaken),
        ):
            took = first.leadership.take(lambda others=others: others.prepared.append("again"))  # type: ignore[misc]
        others.end()
        assert len(said) >= statement, said
        if deed in ("leads", "is_about_to_lead"):
            assert leads(others.second), (statement, said)
            assert not took
        assert took is (statement == 1 and deed in ("led_and_ended", "changed_the_tables")), (statement, said)
        assert not took or others.prepared, "it leads on tables that it has not looked at"
        for one in (others.second, first):
            one.leadership.release()
        last = Candidate(place)
        assert last.take(), "nobody has the lock"
        last.leadership.release()
        for one in (others.second, first, last):
            one.database.engine.dispose()


def test_one_that_lost_the_lock_before_it_led_does_not_take_it_again(server: PostgresqlServer, tmp_path: Path) -> None:
    """Whoever had it in between may have changed the tables that this one has looked at."""
    place = place_of(server, tmp_path, "again")
    made(place)
    first = Candidate(place)

    def prepare() -> None:
        cut_the_session_that_leads(server, place)
        for _ in range(2):  # as its beats do
            with pytest.raises(Overtaken, match="the session that had the lock was lost before a term began"):
                first.leadership.hold()

    with pytest.raises(Overtaken, match="the session that had the lock was lost before a term began"):
        first.leadership.take(prepare)
    assert not first.leadership.leads
    made(place)


OLDER = {
    "0012": (
        "DROP TABLE audit_log, release_ledger, closed_plans, release_root",
        "DROP FUNCTION lorica_added_to_alone()",
        "UPDATE alembic_version SET version_num = '0012'",
        "UPDATE schema SET version = 12",
    ),
    "0011": (
        "ALTER TABLE machine DROP COLUMN sealed_under",
        "ALTER TABLE leadership DROP COLUMN token",
        "UPDATE alembic_version SET version_num = '0011'",
        "UPDATE schema SET version = 11",
    ),
}


def with_older_tables(server: PostgresqlServer, place: DatabasePlace, revision: str) -> None:
    for older in sorted(OLDER, reverse=True):
        if older >= revision:
            server.execute(*OLDER[older], database=str(place.url.database))


@pytest.mark.parametrize("revision", sorted(OLDER))
def test_an_upgrade_ends_the_term_of_a_leader_that_hangs(
    server: PostgresqlServer, tmp_path: Path, revision: str
) -> None:
    """It goes on with the code of the release before, on tables that it does not know, unless it is fenced."""
    place = place_of(server, tmp_path, f"hangs{revision}")
    first, second = Candidate(place), Candidate(place)
    assert first.take()
    stale = first.store()
    with_older_tables(server, place, revision)
    cut_the_session_that_leads(server, place)
    done = upgrade_server(second.database)
    assert (done.before, done.after) == (revision, TABLES_REVISION)
    numbers = server.rows("SELECT term FROM leadership", database=str(place.url.database))
    assert numbers == [(2,)], "tables of 0011 have nothing else to compare"
    with pytest.raises(Overtaken):
        stale.transition(STOPPED, [], at=T0, now=T0)
    with pytest.raises(Overtaken):
        first.leadership.hold()
    assert second.take()
    assert second.leadership.term == 3
    second.leadership.release()


def test_nobody_comes_to_lead_while_tables_change(server: PostgresqlServer, tmp_path: Path) -> None:
    place = place_of(server, tmp_path, "changing")
    made(place)
    upgrade, second = Candidate(place), Candidate(place)
    with upgrade.database.engine.begin() as connection:
        alone(connection)
        assert not second.take()
    assert second.take()
    before = everything(server, place)
    with pytest.raises(Conflict, match="leads on this database"):
        upgrade_server(upgrade.database, to="0012")
    assert everything(server, place) == before
    assert leads(second)
    second.leadership.release()
