"""The silo's folder: private, complete or refused, never overwritten."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lorica_security.errors import ConfigurationError, MalformedMessage, StateError
from lorica_security.identity.identity_key import identity_key_to_pem, new_identity_key, public_key_bytes
from lorica_security.pki.tls_key import new_tls_key, tls_key_to_pem
from silo_agent.edges.disk.silo_folder import ENVIRONMENT_VARIABLE, SiloFolder, silo_folder
from silo_agent.edges.keys.key_store import load_credentials, split_address, store_credentials
from tests.support.federation_peer import TestNet

CREDENTIALS = TestNet.create().credentials("coordinator.example.org:7443")
FILES = ("identity.key", "tls.pem", "enrolment.json")


@pytest.fixture
def folder(tmp_path: Path) -> SiloFolder:
    folder = SiloFolder(tmp_path / "silo")
    store_credentials(folder, CREDENTIALS)
    return folder


def test_what_is_stored_is_loaded_and_every_file_is_private(folder: SiloFolder) -> None:
    loaded = load_credentials(folder)
    assert loaded.identity == CREDENTIALS.identity
    assert loaded.address == "coordinator.example.org:7443"
    assert loaded.certificate == CREDENTIALS.certificate
    assert loaded.tls_key_pem == CREDENTIALS.tls_key_pem
    assert identity_key_to_pem(loaded.identity_key) == identity_key_to_pem(CREDENTIALS.identity_key)
    assert public_key_bytes(loaded.coordinator_key) == public_key_bytes(CREDENTIALS.coordinator_key)
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.root.iterdir()} == dict.fromkeys(FILES, 0o600)
    assert folder.root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_others_can_read_is_refused_with_the_remedy(folder: SiloFolder, name: str) -> None:
    (folder.root / name).chmod(0o640)
    with pytest.raises(ConfigurationError, match=rf"{name} has mode 0640.*chmod 600"):
        load_credentials(folder)


def test_a_folder_that_others_can_enter_is_refused_with_the_remedy(folder: SiloFolder) -> None:
    folder.root.chmod(0o755)
    with pytest.raises(ConfigurationError, match=r"mode 0755.*chmod 700"):
        load_credentials(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(folder: SiloFolder, name: str) -> None:
    (folder.root / name).unlink()
    with pytest.raises(ConfigurationError, match="enroll TOKEN" if name == "enrolment.json" else name):
        load_credentials(folder)


@pytest.mark.parametrize("left", FILES)
def test_nothing_that_is_there_is_overwritten(tmp_path: Path, left: str) -> None:
    folder = SiloFolder(tmp_path)
    tmp_path.chmod(0o700)
    (tmp_path / left).write_text("precious")
    with pytest.raises(StateError, match="--dir"):
        store_credentials(folder, CREDENTIALS)
    assert [path.name for path in tmp_path.iterdir()] == [left]
    assert (tmp_path / left).read_text() == "precious"


def test_a_key_of_another_certificate_is_refused(folder: SiloFolder) -> None:
    pem = folder.tls.read_bytes()
    folder.tls.write_bytes(tls_key_to_pem(new_tls_key()) + pem[pem.index(b"-----BEGIN CERTIFICATE") :])
    with pytest.raises(ConfigurationError, match=r"tls\.pem has a certificate for another key"):
        load_credentials(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda facts: "not json",
        lambda facts: json.dumps({**facts, "version": 2}),
        lambda facts: json.dumps({**facts, "silo": "../x"}),
        lambda facts: json.dumps({**facts, "federation": "UPPER"}),
        lambda facts: json.dumps({**facts, "coordinator_identity_key": "00"}),
        lambda facts: json.dumps({**facts, "address": "nowhere"}),
        lambda facts: json.dumps({key: facts[key] for key in facts if key != "silo"}),
        lambda facts: json.dumps([]),
    ],
)
def test_a_damaged_enrolment_is_named(folder: SiloFolder, damage: object) -> None:
    assert callable(damage)
    folder.enrolment.write_text(damage(json.loads(folder.enrolment.read_text())))
    with pytest.raises(ConfigurationError, match=r"enrolment\.json"):
        load_credentials(folder)


def test_private_keys_are_not_shown() -> None:
    shown = repr(replace(CREDENTIALS, identity_key=new_identity_key()))
    assert "PRIVATE" not in shown
    assert "tls_key=" not in shown
    assert "identity_key=" not in shown.replace("coordinator_key=", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a.example:1", ("a.example", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[::1]:443", ("::1", 443))],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == expected


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:-1", "a:٣", "a b:1", "A:1", "a:1:2"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(MalformedMessage):
        split_address(text)


def test_the_folder_is_the_option_then_the_variable_then_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    assert silo_folder(tmp_path / "option").root == tmp_path / "option"
    assert silo_folder(None).root == tmp_path / "variable"
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    assert silo_folder(None).root == tmp_path / "home" / "lorica" / "silo"
