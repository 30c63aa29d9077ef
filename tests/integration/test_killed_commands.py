"""The commands of the operator, killed at each of their durable steps: the coordinator comes up, and the same command
goes on.

Every fifth step of each here, in turn with the others; LORICA_EVERY_KILL=1 takes them all (`make soak`).
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lorica_coordinator.cli import main as coordinator_main
from lorica_coordinator.edges.database.round_tables import FIRST_REVISION
from lorica_coordinator.edges.keys.authorities import Authorities
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_security.errors import ConfigurationError, DataError, StateError
from lorica_security.host import ballast, files
from silo_agent.cli import main as silo_main
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import (
    SiloCredentials,
    load_credentials,
    refuse_second_enrolment,
    store_credentials,
)
from silo_agent.edges.wire import enrolment_client
from tests.support.command_line import Done, run_command
from tests.support.coordinator import BANK, HOSPITAL, FederationTemplate, choose_ports
from tests.support.coordinator import federation_template as federation_template
from tests.support.killed_commands import each_death
from tests.support.lifecycle import silo_at

EVERY = 1 if os.environ.get("LORICA_EVERY_KILL") else 5
PASSPHRASE = "correct horse battery staple"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command works: a coordinator's folder, and one for what it writes elsewhere."""

    root: Path
    template: Path

    @property
    def folder(self) -> CoordinatorFolder:
        return CoordinatorFolder(self.root / "coordinator")

    @property
    def out(self) -> Path:
        return self.root / "out"

    def fresh(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.out.mkdir(parents=True)
        shutil.copytree(self.template, self.folder.root)

    def run(self, *arguments: str | Path) -> Done:
        return run_command(coordinator_main, *arguments, "--dir", self.folder.root)

    def view(self) -> tuple[object, ...]:
        """Where the federation stands, as a coordinator that starts finds it; with an audit log that is whole."""
        done = self.run("status", "--json")
        assert done.code == 0, done.err
        assert run_command(coordinator_main, "audit", "verify", "--dir", self.folder.root).code == 0
        status = json.loads(done.out)
        silos = tuple((one["silo"], one["state"]) for one in status["silos"])
        authorities = len(Authorities.load(self.folder.keys).members)
        return status["phase"], status["plan_name"], status["round"], silos, authorities


@pytest.fixture
def place(federation_template: FederationTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("LORICA_CA_PASSPHRASE", PASSPHRASE)
    return Place(tmp_path / "place", federation_template.folder)


def deaths(name: str, command: Callable[[], object], place: Place) -> Iterator[str]:
    return each_death(command, before=place.fresh, within=place.root, first=len(name) % min(EVERY, 2), every=EVERY)


COMMANDS = {
    "invite": ("invite", "clinic-c"),
    "revoke": ("revoke", BANK),
    "plan-start": ("plan", "start", "default"),
    "gc": ("gc",),
    "backup": ("backup", "OUT/backup", "--plain"),
    "ca-rotate": ("ca", "rotate"),
    "ca-export": ("ca", "export", "OUT/ca.p12"),
    "ca-request": ("ca", "request", "OUT/request.pem"),
    "upgrade": ("upgrade", "--to", FIRST_REVISION),
}
DONE_ALREADY = {
    "backup": "is there already",
    "ca-export": "is there already",
    "ca-request": "is there already",
    "ca-rotate": "waits to succeed already",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_killed_leaves_the_state_before_or_after_and_goes_on(name: str, place: Place) -> None:
    words = [word.replace("OUT", str(place.out)) for word in COMMANDS[name]]

    def command() -> None:
        done = place.run(*words)
        assert done.code == 0, done.err

    def seen() -> tuple[object, ...]:
        if name == "upgrade":  # the other tables are another release's
            assert place.run("upgrade").code == 0
        return place.view()

    place.fresh()
    before = place.view()
    command()
    after = seen()
    died = 0
    for step in deaths(name, command, place):
        died += bool(step)
        assert seen() in (before, after), step
        again = place.run(*words)
        assert again.code == 0 or (name in DONE_ALREADY and DONE_ALREADY[name] in again.err), (step, again.err)
        assert seen() == after, step
    assert died


def test_a_backup_whose_end_was_cut_off_is_no_backup_and_leaves_nothing_of_the_next(place: Place) -> None:
    """A restore that is killed leaves no folder, and the next one no copy of the keys that it had unpacked."""
    place.fresh()
    assert place.run("backup", str(place.out / "backup"), "--plain").code == 0
    target = place.out / "restored"

    def restore() -> None:
        done = run_command(coordinator_main, "restore", place.out / "backup", target, "--without-log")
        assert done.code == 0, done.err

    def begin() -> None:
        shutil.rmtree(target, ignore_errors=True)

    for step in each_death(restore, before=begin, within=place.out, first=2, every=EVERY * 2):
        assert target.exists() == (not step), step
        if step:
            restore()
        assert not [path for path in place.out.iterdir() if path.name.startswith(".")], step
        assert run_command(coordinator_main, "status", "--dir", target).code == 0


def test_an_init_that_is_killed_is_undone_by_the_next_one(place: Place) -> None:
    target = place.root / "new"
    words = ("init", target, "--federation", "test-net", "--host", "127.0.0.1", "--no-plan")

    def init() -> None:
        done = run_command(coordinator_main, *words)
        assert done.code == 0, done.err

    def begin() -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(exist_ok=True)

    undone = 0
    for step in each_death(init, before=begin, within=target):
        again = run_command(coordinator_main, *words)
        whole = again.code != 0
        undone += not whole
        assert not whole or "it holds a coordinator" in again.err, (step, again.err)
        assert run_command(coordinator_main, "status", "--dir", target).code == 0, step
        files.sweep(target)
        left = {path.name for path in target.rglob(".*")}
        assert left <= {".init"}, step
    assert undone >= 8


def test_an_import_of_the_authority_that_is_killed_goes_on(place: Place) -> None:
    place.fresh()
    assert place.run("ca", "export", str(place.out / "ca.p12")).code == 0

    def take() -> None:
        done = place.run("ca", "import", str(place.out / "ca.p12"))
        assert done.code == 0, done.err

    def begin() -> None:
        for path in place.folder.keys.glob("ca*"):
            path.unlink()

    for step in each_death(take, before=begin, within=place.folder.root):
        again = place.run("ca", "import", str(place.out / "ca.p12"))
        assert again.code == 0 or "already holds an authority" in again.err, (step, again.err)
        assert place.run("status").code == 0, step


def test_a_plan_that_was_being_made_leaves_nothing_once_the_next_one_is(place: Place) -> None:
    place.fresh()
    plans = place.folder.root / "state" / "plans"

    def new() -> None:
        done = place.run("plan", "new", "second", "--size", "micro")
        assert done.code == 0, done.err

    for step in each_death(
        new, before=lambda: shutil.rmtree(plans / "second", ignore_errors=True), within=plans, first=3, every=7
    ):
        assert (plans / "second").exists() == (not step), step
        if not step:
            return
        new()
        assert sorted(path.name for path in plans.iterdir()) == ["default", "second"], step


def test_an_enrolment_that_is_killed_is_undone_by_the_next_token(
    federation_template: FederationTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token is spent by then: all that can be done is to make room for the next one."""
    folder = SiloFolder(tmp_path / "silo")
    granted = iter([federation_template.silos[HOSPITAL], federation_template.silos[BANK]] * 100)

    async def enrol(*_: object, **__: object) -> SiloCredentials:
        return next(granted)

    monkeypatch.setattr(enrolment_client, "enrol", enrol)
    token = run_command(coordinator_main, "invite", HOSPITAL, "--dir", _copy(federation_template, tmp_path)).out.strip()

    def enroll() -> None:
        done = run_command(silo_main, "enroll", token, "--dir", folder.root)
        assert done.code == 0, done.err

    undone = 0
    for _ in each_death(enroll, before=lambda: shutil.rmtree(folder.root, ignore_errors=True), within=folder.root):
        again = run_command(silo_main, "enroll", token, "--dir", folder.root)
        undone += again.code == 0
        if again.code:
            again.is_refusal(StateError, "already holds a silo (enrolment.json)")
        load_credentials(folder)
    assert undone >= 8


def _copy(template: FederationTemplate, root: Path) -> Path:
    return template.copy(root / "coordinator").root


def test_an_abandoned_file_of_a_key_is_erased_and_one_in_the_making_is_not(tmp_path: Path) -> None:
    left = _abandoned(tmp_path / "keys")
    os.link(left, tmp_path / "block")
    with left.open("r+b") as file:
        files.hold(file.fileno())
        files.sweep(tmp_path)
        assert left.exists()
    files.sweep(tmp_path)
    assert not left.exists()
    assert not any((tmp_path / "block").read_bytes())


def test_a_start_of_either_program_erases_such_files_and_has_ballast(
    place: Place, federation_template: FederationTemplate
) -> None:
    place.fresh()
    choose_ports(place.folder)
    silo = silo_at(place.root / "silo", federation_template.silos[HOSPITAL], "127.0.0.1:1")
    left = [_abandoned(place.folder.keys), _abandoned(silo.root)]
    place.run("serve", "--plan", "absent", "--log-level", "error").is_refusal(ConfigurationError, "'absent'")
    started = run_command(silo_main, "start", "--dir", silo.root, "--data", place.root / "none")
    started.is_refusal(DataError)
    assert not any(path.exists() for path in left)
    for root in (place.folder.root, silo.root):
        assert (root / ballast.NAME).stat().st_size == ballast.BYTES


def _abandoned(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    left = folder / ".server-pair.pem.0123456789abcdef.tmp"
    left.write_bytes(b"a secret")
    return left


@pytest.mark.parametrize("side", ["coordinator", "silo"])
def test_keys_that_were_being_protected_open_with_one_passphrase(
    side: str, place: Place, federation_template: FederationTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All with the new one or all without, by whichever the next command is given; nothing of the others stays."""
    passphrase = "twenty characters and some more"
    silo = SiloFolder(place.root / "silo")
    main, root = (coordinator_main, place.folder.root) if side == "coordinator" else (silo_main, silo.root)
    looked_at = ("status",) if side == "coordinator" else ("trust", "own")

    def protect() -> None:
        monkeypatch.setenv("LORICA_NEW_KEY_PASSPHRASE", passphrase)
        done = run_command(main, "keys", "protect", "--dir", root)
        assert done.code == 0, done.err

    def begin() -> None:
        monkeypatch.delenv("LORICA_KEY_PASSPHRASE", raising=False)
        if side == "coordinator":
            place.fresh()
        else:
            shutil.rmtree(silo.root, ignore_errors=True)
            silo.root.parent.mkdir(exist_ok=True)
            store_credentials(silo, federation_template.silos[HOSPITAL])

    opened = set()
    for step in each_death(protect, before=begin, within=root):
        opens = []
        for given in ("", passphrase):
            monkeypatch.setenv("LORICA_KEY_PASSPHRASE", given)
            opens.append(run_command(main, *looked_at, "--dir", root).code == 0)
        assert sum(opens) == 1, (step, opens)
        opened.add(opens[1])
        files.sweep(root)
        keys = [path.name for path in root.rglob("*") if "protected" in path.name]
        assert not keys, step
    assert opened == {True, False}


def test_the_mark_of_an_init_that_was_killed_at_its_end_costs_no_keys_once_the_coordinator_has_state(
    place: Place,
) -> None:
    place.fresh()
    folder = place.folder
    folder.begun.touch()
    before = {path.name: path.read_bytes() for path in folder.keys.iterdir()}
    folder.settings.unlink()
    done = run_command(coordinator_main, "init", folder.root)
    assert done.code != 0
    assert {path.name: path.read_bytes() for path in folder.keys.iterdir()} == before


def test_the_mark_of_an_enrolment_that_was_killed_at_its_end_costs_no_keys_once_the_silo_has_a_log(
    tmp_path: Path,
) -> None:
    folder = SiloFolder(tmp_path / "silo")
    folder.make()
    for path in (folder.identity_key, folder.tls, folder.begun):
        path.write_text("kept")
    folder.audit.mkdir()
    with pytest.raises(StateError):
        refuse_second_enrolment(folder)
    assert folder.identity_key.read_text() == folder.tls.read_text() == "kept"
