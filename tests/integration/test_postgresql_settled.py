"""A database that was put back from an older dump: it is not led on before it is settled, and what was done since is
not undone.

A real pg_dump and pg_restore, and the commands as an operator types them.
"""

import json
import os
import queue
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore
from sqlalchemy.engine.default import DefaultDialect

from lorica_coordinator import cli
from lorica_coordinator.edges.database import open_store
from lorica_coordinator.edges.database.round_tables import TABLES_REVISION
from lorica_coordinator.edges.kept import opening
from lorica_coordinator.edges.kept.bucket import Bucket
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.server.audited import AuditedStore
from lorica_coordinator.edges.upkeep import taken_up
from lorica_coordinator.opened import Coordinator, leading
from lorica_coordinator.service.unusable import BudgetSpent
from lorica_security.audit.entry import Event
from lorica_security.daemon import heartbeat
from lorica_security.errors import ConfigurationError, IntegrityError, StorageError
from lorica_security.on_disk.log_file import AuditLog, lines, segments
from lorica_security.on_disk.reading import Reading, read_log
from silo_wire.canonical import Digest
from silo_wire.plans.privacy import PrivacySection
from tests.support.command_line import Done, run_command
from tests.support.coordinator import initialise
from tests.support.coordinator_edges import round_key
from tests.support.postgresql import SUPERUSER, PostgresqlServer, running_postgresql
from tests.support.rounds import ONE_OF_EACH_STATE, T0, A, B, C
from tests.unit import test_rounds_store as contract
from tests.unit.test_rounds_store import enrolled_silo, invitation

COLLECTING = next(state for state in ONE_OF_EACH_STATE.values() if state.phase == "collecting")
PLAN = Digest("a" * 64)
PRIVATE = PrivacySection(
    level="silo", noise_multiplier=4.0, target_epsilon=8.0, dp_delta=1e-5, nominal_silos=10, max_noise_to_signal=1e6
)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


class Federation:
    """A coordinator's folder with its state in a database of its own."""

    def __init__(self, server: PostgresqlServer, folder: CoordinatorFolder, name: str) -> None:
        self.server, self.folder, self.name = server, folder, name
        server.execute(f"CREATE DATABASE {name}")
        self.url = f"postgresql+psycopg://{SUPERUSER}@/{name}?host={server.folder}"
        text = folder.settings.read_text()
        folder.settings.write_text(text.replace('database = ""', f'database = "{self.url}"'))

    def command(self, *words: str | Path) -> Done:
        return run_command(cli.main, *words, "--dir", self.folder.root)

    def tool(self, name: str, *words: str | Path) -> None:
        (program,) = list(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))[:1]
        command = [program, "-U", SUPERUSER, "-h", self.server.folder, "-d", self.name, *words]
        subprocess.run(command, check=True, capture_output=True, env={"PATH": os.defpath})

    def dump(self, to: Path) -> Path:
        self.tool("pg_dump", "-Fc", "-f", to)
        return to

    def put_back(self, dump: Path) -> None:
        self.tool("pg_restore", "--clean", dump)

    def enrol(self, *silos: str) -> None:
        with leading(Coordinator.load(self.folder)) as leader:
            store, audit = leader.open_store(), leader.audit()
            for silo in silos:
                offered = invitation(silo, silo.encode())  # type: ignore[arg-type]
                store.invite(offered)
                AuditedStore(store, audit).enrol(enrolled_silo(silo), secret_digest=offered.secret_digest)  # type: ignore[arg-type]
            audit.seal()
            store.close()

    def release(self, *rounds: int, plan: Digest = PLAN) -> None:
        with leading(Coordinator.load(self.folder)) as leader:
            audit = leader.audit()
            releases = leader.releases_told(audit)
            for number in rounds:
                releases.noise_key(b"")
                releases.enter(round_key(plan, number), b"sum %d" % number, PRIVATE)
            audit.seal()

    def silos(self) -> dict[str, bool]:
        rows = self.server.rows("SELECT silo, revoked_at IS NULL FROM silos ORDER BY silo", database=self.name)
        return {str(silo): bool(there) for silo, there in rows}

    def reading(self) -> Reading:
        coordinator = Coordinator.load(self.folder)
        return read_log(coordinator.audit().place, keys=[coordinator.keys.identity.public_key()])


@pytest.fixture
def federation(server: PostgresqlServer, tmp_path: Path, request: pytest.FixtureRequest) -> Federation:
    return Federation(server, initialise(tmp_path / "net"), f"d{abs(hash(request.node.name)) % 10**9}")


@pytest.fixture(scope="module")
def lost(server: PostgresqlServer, tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """After its dump A was revoked, C enrolled with a token from before, B invited again, and a second sum released; the
    log was exported."""
    folder = tmp_path_factory.mktemp("lost")
    federation = Federation(server, initialise(folder / "net"), "lost")
    federation.enrol(A, B)
    federation.release(1)
    assert federation.command("invite", C).code == 0
    federation.dump(folder / "old.dump")
    assert federation.command("invite", B).code == 0
    assert federation.command("audit", "export", folder / "early").code == 0
    assert federation.command("revoke", A).code == 0
    federation.enrol(C)
    federation.release(2)
    exported = federation.command("audit", "export", folder / "copy")
    assert exported.code == 0, exported.err
    assert "2 of the ledger of releases" in exported.out
    shutil.copytree(folder / "net", folder / "as it was")
    return federation


@pytest.fixture
def put_back(lost: Federation) -> Federation:
    """The older dump is put back, beside the folder as it was."""
    bring_back(lost)
    return lost


def bring_back(lost: Federation) -> None:
    home = lost.folder.root.parent
    shutil.rmtree(lost.folder.root)
    shutil.copytree(home / "as it was", lost.folder.root)
    lost.put_back(home / "old.dump")


def checks_of(federation: Federation) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(federation.command("check", "--json").out)
    return found


@pytest.fixture
def copy(lost: Federation) -> Path:
    return lost.folder.root.parent / "copy"


def test_an_older_dump_is_refused_until_it_is_settled_with_the_newer_log(put_back: Federation, copy: Path) -> None:
    before = read_log(copy).entries
    refused = put_back.command("invite", C)
    refused.is_refusal(IntegrityError, "has no entry", "put back to an earlier instant", "`coordinator settle`")
    (checked,) = [one for one in checks_of(put_back) if one["name"] == "state database"]
    assert "has no entry" in checked["detail"], checked
    put_back.command("settle").is_refusal(ConfigurationError, "--without-log where it is lost")
    done = put_back.command("settle", "--log", copy, "--ledger", copy / "ledger")
    assert done.code == 0, done.err
    assert f"enrolled, as the newer log has it: {B}, {C}; who was revoked since stays so" in done.out
    assert "closed:" not in done.out
    assert put_back.silos() == {A: False, B: True, C: True}
    assert put_back.server.rows("SELECT count(*) FROM invitations WHERE spent_at IS NULL", database=put_back.name) == [
        (0,)
    ]
    reading = put_back.reading()
    assert reading.entries[: len(before)] == before, "one history, which goes on"
    told = [one for one in reading.of(Event.OPERATOR_COMMAND) if one.text("command") == "settle"]
    assert [one.text("newer_log") for one in told] == ["yes"]
    assert put_back.command("invite", C).code == 0
    put_back.release(1, 2, 3)
    assert [one.round for one in Coordinator.load(put_back.folder).releases.kept.entries()] == [1, 2, 3]
    again = put_back.command("settle", "--log", copy, "--ledger", copy / "ledger")
    again.is_refusal(IntegrityError, "ends with entry", "cut off, or the log was put back from a backup")


def test_without_the_newer_ledger_plans_are_closed(put_back: Federation, copy: Path, tmp_path: Path) -> None:
    """The log may be one whose last entry has no seal yet."""
    unsealed = Path(shutil.copytree(copy, tmp_path / "unsealed"))
    newest = segments(unsealed)[-1]
    newest.write_bytes(b"".join(newest.read_bytes().splitlines(keepends=True)[:-1]))
    done = put_back.command("settle", "--log", unsealed)
    assert done.code == 0, done.err
    assert f"closed: plan {PLAN[:16]}, of which sums may have been released since" in done.out
    with pytest.raises(BudgetSpent, match="came from a backup"):
        put_back.release(3)
    assert put_back.silos() == {A: False, B: True, C: True}


def test_a_log_that_ends_before_what_the_folder_knows_is_taken_by_word_alone(put_back: Federation, copy: Path) -> None:
    """Else who was revoked since it was copied is in again, and epsilon that was spent since is forgotten, unsaid."""
    early = copy.with_name("early")
    end, known = len(read_log(early).entries), len(read_log(copy).entries)
    words = ("settle", "--log", early, "--ledger", early / "ledger")
    for _ in range(2):
        put_back.command(*words).is_refusal(
            ConfigurationError, f"ends with entry {end}, and entry {known} is known", "--without-rest"
        )
    put_back.command("invite", C).is_refusal(IntegrityError, "`coordinator settle`")
    done = put_back.command(*words, "--without-rest")
    assert done.code == 0, done.err
    assert f"whoever was revoked by entries {end + 1} to {known}, which are lost, is in again" in done.out
    assert "stays so" not in done.out
    assert put_back.silos() == {A: True, B: True}
    assert f"closed: plan {PLAN[:16]}, of which sums may have been released since" in done.out
    with pytest.raises(BudgetSpent, match="came from a backup"):
        put_back.release(3)


def test_a_ledger_that_ends_before_what_the_folder_knows_closes_its_plans(put_back: Federation, copy: Path) -> None:
    """Also where the log that came with it is whole, and where its last sum is of a plan that nothing else names."""
    done = put_back.command("settle", "--log", copy, "--ledger", copy.with_name("early") / "ledger")
    assert done.code == 0, done.err
    assert f"closed: plan {PLAN[:16]}" in done.out
    with pytest.raises(BudgetSpent, match="came from a backup"):
        put_back.release(3)


def test_without_the_newer_log_that_is_said_and_plans_are_closed(put_back: Federation, copy: Path) -> None:
    done = put_back.command("settle", "--without-log")
    assert done.code == 0, done.err
    assert f"let in again, who was revoked since as well: {A}, {B}" in done.out
    assert f"closed: plan {PLAN[:16]}" in done.out
    told = [one for one in put_back.reading().of(Event.OPERATOR_COMMAND) if one.text("command") == "settle"]
    assert [(one.text("newer_log"), one.text("newer_ledger")) for one in told] == [("no", "no")]
    assert put_back.command("invite", C).code == 0
    late = put_back.command("settle", "--log", copy)
    late.is_refusal(IntegrityError, "written anew from an entry after")


def test_a_kill_while_it_is_settled_leaves_what_can_be_settled_again(
    put_back: Federation, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its transactions that write: records, ledger, log and entry are there or not. Nobody leads before its end."""
    words = ("settle", "--log", copy, "--ledger", copy / "ledger")
    for at in (3, 6) if "CI" in os.environ else (2, 3, 6, 7):
        assert killed(put_back, words, at, monkeypatch)
        if at < 6:
            put_back.command("invite", C).is_refusal(IntegrityError, "`coordinator settle`")
        done = put_back.command(*words)
        assert done.code == 0, done.err
        assert put_back.silos() == {A: False, B: True, C: True}
        assert [one.round for one in Coordinator.load(put_back.folder).releases.kept.entries()] == [1, 2]
        told = [one for one in put_back.reading().of(Event.OPERATOR_COMMAND) if one.text("command") == "settle"]
        assert told, "it stands in the log"
        bring_back(put_back)


class Killed(BaseException):
    """As a process that is no more: nothing of it is done after this."""


def killed(federation: Federation, words: Sequence[str | Path], at: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """False where the command came to its end first."""
    commit, left = DefaultDialect.do_commit, [at]

    def counted(dialect: DefaultDialect, connection: Any) -> None:
        wrote = connection.execute("SELECT pg_current_xact_id_if_assigned() IS NOT NULL").fetchone()[0]
        commit(dialect, connection)
        left[0] -= wrote
        if wrote and left[0] == 0:
            raise Killed

    with monkeypatch.context() as killing:
        killing.setattr(DefaultDialect, "do_commit", counted)
        try:
            federation.command(*words)
        except Killed:
            return True
    return False


def test_a_round_that_was_under_way_is_given_up_and_the_plan_stopped(federation: Federation) -> None:
    with leading(Coordinator.load(federation.folder), to_settle=True) as leader:
        store = leader.open_store()
        contract.enrol(store, A)
        store.transition(COLLECTING, [], at=T0, now=T0)
        store.close()
    assert federation.command("settle", "--without-log").code == 0
    assert federation.server.rows("SELECT phase FROM machine", database=federation.name) == [("stopped",)]


def test_who_takes_over_with_an_empty_folder_does_not_go_on_with_an_older_database(
    federation: Federation, tmp_path: Path
) -> None:
    """As in a cluster: what both pods see is the database, and the folder of keys."""
    mount = tmp_path / "mount"
    mount.mkdir(mode=0o700)
    settings = federation.folder.settings
    settings.write_text(settings.read_text().replace('attempt_keys = ""', f'attempt_keys = "{mount}"'))
    federation.enrol(A)
    dump = federation.dump(tmp_path / "older")
    federation.enrol(B)
    federation.release(1)
    with leading(Coordinator.load(federation.folder)) as leader:
        noise = leader.releases.noise_key(b"sum 1")
    other = CoordinatorFolder(tmp_path / "another-pod")
    other.root.mkdir(mode=0o700)
    shutil.copytree(federation.folder.keys, other.keys)
    shutil.copy2(settings, other.settings)
    shutil.rmtree(federation.folder.root)
    with leading(Coordinator.load(other)) as successor:
        assert successor.releases.noise_key(b"sum 1") == noise
    federation.put_back(dump)
    shutil.rmtree(other.audit)
    shutil.rmtree(other.root / "state", ignore_errors=True)
    with (
        pytest.raises(IntegrityError, match=rf"{mount}/[0-9a-f]{{64}}/audit/.* put back to an earlier instant"),
        leading(Coordinator.load(other)),
    ):
        pass
    assert f"which {mount}/" in run_command(cli.main, "check", "--dir", other.root).out
    settled = run_command(cli.main, "settle", "--without-log", "--dir", other.root)
    assert settled.code == 0, settled.err
    with leading(Coordinator.load(other)):
        pass


def test_a_closed_plan_whose_row_is_gone_is_closed_again(federation: Federation) -> None:
    """The log has it, which somebody who writes the database does not take back."""
    with leading(Coordinator.load(federation.folder)) as leader:
        leader.releases.close([PLAN])
    with leading(Coordinator.load(federation.folder)):
        pass  # it enters what is closed
    federation.server.execute(
        "ALTER TABLE closed_plans DISABLE TRIGGER ALL", "DELETE FROM closed_plans", database=federation.name
    )
    federation.command("invite", A).is_refusal(IntegrityError, "is not closed any more", "`coordinator settle`")
    assert federation.command("settle", "--without-log").code == 0
    assert Coordinator.load(federation.folder).releases.closed() == {PLAN}
    assert federation.command("invite", A).code == 0


def test_a_database_put_back_beside_a_bucket_is_refused_before_a_term_is_begun(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket is obstore's own in memory. However often it is tried, with what command."""
    bucket = Bucket("s3://lorica/north/", "north/", MemoryStore())
    monkeypatch.setattr(Bucket, "at", lambda place: bucket)
    text = federation.folder.settings.read_text()
    blobs = "s3://lorica/north?region=eu-central-1"
    federation.folder.settings.write_text(text.replace('blobs = ""', f'blobs = "{blobs}"'))
    federation.enrol(A)
    term = "SELECT term FROM leadership"
    assert federation.server.rows(term, database=federation.name) == [(1,)]
    dump = federation.dump(tmp_path / "dump")
    for _ in range(2):
        with leading(Coordinator.load(federation.folder)) as leader:
            path = leader.settings.state_folder / f"bundles/{'a' * 64}.bundle"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"a bundle of each term")
            leader.kept.keep(path)
    assert leader.leadership is not None
    assert leader.leadership.term == 3
    federation.put_back(dump)
    for _ in range(4):
        with (
            pytest.raises(
                StorageError, match=r"knows term 1, and \[storage\] blobs has files of term \d: the database"
            ),
            leading(Coordinator.load(federation.folder)),
        ):
            pass
        federation.command("settle", "--without-log").is_refusal(StorageError, "has files of term")
    assert federation.server.rows(term, database=federation.name) == [(1,)]


def test_taking_over_shows_that_it_is_alive(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """While tables are made, log and ledger are taken up and the bucket is settled; not while another one leads."""
    bucket = Bucket("s3://lorica/north/", "north/", MemoryStore())
    monkeypatch.setattr(Bucket, "at", lambda place: bucket)
    beats: queue.Queue[Path] = queue.Queue()
    monkeypatch.setattr(heartbeat, "is_alive", beats.put)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.001)
    text = federation.folder.settings.read_text()
    blobs = "s3://lorica/north?region=eu-central-1"
    federation.folder.settings.write_text(text.replace('blobs = ""', f'blobs = "{blobs}"'))
    steps: list[str] = []

    def alive_in(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*arguments: Any) -> Any:
            while not beats.empty():
                beats.get()
            assert beats.get(timeout=20) == federation.folder.lock
            steps.append(name)
            return step(*arguments)

        return seen

    monkeypatch.setattr(open_store, "_require_no_other_state", alive_in("tables", open_store._require_no_other_state))
    monkeypatch.setattr(taken_up, "take_up", alive_in("log and ledger", taken_up.take_up))
    monkeypatch.setattr(opening, "settle", alive_in("bucket", opening.settle))
    with leading(Coordinator.load(federation.folder)) as leader:
        assert steps == ["tables", "log and ledger", "bucket"]
        alive_in("until it serves", lambda: None)()
        assert leader.start is not None
        leader.start.end()
        leader.start._thread.join(60)
        assert not leader.start._thread.is_alive()


def test_settle_is_for_a_database_alone(tmp_path: Path) -> None:
    folder = initialise(tmp_path / "sqlite")
    refused = run_command(cli.main, "settle", "--without-log", "--dir", folder.root)
    refused.is_refusal(ConfigurationError, "`coordinator restore` settles a folder as it makes it")


def test_an_export_is_the_log_in_files(federation: Federation, tmp_path: Path) -> None:
    federation.enrol(A)
    assert federation.command("audit", "export", tmp_path / "copy").code == 0
    assert [line.content for line in lines(tmp_path / "copy")] == [
        line.content for line in Coordinator.load(federation.folder).audit().place.lines()
    ]
    key = Coordinator.load(federation.folder).keys.identity_public_key.hex()
    verified = run_command(cli.main, "audit", "verify", "--log", tmp_path / "copy", "--key", key)
    assert verified.code == 0, verified.err
    again = federation.command("audit", "export", tmp_path / "copy")
    again.is_refusal(ConfigurationError, "is not an empty folder")


def test_commands_of_upkeep_say_what_is_done_instead(federation: Federation, tmp_path: Path) -> None:
    federation.enrol(A)
    backup = federation.command("backup", tmp_path / "b", "--plain")
    backup.is_refusal(ConfigurationError, "pg_dump", "`coordinator settle`")
    collected = federation.command("gc")
    assert (collected.code, collected.out) == (0, "there is nothing to delete\n"), collected.err
    nothing = federation.command("upgrade")
    assert nothing.code == 0, nothing.err
    assert f"has tables of revision {TABLES_REVISION}: nothing was to be done" in nothing.out
    federation.command("upgrade", "--to", "0011").is_refusal(StorageError, "this state has no way back")
    told = [entry.text("command") for entry in federation.reading().of(Event.OPERATOR_COMMAND)]
    assert told == ["CollectGarbage", "upgrade", "upgrade"]


def test_an_upgrade_takes_the_folders_log_over(federation: Federation) -> None:
    """Of a state that a release before kept in the database, and its log in the folder."""
    coordinator = Coordinator.load(federation.folder)
    with leading(coordinator):
        pass
    federation.server.execute(
        "DROP TABLE audit_log, release_ledger, closed_plans, release_root", "DROP FUNCTION lorica_added_to_alone()",
        "UPDATE alembic_version SET version_num = '0012'", "UPDATE schema SET version = 12",
        database=federation.name,
    )  # fmt: skip
    before = AuditLog(
        federation.folder.audit,
        writer=coordinator.audit().writer,
        key=coordinator.keys.identity,
        clock=lambda: 1_700_000_000.0,
    )
    before.append(Event.STARTED)
    before.append(Event.STOPPED)
    before.seal()
    files = list(read_log(federation.folder.audit).entries)
    federation.command("invite", A).is_refusal(StorageError, "run `coordinator upgrade`")
    done = federation.command("upgrade")
    assert done.code == 0, done.err
    reading = federation.reading()
    assert list(reading.entries[: len(files)]) == files
    assert reading.entries[len(files)].text("command") == "upgrade"
    terms = federation.server.rows("SELECT term FROM leadership", database=federation.name)
    assert terms == [(3,)], "the one that fences whoever led on the older tables, and one to take the log over"
