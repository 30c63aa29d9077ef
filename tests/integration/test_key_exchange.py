"""By what the keys of a connection are agreed: a hybrid that holds against a quantum computer, and `silo-agent check`
says so."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.console.preflight import Checks, Outcome
from lorica_security.errors import MalformedMessage, Unreachable
from silo_agent.edges.check.connection_checks import KEYS_OF_CONNECTION, check_key_exchange
from silo_agent.edges.wire.channel import mutual_channel
from silo_agent.edges.wire.key_exchange import HYBRID, agreed_group, key_exchange
from silo_wire.v1 import federation_pb2, federation_pb2_grpc
from tests.support.connect_proxy import ConnectProxy
from tests.support.federation_peer import SILO, FederationPeer, TestNet

NET = TestNet.create()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@asynccontextmanager
async def openssl(folder: Path, *, curve: str = "") -> AsyncIterator[str]:
    """Address of a TLS server of Python's own library, which takes `curve` alone where one is named; certificates are
    the coordinator's."""
    file = folder / "server.pem"
    file.write_bytes(b"".join(NET.server_pair))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    if curve:
        context.set_ecdh_curve(curve)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def outcome(address: str) -> tuple[Outcome, str]:
    checks = Checks()
    await check_key_exchange(checks, NET.credentials(address))
    (check,) = checks.done
    assert check.name == KEYS_OF_CONNECTION
    return check.outcome, check.detail


async def test_agent_and_coordinator_agree_by_the_hybrid_and_the_server_says_the_same() -> None:
    seen: list[Any] = []

    class Servicer(federation_pb2_grpc.FederationServicer):
        async def UploadOffset(self, request: Any, context: Any) -> Any:  # noqa: N802  # gRPC's name
            seen.append(context.auth_context()["ssl_negotiated_key_exchange_group"])
            return federation_pb2.UploadOffsetReply()

    key, certificate = NET.server_pair
    server = grpc.aio.server()
    federation_pb2_grpc.add_FederationServicer_to_server(Servicer(), server)
    root = NET.credentials("nowhere:1").trust.to_pem()
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)], root, require_client_auth=True)
    )
    await server.start()
    try:
        credentials = NET.credentials(f"127.0.0.1:{port}")
        assert await key_exchange(credentials) == HYBRID
        async with mutual_channel(credentials) as channel:
            stub: Any = federation_pb2_grpc.FederationStub(channel)
            await stub.UploadOffset(federation_pb2.UploadOffsetRequest())
    finally:
        await server.stop(None)
    assert seen == [[HYBRID.encode()]]


async def test_check_says_what_was_agreed(tmp_path: Path) -> None:
    async with FederationPeer(NET) as peer:
        found, words = await outcome(peer.address)
        assert found is Outcome.PASSED
        assert HYBRID in words


@pytest.mark.parametrize(("curve", "name"), [("prime256v1", "P-256"), ("secp384r1", "P-384")])
async def test_attack_a_server_that_knows_no_hybrid_is_noticed(tmp_path: Path, curve: str, name: str) -> None:
    """It asks for another key first (HelloRetryRequest), which names the group as well."""
    async with openssl(tmp_path, curve=curve) as address:
        found, words = await outcome(address)
        assert found is Outcome.NOTICE
        assert f"agreed by {name}, not {HYBRID}" in words


async def test_through_a_proxy_it_is_the_coordinators_word_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FederationPeer(NET) as peer, ConnectProxy() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        assert await key_exchange(NET.credentials(peer.address, SILO)) == HYBRID
        assert proxy.targets


async def test_who_breaks_off_or_speaks_no_tls_is_said_to(tmp_path: Path) -> None:
    async def speaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: bytes) -> None:
        await reader.read(1)
        writer.write(words)
        writer.close()

    for words, error in (
        (b"", Unreachable),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Unreachable),
        (b"\x16\x03\x03\x00\x05hello", MalformedMessage),
    ):
        async with await asyncio.start_server(
            lambda reader, writer, words=words: speaks(reader, writer, words), "127.0.0.1", 0
        ) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(error):
                await key_exchange(NET.credentials(f"127.0.0.1:{port}"))
    with pytest.raises(Unreachable):
        await key_exchange(NET.credentials(f"127.0.0.1:{port}"))


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_a_group_or_malformed(content: bytes, hello: bool) -> None:
    try:
        agreed_group((b"\x16\x03\x03\x00\xff\x02\x00\x00\xfb" if hello else b"") + content)
    except MalformedMessage:
        return
