"""TLS with a client's key in a SoftHSM2 token: over gRPC's own handshakes, to a server that asks for a certificate."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from structlog.testing import capture_logs

from lorica_security.errors import ConfigurationError
from lorica_security.pkcs11_keys.reference import key_text, tls_key_in_token
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.wire.channel import mutual_channel
from silo_wire.v1 import federation_pb2, federation_pb2_grpc
from tests.support.federation_peer import TestNet
from tests.support.soft_hsm import CAN, WHY_NOT, pin_file, tokens, uri

pytestmark = pytest.mark.skipif(not CAN, reason=WHY_NOT)
NET = TestNet.create()
LONGEST_S = 60


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, list[Any]]]:
    """The address of a server that wants a certificate of this federation, and the common names that it saw."""
    seen: list[Any] = []

    class Servicer(federation_pb2_grpc.FederationServicer):
        async def UploadOffset(self, request: Any, context: Any) -> Any:  # noqa: N802  # gRPC's name
            seen.append(context.auth_context()["x509_common_name"])
            return federation_pb2.UploadOffsetReply()

    server = grpc.aio.server()
    federation_pb2_grpc.add_FederationServicer_to_server(Servicer(), server)
    root = NET.credentials("nowhere:1").trust.to_pem()
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([NET.server_pair], root, require_client_auth=True)
    )
    await server.start()
    try:
        yield f"127.0.0.1:{port}", seen
    finally:
        await server.stop(None)


def credentials(address: str, token: str, label: str, pin: Path) -> SiloCredentials:
    tokens()
    key = tls_key_in_token(uri(token, label, pin), pin.parent / "silo")
    made = NET.credentials(address)
    certificate = NET.authority.issue(key.public_key(), made.identity, now=datetime.now(UTC))
    return replace(made, tls_key=key, certificate=certificate)


async def called(who: SiloCredentials) -> None:
    async with mutual_channel(who) as channel:
        stub: Any = federation_pb2_grpc.FederationStub(channel)
        await stub.UploadOffset(federation_pb2.UploadOffsetRequest(), timeout=LONGEST_S)


@pytest.mark.parametrize("label", ["tls", "tls-384"])
async def test_a_handshake_is_signed_in_the_token(label: str, tmp_path: Path) -> None:
    async with served() as (address, seen):
        who = credentials(address, "silo", label, pin_file(tmp_path / "pin"))
        with pytest.raises(ConfigurationError, match="does not give it away"):
            _ = who.tls_key_pem
        await called(who)
        assert seen == [[who.silo.encode()]]


async def test_attack_a_certificate_without_its_key_is_not_let_in(tmp_path: Path) -> None:
    async with served() as (address, seen):
        mine = credentials(address, "silo", "tls", pin_file(tmp_path / "pin"))
        other = credentials(address, "hospital", "tls", tmp_path / "pin")
        with pytest.raises(grpc.aio.AioRpcError):
            await called(replace(mine, certificate=other.certificate))
        assert seen == []


async def test_a_token_that_is_lost_ends_the_handshake_and_the_log_says_why(tmp_path: Path) -> None:
    async with served() as (address, seen):
        who = credentials(address, "losing", "tls", pin_file(tmp_path / "pin"))
        who.tls_key._session._session.close()  # type: ignore[attr-defined]
        with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
            await called(who)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert seen == []
        assert {line["event"] for line in logs} == {"tls-key-in-token"}
        assert "the token 'losing' did not answer" in logs[0]["error"]


def test_what_is_kept_of_such_a_key_is_no_secret(tmp_path: Path) -> None:
    text = key_text(credentials("nowhere:1", "silo", "tls", pin_file(tmp_path / "pin")).tls_key)
    assert text.startswith(b"pkcs11:")
    assert b"PRIVATE" not in text
