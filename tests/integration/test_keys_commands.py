"""`coordinator keys protect` and `silo-agent keys protect` as people type them."""

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.cli import main as coordinator_main
from coordinator.edges.coordinator_folder import CoordinatorFolder
from security.errors import AuthenticationError, ConfigurationError, Conflict
from security.pki.key_file import NEW_PASSPHRASE, PASSPHRASE, is_encrypted
from security.process_lock import ProcessLock
from silo_agent.cli import main as agent_main
from silo_agent.edges.key_store import store_credentials
from silo_agent.edges.silo_folder import SiloFolder
from tests.support.command_line import Done, run_command
from tests.support.coordinator import HOSPITAL, FederationTemplate, federation_template

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
