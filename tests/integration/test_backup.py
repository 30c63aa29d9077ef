"""A backup is made while a round collects; a coordinator restored from it goes on with its silos, and repeats nothing
that may not be."""

import asyncio
import shutil
import sqlite3
import stat
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from lorica_coordinator.cli import main
from lorica_coordinator.edges.database.round_tables import TABLES_REVISION
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.keys.key_store import OPERATOR_NAME
from lorica_coordinator.edges.upkeep.backup_file import PASSPHRASE, new_backup, opened_backup
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.rounds.states import Stopped
from lorica_coordinator.service.federation import Federation
from lorica_security.audit.entry import Event
from lorica_security.errors import (
    EXIT_CODES,
    AuthenticationError,
    ConfigurationError,
    IntegrityError,
    MalformedMessage,
    StateError,
    StorageError,
)
from lorica_security.host import key_file
from lorica_security.identifiers import SiloName
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.on_disk.reading import read_log
from lorica_security.pki.authority_succession import certificate_digest
from lorica_security.pki.parsing import parse_certificate
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluate, Standby, Train
from silo_wire.plans.plan import Plan, PlanOfAnotherRelease
from silo_wire.v1 import operator_pb2
from tests.support.command_line import run_command
from tests.support.coordinator import (
    BANK,
    HOSPITAL,
    PLAN,
    FederationTemplate,
    Silo,
    federation_template,
    running,
)

__all__ = ["federation_template"]

SECRET = "a passphrase of thirty characters"
CLINIC = SiloName("clinic-c")
CHECKS = ("evidence", "verdicts")
"""What silos check the model of a masked round by, below the folder of its plan's models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """`sealed` and `plain` were made while round 1 collected; since then `clinic` was enrolled and the bank revoked."""

    sealed: Path
    plain: Path
    lost: CoordinatorFolder
    plan: Digest
    silos: dict[SiloName, SiloCredentials]


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (key_file.PASSPHRASE, PASSPHRASE):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def story(federation_template: FederationTemplate, tmp_path_factory: pytest.TempPathFactory) -> Story:
    root = tmp_path_factory.mktemp("story")
    folder = federation_template.copy(root / "coordinator")
    sealed, plain = root / "sealed.backup", root / "plain.backup"

    def command(*arguments: str | Path) -> None:
        done = run_command(main, *arguments, "--dir", folder.root)
        assert done.code == 0, done.err

    async def lived() -> tuple[Digest, SiloCredentials]:
        silos = federation_template.silos
        async with (
            running(folder, offer=PLAN) as at,
            Silo(at, silos[HOSPITAL]) as hospital,
            Silo(at, silos[BANK]) as bank,
        ):
            bundle = at.coordinator.shelf.compile(PLAN)
            await hospital.join(bundle.plan.digest)
            await bank.join(bundle.plan.digest)
            update = hospital.update(await hospital.order(Train, 1), bundle.layout)
            await hospital.upload(update)
            await at.invited("dentist-d")
            checks = folder.root / "state" / "models" / bundle.plan.digest / "evidence"
            checks.mkdir()
            for suffix in CHECKS:
                (checks / f"{bundle.plan.model.initial}.{suffix}").write_bytes(b"of a masked round")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(PASSPHRASE, SECRET)
                await asyncio.to_thread(command, "backup", sealed)
            await asyncio.to_thread(command, "backup", plain, "--plain")
            clinic = await at.enrolled(CLINIC)
            async with at.operator() as operator:
                await operator.Revoke(operator_pb2.RevokeRequest(role="silo", name=BANK))
            return bundle.plan.digest, clinic

    plan, clinic = asyncio.run(lived())
    return Story(
        sealed=sealed, plain=plain, lost=folder, plan=plan, silos={**federation_template.silos, CLINIC: clinic}
    )


def restored(story: Story, target: Path, *more: str | Path) -> CoordinatorFolder:
    done = run_command(main, "restore", story.plain, target, *(more or ("--without-log",)))
    assert done.code == 0, done.err
    assert ("let in again, who was revoked since as well: " in done.out) == ("--log" not in more), "the danger is named"
    assert ("enrolled, as the newer log has it: " in done.out) == ("--log" in more)
    return CoordinatorFolder(target)


def query(database: Path, statement: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as opened:
        return opened.execute(statement).fetchall()


def state_of(folder: CoordinatorFolder) -> object:
    store = Coordinator.load(folder).open_store()
    try:
        return store.load()
    finally:
        store.close()


# --- what is in it ----------------------------------------------------------------------------------------------


def test_it_holds_the_folder_but_nothing_of_the_round_under_way(story: Story, tmp_path: Path) -> None:
    assert stat.S_IMODE(story.plain.stat().st_mode) == stat.S_IMODE(story.sealed.stat().st_mode) == 0o600
    with opened_backup(story.plain, None) as backup:
        backup.extract(tmp_path / "out")
    names = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    tops = {name.split("/")[1] if name.startswith("state/") else name.split("/")[0] for name in names}
    assert tops == {"federation.toml", "keys", "audit", "state.sqlite", "plans", "bundles", "models"}
    assert len([name for name in names if name.startswith("state/models/") and name.endswith(".safetensors")]) == 1
    assert {name.rpartition(".")[2] for name in names if "/evidence/" in name} == set(CHECKS)
    database = tmp_path / "out" / "state" / "state.sqlite"
    assert query(database, "SELECT phase FROM machine") == [("stopped",)]
    assert query(database, "SELECT outcome FROM rounds") == [("abandoned",)]
    assert query(database, "SELECT silo FROM invitations WHERE spent_at IS NULL") == []
    assert query(database, "PRAGMA integrity_check") == [("ok",)]
    assert not list((story.lost.root / "state").glob(".backup-*")), "the copy that it was made from is gone"


def test_under_a_passphrase_nothing_of_it_can_be_read(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed, plain = story.sealed.read_bytes(), story.plain.read_bytes()
    for secret in (b"PRIVATE KEY", b"SQLite format", b"federation =", story.plan.encode()):
        assert secret in plain
        assert secret not in sealed
    missing = run_command(main, "restore", story.sealed, tmp_path / "new", "--without-log")
    missing.is_refusal(ConfigurationError, "is under a passphrase", PASSPHRASE)
    monkeypatch.setenv(PASSPHRASE, "another passphrase of thirty")
    other = run_command(main, "restore", story.sealed, tmp_path / "new", "--without-log")
    other.is_refusal(AuthenticationError, "does not open with the passphrase")
    assert not (tmp_path / "new").exists()
    monkeypatch.setenv(PASSPHRASE, SECRET)
    swapped = run_command(main, "restore", story.plain, tmp_path / "new", "--without-log")
    swapped.is_refusal(ConfigurationError, "is in clear, though")
    assert run_command(main, "restore", story.sealed, tmp_path / "new", "--without-log").code == 0
    assert isinstance(state_of(CoordinatorFolder(tmp_path / "new")), Stopped)


def test_without_a_passphrase_none_is_made_unless_that_is_said(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("backup", tmp_path / "b", "--dir", story.lost.root)
    run_command(main, *arguments).is_refusal(ConfigurationError, PASSPHRASE, "--plain")
    monkeypatch.setenv(PASSPHRASE, SECRET)
    run_command(main, *arguments, "--plain").is_refusal(ConfigurationError, "different things")
    monkeypatch.setenv(PASSPHRASE, "short")
    run_command(main, *arguments).is_refusal(ConfigurationError, "at least")
    assert not (tmp_path / "b").exists()


# --- what is refused --------------------------------------------------------------------------------------------


def test_it_is_restored_into_an_empty_folder_alone(story: Story, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    done = run_command(main, "restore", story.plain, tmp_path / "there", "--without-log")
    done.is_refusal(ConfigurationError, "is not an empty folder")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]


async def test_not_beside_the_coordinator_that_runs(story: Story, tmp_path: Path) -> None:
    async with running(story.lost):
        done = await asyncio.to_thread(run_command, main, "restore", story.plain, tmp_path / "new", "--without-log")
    assert done.code == EXIT_CODES[StateError]
    assert "something listens on" in done.err.splitlines()[-1]
    assert not (tmp_path / "new").exists()


def test_what_became_of_revocations_has_to_be_said(story: Story, tmp_path: Path) -> None:
    run_command(main, "restore", story.plain, tmp_path / "new").is_refusal(ConfigurationError, "--log", "--without-log")
    both = run_command(main, "restore", story.plain, tmp_path / "new", "--without-log", "--log", story.lost.audit)
    both.is_refusal(ConfigurationError, "--without-log")


@pytest.mark.parametrize("at", [0.3, 0.9])
def test_a_damaged_one_leaves_nothing(story: Story, tmp_path: Path, at: float) -> None:
    data = bytearray(story.plain.read_bytes())
    data[int(len(data) * at)] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    done = run_command(main, "restore", tmp_path / "damaged", tmp_path / "new", "--without-log")
    assert done.code in (5, 6), done.err
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == ["damaged"]


def test_of_a_newer_release_it_is_refused_with_the_remedy(story: Story, tmp_path: Path) -> None:
    present, following = f'"revision":"{TABLES_REVISION}"', f'"revision":"{int(TABLES_REVISION) + 1:04}"'
    newer = story.plain.read_bytes().replace(present.encode(), following.encode(), 1)
    assert newer != story.plain.read_bytes()
    (tmp_path / "newer").write_bytes(newer)
    done = run_command(main, "restore", tmp_path / "newer", tmp_path / "new", "--without-log")
    done.is_refusal(StorageError, f"revision {int(TABLES_REVISION) + 1:04}", "install the release that made it")


def test_a_log_that_is_not_the_newer_one_is_refused(
    story: Story, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    older, other, edited = tmp_path / "older", tmp_path / "other", tmp_path / "edited"
    shutil.copytree(federation_template.folder / "audit", older)
    shutil.copytree(story.lost.audit, edited)
    newest = max(edited.glob("log.*"))
    newest.write_bytes(newest.read_bytes().replace(b"clinic-c", b"clinic-x", 1))
    federation_template.copy(tmp_path / "fork")
    assert run_command(main, "keys", "protect", "--clear", "--dir", tmp_path / "fork").code == 0  # another history
    shutil.copytree(tmp_path / "fork" / "audit", other)
    for log in (older, other, edited):
        done = run_command(main, "restore", story.plain, tmp_path / "new", "--log", log)
        done.is_refusal(IntegrityError)
        assert not (tmp_path / "new").exists()


# --- going on ---------------------------------------------------------------------------------------------------


async def in_register(service: Federation, credentials: SiloCredentials) -> bool:
    certificate = parse_certificate(credentials.certificate_pem)
    try:
        service.register.require(
            credentials.identity, f"{certificate.serial_number:x}", certificate_digest(certificate).hex()
        )
    except AuthenticationError:
        return False
    return True


async def test_silos_go_on_with_the_same_round_from_the_same_model(story: Story, tmp_path: Path) -> None:
    folder = restored(story, tmp_path / "new")
    state = state_of(folder)
    assert isinstance(state, Stopped)
    assert (state.opening.round, state.opening.attempt) == (1, 2), "no attempt is done again under its number"
    async with (
        running(folder) as at,
        Silo(at, story.silos[HOSPITAL]) as hospital,
        Silo(at, story.silos[BANK]) as bank,
    ):
        await at.service.start_plan(PLAN)
        layout = at.coordinator.shelf.bundle(story.plan).layout
        for silo in (hospital, bank):
            await silo.join(story.plan)
        for silo in (hospital, bank):
            await silo.upload(silo.update(await silo.order(Train, 1), layout))
        order = await hospital.order(Evaluate, 1)
        assert order.model != state.course.model
        clinic = story.silos[CLINIC]
        assert not await in_register(at.service, clinic), "enrolled since: it is invited again"
        assert await in_register(at.service, story.silos[BANK]), "revoked since, and nobody can know"


async def test_beside_a_plan_that_this_release_does_not_read_the_next_one_is_started(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Plan.from_json

    def does_not_read(raw: bytes) -> Plan:
        plan = read(raw)
        if plan.digest == story.plan:
            raise MalformedMessage("plan: unknown key of_old")
        return plan

    monkeypatch.setattr(Plan, "from_json", staticmethod(does_not_read))
    done = run_command(main, "restore", story.plain, tmp_path / "new", "--without-log")
    assert done.code == 0, done.err
    assert f"closed: plan {story.plan[:16]}" in done.out, "no sum is released under it any more"
    folder = CoordinatorFolder(tmp_path / "new")
    rounds = await asyncio.to_thread(run_command, main, "rounds", "--dir", folder.root)
    assert rounds.code == 0, rounds.err
    async with running(folder) as at, Silo(at, story.silos[HOSPITAL]) as hospital, Silo(at, story.silos[BANK]) as bank:
        assert await at.service.plan() is None
        with pytest.raises(PlanOfAnotherRelease, match="coordinator plan new"):
            await at.service.start_plan()
        shutil.copytree(at.coordinator.shelf.folder(PLAN), at.coordinator.shelf.folder("next"))
        toml = at.coordinator.shelf.folder("next") / "plan.toml"
        toml.write_text(toml.read_text().replace(f'name = "{PLAN}"', 'name = "next"', 1))
        started = await at.service.start_plan("next", leave=PLAN)
        for silo in (hospital, bank):
            await silo.join(started.plan)
        await hospital.order(Train, 1)


async def test_a_plan_under_way_that_this_release_does_not_read_keeps_it_from_starting(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = restored(story, tmp_path / "new")
    async with running(folder) as at, Silo(at, story.silos[HOSPITAL]) as hospital, Silo(at, story.silos[BANK]) as bank:
        await at.service.start_plan(PLAN)
        for silo in (hospital, bank):
            await silo.join(story.plan)
        await hospital.order(Train, 1)

    def reads_none(raw: bytes) -> Plan:
        raise MalformedMessage("plan: unknown key of_old")

    monkeypatch.setattr(Plan, "from_json", staticmethod(reads_none))
    with pytest.raises(PlanOfAnotherRelease, match="go on with that release"):
        async with running(folder):
            pass


async def test_the_newer_log_says_who_was_shut_out_and_let_in_since(story: Story, tmp_path: Path) -> None:
    folder = restored(story, tmp_path / "new", "--log", story.lost.audit)
    async with running(folder) as at, Silo(at, story.silos[BANK]) as bank, Silo(at, story.silos[CLINIC]) as clinic:
        with pytest.raises(grpc.aio.AioRpcError, match="was revoked or replaced"):
            await anext(aiter(bank.stub.Attend(bank.attend_request())))
        clinic.attend()
        assert await in_register(at.service, story.silos[HOSPITAL])
        await clinic.order(Standby)
    reading = read_log(folder.audit, keys=[Coordinator.load(folder).keys.identity.public_key()])
    lost = read_log(story.lost.audit)
    assert reading.entries[: len(lost.entries)] == lost.entries, "one history, which goes on"
    told = [entry for entry in reading.of(Event.OPERATOR_COMMAND) if entry.text("command") == "restore"]
    assert [entry.text("newer_log") for entry in told] == ["yes"]


def test_a_revocation_that_was_refused_shuts_out_nobody_and_stops_no_restore(story: Story, tmp_path: Path) -> None:
    """A command is in the log before anybody looks at what it names: a slip of the hand, or of an operator who means
    ill."""
    log, keys = tmp_path / "log", Coordinator.load(story.lost).keys
    shutil.copytree(story.lost.audit, log)
    writer = AuditLog(log, writer=read_log(log).writer, key=keys.identity, clock=time.time)
    for said in (
        {"asked_role": "silos", "asked_name": HOSPITAL},
        {"asked_role": "silo", "asked_name": "Hospital A"},
        {"asked_role": "silo"},
        {"asked_role": "coordinator"},
        {"asked_role": "operator", "asked_name": OPERATOR_NAME},
    ):
        writer.append(Event.OPERATOR_COMMAND, command="Revoke", **said)
    writer.seal()
    folder = restored(story, tmp_path / "new", "--log", log)
    own = f"SELECT count(*), count(revoked_at) FROM certificates WHERE uri LIKE '%/operator/{OPERATOR_NAME}'"
    assert query(folder.root / "state" / "state.sqlite", own) == [(1, 0)]


def test_an_enrolment_that_nobody_signed_shuts_out_who_was_enrolled_before(story: Story, tmp_path: Path) -> None:
    log, keys = tmp_path / "log", Coordinator.load(story.lost).keys
    shutil.copytree(story.lost.audit, log)
    writer = AuditLog(log, writer=read_log(log).writer, key=keys.identity, clock=time.time)
    new = {"certificate": "ab12", "certificate_digest": "cd" * 32, "expires": int(time.time()) + 86_400}
    writer.append(Event.ENROLLED, silo=HOSPITAL, identity_key="ef" * 32, **new)
    database = restored(story, tmp_path / "new", "--log", log).root / "state" / "state.sqlite"
    good = f"SELECT count(*) FROM certificates WHERE uri LIKE '%/silo/{HOSPITAL}' AND revoked_at IS NULL"
    assert query(database, good) == [(0,)]
    assert query(database, f"SELECT revoked_at IS NULL FROM silos WHERE silo = '{HOSPITAL}'") == [(0,)]


def test_tables_that_are_not_those_that_it_names_are_refused(story: Story, tmp_path: Path) -> None:
    """Nobody's revision 0003 is taken for 0004 and brought up to date."""
    with opened_backup(story.plain, None) as backup:
        about = backup.about
        backup.extract(tmp_path / "out")
    with closing(sqlite3.connect(tmp_path / "out" / "state" / "state.sqlite")) as opened:
        opened.execute("DROP TABLE alembic_version")
        opened.execute("UPDATE schema SET version = 3")
        opened.commit()
    with new_backup(tmp_path / "other", None, about) as other:
        for path in sorted((tmp_path / "out").rglob("*")):
            if path.is_file():
                other.add(str(path.relative_to(tmp_path / "out")), path.read_bytes())
    done = run_command(main, "restore", tmp_path / "other", tmp_path / "new", "--without-log")
    done.is_refusal(IntegrityError, "revision 0003", f"names {TABLES_REVISION}")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["keys/identity.key", "keys/ca.key", "keys/ca-2.key", "keys/successor.uri"])
def test_a_made_up_one_names_no_code(name: str, story: Story, tmp_path: Path) -> None:
    """Whoever can hand an operator a backup in clear puts a library into it, and its name in place of a key."""
    evil, target = b"\x7fELF", tmp_path / "new"
    uri = f"pkcs11:token=silo;object=identity?module-path={target}/state/evil.so&pin-source=/etc/shadow"
    with opened_backup(story.plain, None) as backup:
        about = backup.about
        backup.extract(tmp_path / "out")
    (tmp_path / "out" / "state" / "evil.so").write_bytes(evil)
    (tmp_path / "out" / name).write_text(f"\n {uri}\n" if name.endswith(".uri") else f"{uri}\npublic 00\n")
    with new_backup(tmp_path / "made-up", None, about) as other:
        for path in sorted((tmp_path / "out").rglob("*")):
            if path.is_file():
                other.add(str(path.relative_to(tmp_path / "out")), path.read_bytes())
    said = (name.removeprefix("keys/"), "token 'silo'", f"library {target}/state/evil.so", "/etc/shadow", "--token-key")
    for given in ((), ("--token-key", uri.replace("/etc/shadow", "/etc/pin"))):
        done = run_command(main, "restore", tmp_path / "made-up", target, "--without-log", *given)
        done.is_refusal(ConfigurationError, *said)
        assert not target.exists()
    if name == "keys/identity.key":
        given_it = run_command(main, "restore", tmp_path / "made-up", target, "--without-log", "--token-key", uri)
        given_it.is_refusal(
            ConfigurationError, "evil.so"
        )  # by the next look at it: it is not there yet, or in the folder


async def test_what_nobody_signed_lets_nobody_in(story: Story, tmp_path: Path) -> None:
    """Entries behind the last seal could be anybody's who can write to the copy of the log: they shut out, and let in
    nobody."""
    log, keys = tmp_path / "log", Coordinator.load(story.lost).keys
    shutil.copytree(story.lost.audit, log)
    writer = AuditLog(log, writer=read_log(log).writer, key=keys.identity, clock=time.time)
    new = {"certificate": "ab12", "certificate_digest": "cd" * 32, "expires": int(time.time()) + 86_400}
    writer.append(Event.CERTIFICATE_RENEWED, silo=HOSPITAL, **new)
    writer.append(
        Event.ACCESS_GRANTED, to=f"spiffe://{keys.federation}/operator/anna", **{**new, "certificate": "ab13"}
    )
    writer.append(Event.OPERATOR_COMMAND, command="Revoke", asked_role="silo", asked_name=CLINIC)
    register = "SELECT uri, revoked_at IS NULL FROM certificates WHERE serial IN ('ab12', 'ab13')"
    present = f"SELECT certificate_serial FROM silos WHERE silo = '{HOSPITAL}'"

    folder = restored(story, tmp_path / "unsealed", "--log", log)
    database = folder.root / "state" / "state.sqlite"
    assert query(database, register) == []
    assert query(database, f"SELECT revoked_at IS NULL FROM silos WHERE silo = '{CLINIC}'") == [(0,)]
    (before,) = query(database, present)
    assert before != ("ab12",)
    again = restored(story, tmp_path / "again", "--log", folder.audit)
    assert query(again.root / "state" / "state.sqlite", register) == [], "sealed by then, and no more signed for that"

    writer.seal()
    folder = restored(story, tmp_path / "sealed", "--log", log)
    database = folder.root / "state" / "state.sqlite"
    assert sorted(query(database, register)) == [
        (f"spiffe://{keys.federation}/operator/anna", 1),
        (f"spiffe://{keys.federation}/silo/{HOSPITAL}", 1),
    ]
    assert query(database, present) == [("ab12",)]
