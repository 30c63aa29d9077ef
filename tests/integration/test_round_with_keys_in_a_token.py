"""A federation whose authority issues in a SoftHSM2 token, and a silo whose identity and TLS keys lie in another one:
real processes over mutual TLS."""

import json
from collections.abc import Iterator

import pytest

from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.silos import keep_first, write_silo
from lorica_security.errors import StateError
from lorica_security.host.files import write_private
from lorica_security.pkcs11_keys.reference import in_token
from lorica_security.pki.parsing import parse_certificate
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import load_credentials
from tests.support.federation import Federation
from tests.support.soft_hsm import CAN, PIN, WHY_NOT, pin_file, tokens, uri
from tests.support.warm_processes import WarmProcesses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(not CAN, reason=WHY_NOT)]

SILO = "clinic"
VALUES = ("schedule.rounds=1", "schedule.min_silos=1", "training.epochs=1", "evaluation.initial=false")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Federation, list[dict[str, str]]]]:
    """After its round, with what `silo-agent check` said before it."""
    root = tmp_path_factory.mktemp("in-token")
    pin = pin_file(root / "pin")
    data = root / "data"
    write_silo(data, CLINIC, seed=3)
    keep_first(data / "train.jsonl", 8)
    (root / "logs").mkdir()
    with WarmProcesses(root / "logs") as processes:
        it = Federation(root, processes, {SILO: data}, SOFTHSM2_CONF=str(tokens() / "softhsm2.conf"))
        it.init("--no-plan", "--federation", "north", "--authority-key", uri("authority", "ca", pin))
        it.coordinator("plan", "new", "small", "--size", "micro", *(word for one in VALUES for word in ("--set", one)))
        it.serve("--plan", "small")
        keys = ("--identity-key", uri("hospital", "identity", pin), "--tls-key", uri("hospital", "tls", pin))
        it.agent(SILO, "enroll", it.coordinator("invite", SILO).strip(), *keys)
        found = json.loads(it.agent(SILO, "check", "--data", str(data), "--json"))
        it.start_agent(SILO)
        it.wait(it.all_ready)
        it.coordinator("plan", "start", "small")
        it.wait(it.finished)
        processes.stop(SILO)
        yield it, found


def test_a_round_is_done_with_keys_that_never_left_their_tokens(done: tuple[Federation, list[dict[str, str]]]) -> None:
    federation, found = done
    own = SiloFolder(federation.root / "agents" / SILO)
    credentials = load_credentials(own)
    assert in_token(credentials.identity_key)
    assert in_token(credentials.tls_key)
    authority = (federation.folder / "keys" / "ca.pem").read_bytes()
    credentials.certificate.verify_directly_issued_by(parse_certificate(authority))
    (row,) = [one for one in found if one["name"] == "keys in a token"]
    assert row["outcome"] == "passed"
    assert "identity key 'identity' in token 'hospital', TLS key 'tls' in token 'hospital': each" in row["detail"]
    assert "by its label alone, and any other of that label would get the PIN: add serial=" in row["detail"]
    (row,) = json.loads(federation.coordinator("rounds", "--json"))
    assert row["outcome"] == "applied"
    assert [path for path in own.root.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()] == []
    assert (federation.folder / "keys" / "ca.key").read_text().startswith("pkcs11:token=authority;object=ca?")
    everything = [path for path in federation.root.rglob("*") if path.is_file() and path != federation.root / "pin"]
    assert [path for path in everything if PIN.encode() in path.read_bytes()] == []


def test_a_successor_lies_in_a_token_or_is_refused(done: tuple[Federation, list[dict[str, str]]]) -> None:
    federation, _ = done
    named = "lies in a token, and its successor(?:'s)? would lie in a file"
    with pytest.raises(StateError, match=named):
        federation.coordinator("ca", "rotate")
    with pytest.raises(StateError, match=named):
        federation.agent(SILO, "identity", "rotate")
    keys, pin = federation.folder / "keys", federation.root / "pin"
    successor = keys / "successor.uri"
    write_private(successor, uri("authority", "ca", pin).encode())
    with pytest.raises(StateError, match="names the key of the present authority"):
        federation.coordinator("ca", "rotate")
    write_private(successor, uri("authority", "ca-2", pin).encode())
    assert "ca-2" in federation.coordinator("ca", "rotate")
    assert (keys / "ca-2.key").read_text().startswith("pkcs11:token=authority;object=ca-2?")
    assert not successor.exists()
    assert "one in a token still signs, for whoever has the PIN" in federation.coordinator("ca", "activate", "--force")
