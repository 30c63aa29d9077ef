"""The bounded HTTP server over TLS, where what it has sent is not yet on its way: a slow reader gets all of an
answer."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from lorica_security.daemon import http_server
from lorica_security.daemon.http_server import HttpServer, Request, Response
from lorica_security.daemon.listen_address import Address

LARGE = b"x" * 400_000
PATIENCE_S = 30.0


def self_signed(file: Path) -> ssl.SSLContext:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "page")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(private + certificate.public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context


async def answer(request: Request) -> Response:
    return Response(body=LARGE if request.path == "/large" else b"small")


@pytest.fixture
async def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Address]:
    listen = socket.create_server

    def with_little_room(*arguments: object, **options: object) -> socket.socket:
        listening = listen(*arguments, **options)  # type: ignore[arg-type]
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        return listening

    monkeypatch.setattr(socket, "create_server", with_little_room)
    server = HttpServer(answer, "page")
    try:
        yield await server.start(Address("127.0.0.1", 0), self_signed(tmp_path / "page.pem"))
    finally:
        await server.stop()


async def body_of(at: Address, path: str, *, of_one_read: int) -> bytes:
    """Of an answer after which the connection ends, read slowly."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, at)
    reader, writer = await asyncio.open_connection(sock=own, ssl=trusting, server_hostname="page", limit=8192)
    got = b""
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        while part := await reader.read(of_one_read):
            got += part
            await asyncio.sleep(0.001)
    finally:
        writer.transport.abort()
    return got.partition(b"\r\n\r\n")[2]


async def test_one_that_reads_slowly_gets_the_whole_answer(at: Address) -> None:
    async with asyncio.timeout(PATIENCE_S):
        assert await body_of(at, "/large", of_one_read=8192) == LARGE


async def test_a_connection_ends_with_its_last_answer(at: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SEND_S", 100 * PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        assert await body_of(at, "/small", of_one_read=8192) == b"small"
