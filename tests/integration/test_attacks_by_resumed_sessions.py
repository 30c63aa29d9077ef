"""A TLS session that was stolen from a silo's memory or from its proxy: nobody goes on with it, with or without the silo's key."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coordinator.edges.presented import Presented
from coordinator.edges.status_page.entrance import tls_context
from security.identifiers import Identity, Role
from security.pki.authority import Authority
from tests.support.certificates import forged
from tests.support.coordinator import FEDERATION, HOSPITAL, FederationTemplate, RunningCoordinator, running
from tests.support.coordinator import federation_template as federation_template
from tests.support.raw_http2 import SETTINGS, client_context, nobody

BEGINNING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, SETTINGS, 0, 0, 0, 0, 0))
PATIENCE_S = 30.0


@pytest.fixture
async def at(federation_template: FederationTemplate, tmp_path: Path) -> AsyncIterator[RunningCoordinator]:
    """With an invitation open, so that both ports listen."""
    async with running(federation_template.copy(tmp_path / "coordinator")) as coordinator:
        await coordinator.invited("newcomer")
        yield coordinator


def spoken(
    port: int, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[bool, bytes, ssl.SSLSession | None]:
    """Whether `session` was gone on with, how the server's HTTP/2 begins (b"" where it cuts off), and the session that it leaves."""
    with (
        socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
        context.wrap_socket(plain, session=session) as raw,
    ):
        try:
            raw.sendall(BEGINNING)
            answer = raw.recv(4)
        except (ssl.SSLError, ConnectionError):
            answer = b""
        return bool(raw.session_reused), answer, raw.session


async def test_the_session_of_a_silo_lets_nobody_in_without_its_key(
    at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    silo = federation_template.silos[HOSPITAL]
    context = client_context(silo.tls_key_pem, silo.certificate_pem, tmp_path)
    _, answer, session = await asyncio.to_thread(spoken, at.silos_port, context)
    assert answer
    assert session is not None
    assert session.has_ticket, "gRPC gives no tickets any more: a configuration for each handshake is not needed"

    foreign = Authority.create(FEDERATION, now=datetime.now(UTC))
    pair = tmp_path / "thief.pem"
    pair.write_bytes(b"".join(forged(foreign, Identity(FEDERATION, Role.SILO, HOSPITAL))))
    context.load_cert_chain(
        pair
    )  # Python keeps a session to its context: the thief's key takes the place of the silo's
    assert (await asyncio.to_thread(spoken, at.silos_port, context))[:2] == (False, b"")
    reused, answer, _ = await asyncio.to_thread(spoken, at.silos_port, context, session)
    assert (reused, answer) == (False, b"")


async def test_no_port_goes_on_with_a_session_of_anybody(
    at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    silo = federation_template.silos[HOSPITAL]
    own = client_context(silo.tls_key_pem, silo.certificate_pem, tmp_path)
    for port, context in ((at.silos_port, own), (at.enrolment_port, nobody())):
        _, _, session = await asyncio.to_thread(spoken, port, context)
        reused, answer, _ = await asyncio.to_thread(spoken, port, context, session)
        assert answer
        assert not reused, port


def test_the_status_page_gives_no_tickets(at: RunningCoordinator) -> None:
    keys = at.coordinator.keys
    context = tls_context(Presented(keys.server_pair(datetime.now(UTC)), keys.trust), token=True)
    assert context.num_tickets == 0
    assert context.options & ssl.OP_NO_TICKET
