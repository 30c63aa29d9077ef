"""`coordinator keys protect` and `silo-agent keys protect` as people type them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lorica_coordinator.cli import main as coordinator_main
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_security.audit.entry import LOCAL, Event
from lorica_security.errors import AuthenticationError, ConfigurationError, Conflict, IntegrityError
from lorica_security.host.key_file import NEW_PASSPHRASE, PASSPHRASE, is_encrypted
from lorica_security.host.process_lock import ProcessLock
from lorica_security.on_disk.reading import Reading, read_log
from silo_agent.cli import main as agent_main
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import load_credentials, store_credentials
from tests.support.command_line import Done, run_command
from tests.support.coordinator import FEDERATION, HOSPITAL, FederationTemplate, federation_template
from tests.support.hub_server import COMMIT, TOKEN, a_hub

__all__ = ["federation_template"]

ONE, TWO = "the first passphrase, long enough", "the second passphrase, long enough"


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PASSPHRASE, NEW_PASSPHRASE):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(federation_template: FederationTemplate, tmp_path: Path) -> CoordinatorFolder:
    return federation_template.copy(tmp_path / "coordinator")


@pytest.fixture
def silo(federation_template: FederationTemplate, tmp_path: Path) -> SiloFolder:
    silo = SiloFolder(tmp_path / "silo")
    silo.make()
    store_credentials(silo, replace(federation_template.silos[HOSPITAL], address="127.0.0.1:1"))
    return silo


def coordinator(folder: CoordinatorFolder, *arguments: str) -> Done:
    return run_command(coordinator_main, *arguments, "--dir", folder.root)


def agent(silo: SiloFolder, *arguments: str) -> Done:
    return run_command(agent_main, *arguments, "--dir", silo.root)


def test_a_coordinators_keys_are_encrypted_used_changed_and_cleared(
    folder: CoordinatorFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NEW_PASSPHRASE, ONE)
    assert "all are encrypted" in coordinator(folder, "keys", "protect").out
    assert all(is_encrypted(path.read_bytes()) for path in folder.keys.glob("*.key"))
    coordinator(folder, "status").is_refusal(AuthenticationError, "ca.key", "$LORICA_KEY_PASSPHRASE")

    monkeypatch.setenv(PASSPHRASE, ONE)
    assert coordinator(folder, "status").code == 0
    assert coordinator(folder, "invite", "clinic-c").code == 0
    monkeypatch.setenv(NEW_PASSPHRASE, TWO)
    assert coordinator(folder, "keys", "protect").code == 0
    coordinator(folder, "status").is_refusal(AuthenticationError, "it is another one's")

    monkeypatch.setenv(PASSPHRASE, TWO)
    monkeypatch.delenv(NEW_PASSPHRASE)
    assert "all are in clear" in coordinator(folder, "keys", "protect", "--clear").out
    monkeypatch.delenv(PASSPHRASE)
    assert coordinator(folder, "status").code == 0


def test_nothing_is_changed_under_a_running_coordinator(
    folder: CoordinatorFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NEW_PASSPHRASE, ONE)
    with ProcessLock(folder.lock, "coordinator"):
        coordinator(folder, "keys", "protect").is_refusal(Conflict, "stop it first")
    assert not any(is_encrypted(path.read_bytes()) for path in folder.keys.glob("*.key"))


def test_a_silos_keys_are_encrypted_and_used(silo: SiloFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    agent(silo, "keys", "protect").is_refusal(ConfigurationError, "or --clear for none")
    monkeypatch.setenv(NEW_PASSPHRASE, ONE)
    assert agent(silo, "keys", "protect").out.startswith("2 of 2 keys were changed")
    agent(silo, "status").is_refusal(AuthenticationError, "$LORICA_KEY_PASSPHRASE")
    monkeypatch.setenv(PASSPHRASE, ONE)
    assert agent(silo, "status").code == 0


def test_a_silo_that_could_not_encrypt_its_keys_spends_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation_template: FederationTemplate
) -> None:
    folder = federation_template.copy(tmp_path / "inviting")
    token = run_command(coordinator_main, "invite", "clinic-c", "--dir", folder.root).out.strip()
    monkeypatch.setenv(PASSPHRASE, "short")
    silo = SiloFolder(tmp_path / "new")
    agent(silo, "enroll", token).is_refusal(ConfigurationError, "gives 5 characters")
    assert not silo.root.exists()


def told_in(reading: Reading) -> list[tuple[str, str]]:
    commands = reading.of(Event.OPERATOR_COMMAND, Event.ACCESS_GRANTED, Event.AUTHORITY_CHANGED, Event.KEYS_PROTECTED)
    return [(entry.who, entry.text("command") or entry.event.value) for entry in commands]


def test_every_command_that_touches_keys_is_in_the_log(
    folder: CoordinatorFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the coordinator is stopped, as while it runs: whoever copies the authority stands in what an auditor
    reads."""
    coordinator_key = Coordinator.load(folder).keys.identity.public_key()
    begun = len(told_in(read_log(folder.audit)))
    monkeypatch.setenv("LORICA_CA_PASSPHRASE", "a passphrase of the authority")
    laptop, asked = tmp_path / "laptop", tmp_path / "csr"
    asked.write_text(run_command(coordinator_main, "access", "request", FEDERATION, "anna", "--dir", laptop).out)
    monkeypatch.setenv(NEW_PASSPHRASE, ONE)
    for command in (
        ("ca", "export", tmp_path / "ca.p12"),
        ("ca", "request", tmp_path / "request.pem"),
        ("ca", "rotate"),
        ("access", "grant", "anna", asked),
        ("keys", "protect"),
    ):
        done = coordinator(folder, *map(str, command))
        assert done.code == 0, done.err
    monkeypatch.setenv(PASSPHRASE, ONE)
    monkeypatch.delenv(NEW_PASSPHRASE)
    assert coordinator(folder, "keys", "protect", "--clear").code == 0
    monkeypatch.delenv(PASSPHRASE)
    for kept in folder.keys.glob("ca*"):  # a machine that takes over
        kept.unlink()
    (folder.keys / "authorities.json").unlink()
    assert coordinator(folder, "ca", "import", str(tmp_path / "ca.p12")).code == 0

    reading = read_log(folder.audit, writer=f"spiffe://{FEDERATION}/coordinator", keys=[coordinator_key])
    assert told_in(reading)[begun:] == [
        (LOCAL, "ca export"),
        (LOCAL, "ca request"),
        (LOCAL, "ChangeAuthority"),
        (LOCAL, "authority changed"),
        (LOCAL, "GrantAccess"),
        (LOCAL, "access granted"),
        (LOCAL, "keys protect"),
        (LOCAL, "keys protect"),
        (LOCAL, "ca import"),
    ]
    assert reading.entries[-1].event is Event.SEALED  # each command seals what it added
    assert ONE not in folder.audit.joinpath("log.000001").read_text()


def test_a_grant_names_the_certificate_that_it_made(folder: CoordinatorFolder, tmp_path: Path) -> None:
    """So that the register's operators can be held against the log."""
    asked = run_command(coordinator_main, "access", "request", FEDERATION, "anna", "--dir", tmp_path / "laptop").out
    (tmp_path / "csr").write_text(asked)
    assert coordinator(folder, "access", "grant", "anna", str(tmp_path / "csr")).code == 0
    (listed,) = [
        row for row in json.loads(coordinator(folder, "access", "list", "--json").out) if row["name"] == "anna"
    ]
    (granted,) = read_log(folder.audit).of(Event.ACCESS_GRANTED)
    assert (granted.text("certificate"), granted.text("to")) == (listed["serial"], f"spiffe://{FEDERATION}/viewer/anna")
    assert granted.who == LOCAL


def test_an_export_is_pushed_and_the_log_says_where(
    folder: CoordinatorFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert coordinator(folder, "plan", "start").code == 0
    with a_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.origin)
        refused = coordinator(folder, "export", str(tmp_path / "one"), "--push", "clinics/north")
        assert "HF_TOKEN holds no token" in refused.err
        assert not (tmp_path / "one").exists()
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        refused = coordinator(folder, "export", str(tmp_path / "one"), "--push", "clinics/north")
        assert refused.code != 0
        assert "it was not pushed" in refused.out + refused.err
        assert (tmp_path / "one" / "model.safetensors").exists()
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        exported = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
        (tmp_path / "one" / "README.md").write_text("another")
        refused = coordinator(folder, "export", str(tmp_path / "one"), "--push", "clinics/north")
        refused.is_refusal(IntegrityError, "README.md was changed since the export", "to another folder")
        (tmp_path / "one" / "README.md").write_bytes(exported["README.md"])
        done = coordinator(folder, "export", str(tmp_path / "one"), "--push", "clinics/north")
        assert done.code == 0, done.err
        assert f"{hub.origin}/clinics/north, commit {COMMIT}" in done.out
        assert {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()} == exported
        assert hub.repositories["clinics/north"].files == exported
    *_, newest = read_log(folder.audit).of(Event.OPERATOR_COMMAND)
    assert newest.text("pushed_to") == f"{hub.origin}/clinics/north"
    assert TOKEN not in done.out + done.err + refused.err
    assert not any(TOKEN.encode() in path.read_bytes() for path in folder.root.rglob("*") if path.is_file())
    assert "for --push" in coordinator(folder, "export", str(tmp_path / "three"), "--public").err
    coordinator(folder, "export", str(tmp_path / "one")).is_refusal(ConfigurationError, "is not an empty folder")


def test_an_export_on_the_host_is_in_the_log(folder: CoordinatorFolder, tmp_path: Path) -> None:
    assert coordinator(folder, "plan", "start").code == 0
    assert coordinator(folder, "export", str(tmp_path / "model")).code == 0
    *_, newest = read_log(folder.audit).of(Event.OPERATOR_COMMAND)
    assert (newest.text("command"), newest.text("folder")) == ("export", str(tmp_path / "model"))
    assert newest.text("model") in (tmp_path / "model" / "README.md").read_text()


def test_a_silos_change_of_its_keys_is_in_its_log(silo: SiloFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    public = load_credentials(silo).identity_key.public_key()
    monkeypatch.setenv(NEW_PASSPHRASE, ONE)
    assert agent(silo, "keys", "protect").code == 0
    monkeypatch.setenv(PASSPHRASE, ONE)
    monkeypatch.delenv(NEW_PASSPHRASE)
    assert agent(silo, "keys", "protect", "--clear").code == 0
    reading = read_log(silo.audit, writer=f"spiffe://{FEDERATION}/silo/{HOSPITAL}", keys=[public])
    told = [(entry.who, entry.text("clear")) for entry in reading.of(Event.KEYS_PROTECTED)]
    assert told == [(LOCAL, "no"), (LOCAL, "yes")]
