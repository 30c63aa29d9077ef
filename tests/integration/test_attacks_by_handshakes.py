"""Strangers who connect from many sides at once: none of them ends the coordinator's process."""

import subprocess
import sys
import time
from datetime import UTC, datetime

import grpc
import pytest

from lorica_coordinator.edges.keys.key_store import TlsPair
from lorica_coordinator.edges.server import presented as module
from lorica_coordinator.edges.server.presented import BEFORE_A_CHANGE_S, Presented
from lorica_security.identifiers import Identity, Role
from lorica_security.pki.authority import Authority
from lorica_security.pki.trust_bundle import TrustBundle
from tests.support.certificates import FEDERATION, forged

HANDSHAKES = 3000


def test_a_process_outlives_a_crowd_that_shakes_hands_while_certificates_change() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.handshakes", str(HANDSHAKES)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert int(ended.stdout) >= 2 * HANDSHAKES


def test_grpc_is_given_another_certificate_once_and_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own race at a change is met too seldom for a crowd to show it."""
    authority = Authority.create(FEDERATION, now=datetime.now(UTC))
    trust = TrustBundle((authority.certificate,))

    def pair() -> TlsPair:
        key, certificate = forged(authority, Identity(FEDERATION, Role.COORDINATOR))
        return TlsPair(key_pem=key, certificate_pem=certificate)

    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda first, changed, clients: changed)
    presented = Presented(pair(), trust)
    for clients in (True, False):
        changed = presented.credentials(clients=clients)
        assert changed() is None
        presented.show(pair(), trust)
        assert waited == []
        assert changed() is not None
        assert waited == [BEFORE_A_CHANGE_S]
        assert changed() is None
        assert waited == [BEFORE_A_CHANGE_S]
        waited.clear()
    assert module.BEFORE_A_CHANGE_S >= 1.0
