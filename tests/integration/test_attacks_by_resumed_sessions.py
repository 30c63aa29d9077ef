"""A TLS session that was stolen from a silo's memory or from its proxy: nobody acts by it, with or without the silo's
key."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython.cygrpc import SSLSessionCacheLRU  # resumes sessions, by an option of a channel; no other name exists

from lorica_coordinator.edges.server.presented import Presented
from lorica_coordinator.edges.status_page.entrance import tls_context
from lorica_security.identifiers import Identity, Role, coordinator_dns_name
from lorica_security.pki.authority import Authority
from silo_wire.v1 import enrolment_pb2, enrolment_pb2_grpc, federation_pb2, federation_pb2_grpc
from tests.support.certificates import forged
from tests.support.coordinator import FEDERATION, HOSPITAL, FederationTemplate, RunningCoordinator, running
from tests.support.coordinator import federation_template as federation_template


@pytest.fixture
async def at(federation_template: FederationTemplate, tmp_path: Path) -> AsyncIterator[RunningCoordinator]:
    """With an invitation open, so that both ports listen."""
    async with running(federation_template.copy(tmp_path / "coordinator")) as coordinator:
        await coordinator.invited("newcomer")
        yield coordinator


class Client:
    """Connections that go on with each other's sessions, as far as the server lets them."""

    def __init__(self, at: RunningCoordinator) -> None:
        self._at = at
        self._sessions = SSLSessionCacheLRU(4)

    async def refusal(self, port: int, key_pem: bytes | None = None, certificate_pem: bytes | None = None) -> str:
        """Of a call over a new connection."""
        roots = self._at.coordinator.keys.trust.to_pem()
        options: list[tuple[str, Any]] = [
            ("grpc.ssl_session_cache", self._sessions),
            ("grpc.ssl_target_name_override", coordinator_dns_name(FEDERATION)),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        tls = grpc.ssl_channel_credentials(roots, key_pem, certificate_pem)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", tls, options=options) as channel:
            try:
                if port == self._at.silos_port:
                    await federation_pb2_grpc.FederationStub(channel).ReportProgress(
                        federation_pb2.ProgressReport(), timeout=20
                    )
                else:
                    await enrolment_pb2_grpc.EnrolmentStub(channel).Enrol(enrolment_pb2.EnrolRequest(), timeout=20)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
        return ""


async def test_the_session_of_a_silo_lets_nobody_act_as_it(
    at: RunningCoordinator, federation_template: FederationTemplate
) -> None:
    silo = federation_template.silos[HOSPITAL]
    foreign = forged(Authority.create(FEDERATION, now=datetime.now(UTC)), Identity(FEDERATION, Role.SILO, HOSPITAL))
    assert (await Client(at).refusal(at.silos_port, *foreign)).startswith("UNAVAILABLE")  # not even a handshake

    client = Client(at)
    let_in = await client.refusal(at.silos_port, silo.tls_key_pem, silo.certificate_pem)
    assert let_in.startswith("PERMISSION_DENIED: the certificate is of silo hospital-a"), (
        let_in
    )  # the report names nobody
    before = at.errors("AuthenticationError")
    by_the_thief = await client.refusal(at.silos_port, *foreign)
    assert by_the_thief.startswith("UNAUTHENTICATED: the call came over a resumed TLS session"), by_the_thief
    by_the_silo = await client.refusal(at.silos_port, silo.tls_key_pem, silo.certificate_pem)
    assert by_the_silo.startswith("UNAUTHENTICATED: the call came over a resumed TLS session"), by_the_silo
    assert at.errors("AuthenticationError") == before + 2


async def test_strangers_resume_nothing_either(at: RunningCoordinator) -> None:
    client = Client(at)
    first, second = [await client.refusal(at.enrolment_port) for _ in range(2)]
    assert "resumed" not in first
    assert second.startswith("UNAUTHENTICATED: the call came over a resumed TLS session"), second


def test_the_status_page_gives_no_tickets(at: RunningCoordinator) -> None:
    keys = at.coordinator.keys
    context = tls_context(Presented(keys.server_pair(datetime.now(UTC)), keys.trust), token=True)
    assert context.num_tickets == 0
    assert context.options & 1 << 14  # SSL_OP_NO_TICKET
