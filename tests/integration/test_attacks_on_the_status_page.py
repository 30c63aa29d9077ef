"""The status page against whoever would read it without leave, break it, or speak through it: real listeners, raw
bytes."""

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from lorica_coordinator.edges.keys.key_store import register_entry
from lorica_security.daemon import http_server
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import Identity, Role, coordinator_dns_name
from lorica_security.pki.authority import Authority
from lorica_security.pki.tls_key import new_tls_key, tls_key_to_pem
from silo_wire.messages import Prepare
from silo_wire.v1 import federation_pb2
from tests.support.certificates import forged
from tests.support.coordinator import BANK, FEDERATION, HOSPITAL, FederationTemplate, RunningCoordinator, Silo, running
from tests.support.coordinator import federation_template as federation_template

TOKEN = "0123456789abcdef" * 2
VIEWER = Identity(FEDERATION, Role.VIEWER, "victor")
PATIENCE_S = 60.0
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>'\"&"

Pair = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Reply:
    """`status` 0 where the connection ended without an answer."""

    status: int
    head: str
    body: str


@dataclass(frozen=True, slots=True)
class Page:
    at: RunningCoordinator
    port: int
    folder: Path

    async def says(self, raw: bytes, *, tls: ssl.SSLContext | None = None) -> Reply:
        """What comes back until the other side closes."""
        try:
            async with self.connected(tls) as (reader, writer), asyncio.timeout(PATIENCE_S):
                writer.write(raw)
                await writer.drain()
                return parsed(await reader.read())
        except OSError:  # of TLS as well
            return Reply(0, "", "")

    async def asks(self, path: str = "/", *lines: str, method: str = "GET", tls: ssl.SSLContext | None = None) -> Reply:
        host = "" if any(line.lower().startswith("host:") for line in lines) else "Host: localhost\r\n"
        head = "".join(f"{line}\r\n" for line in lines)
        raw = f"{method} {path} HTTP/1.1\r\n{host}{head}Connection: close\r\n\r\n"
        return await self.says(raw.encode("latin-1"), tls=tls)

    @asynccontextmanager
    async def connected(
        self, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        name = None if tls is None else coordinator_dns_name(FEDERATION)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls, server_hostname=name)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def tls(self, pair: Pair | None = None, *, trusting: bytes | None = None) -> ssl.SSLContext:
        """A client that checks the coordinator's certificate as a silo does."""
        context = ssl.create_default_context(cadata=(trusting or self.at.coordinator.keys.trust.to_pem()).decode())
        if pair is not None:
            file = self.folder / "client.pem"
            file.write_bytes(b"".join(pair))
            context.load_cert_chain(file)
        return context

    async def viewer(self) -> Pair:
        """With a certificate as the coordinator issues it now, and registers."""
        key, now = new_tls_key(), datetime.now(UTC)
        authority = self.at.coordinator.keys.authority
        certificate = authority.issue(key.public_key(), VIEWER, now=now, lifetime=timedelta(days=1))
        await self.at.service.register.add(register_entry(certificate, now))
        return tls_key_to_pem(key), pem(certificate)


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def parsed(raw: bytes) -> Reply:
    head, _, body = raw.partition(b"\r\n\r\n")
    status = int(head.split()[1]) if head else 0
    return Reply(status, head.decode("latin-1").lower(), body.decode())


@asynccontextmanager
async def served(template: FederationTemplate, root: Path, listen: str, token: str = "") -> AsyncIterator[Page]:
    folder = template.copy(root / "coordinator")
    text = folder.settings.read_text()
    text = text.replace('status = ""', f'status = "{listen}"').replace(
        'status_token_file = ""', f'status_token_file = "{token}"'
    )
    folder.settings.write_text(text)
    async with running(folder, offer="default") as at:
        assert at.serving.page is not None
        yield Page(at, at.serving.page.port, root)


@pytest.fixture
async def page(federation_template: FederationTemplate, tmp_path: Path) -> AsyncIterator[Page]:
    async with served(federation_template, tmp_path, "127.0.0.1:0") as found:
        yield found


@pytest.fixture
async def outside(federation_template: FederationTemplate, tmp_path: Path) -> AsyncIterator[Page]:
    """On an address that is not loopback alone."""
    async with served(federation_template, tmp_path, "0.0.0.0:0") as found:
        yield found


# --- what it says


async def test_it_says_what_the_operator_would_be_told(page: Page) -> None:
    reply = await page.asks()
    assert reply.status == 200
    for word in (FEDERATION, HOSPITAL, BANK, "gathering", "This plan promises no differential privacy", "authority ca"):
        assert word in reply.body
    head = await page.asks(method="HEAD")
    assert (head.status, head.body) == (200, "")
    assert f"content-length: {len(reply.body.encode())}" in head.head
    live = await page.asks("/live")
    assert live.status == 200
    assert "<html" not in live.body
    assert HOSPITAL in live.body
    for path in ("/page.css", "/page.js", "/charts.js", "/icon.svg", "/uPlot.iife.min.js", "/runbook.html"):
        assert (await page.asks(path)).status == 200


async def test_curves_and_rounds_are_those_of_plans_that_it_lists(page: Page) -> None:
    (plan,) = json.loads((await page.asks("/curves")).body)["plans"]
    assert (plan["name"], plan["present"], plan["points"]) == ("default", True, [])
    digest = plan["digest"]
    assert json.loads((await page.asks(f"/curves/{digest}")).body)["digest"] == digest
    for path, said in ((f"/log/{digest}", "No round was opened"), (f"/log/{digest}/1", "No such round was opened")):
        reply = await page.asks(path)
        assert (reply.status, said in reply.body) == (200, True)
    strangers = (
        *("0" * 64, digest[:-1], digest.upper(), f"{digest}/", f"{digest}/-1", f"{digest}/1.1", f"{digest}/{10**7}"),
        *(f"{digest}/1/2", f"{digest}%2f1", f"../{digest}", f"'{digest[1:]}", f"{digest}/\u0661"),
    )
    for what in ("curves", "log"):
        for stranger in strangers:
            assert (await page.asks(f"/{what}/{stranger}".encode().decode("latin-1"))).status in (400, 404), stranger


async def test_every_path_is_behind_the_same_door(outside: Page, federation_template: FederationTemplate) -> None:
    silo = federation_template.silos[HOSPITAL]
    tls, viewer = outside.tls((silo.tls_key_pem, silo.certificate_pem)), outside.tls(await outside.viewer())
    (plan,) = json.loads((await outside.asks("/curves", tls=viewer)).body)["plans"]
    for path in ("/", "/live", "/curves", f"/curves/{plan['digest']}", f"/log/{plan['digest']}", "/runbook.html"):
        assert (await outside.asks(path, tls=viewer)).status == 200
        assert (await outside.asks(path, tls=tls)).status == 403
        assert (await outside.asks(path, "Host: evil.example", tls=viewer)).status == 421


async def test_every_answer_forbids_whatever_a_browser_could_be_made_to_do(page: Page) -> None:
    for reply in (await page.asks(), await page.asks("/nothing"), await page.asks(method="POST")):
        for line in (
            "content-security-policy: default-src 'none'; style-src 'self'; script-src 'self'",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "cache-control: no-store",
            "x-frame-options: deny",
        ):
            assert line in reply.head


async def test_one_connection_serves_several_requests(page: Page) -> None:
    async with page.connected() as (reader, writer), asyncio.timeout(PATIENCE_S):
        for _ in range(3):
            writer.write(b"GET /icon.svg HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readuntil(b"</svg>\n")


# --- who speaks to it


OTHERS = (
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example:80",
    "[::2]",
    "[::1].evil",
    "[::1",
    "localhost:evil",
    "",
    "127.0.0.1@evil.example",
)


async def test_a_page_of_another_name_that_was_pointed_here_is_refused(page: Page) -> None:
    for host in OTHERS:
        reply = await page.asks("/live", f"Host: {host}")
        assert reply.status == 421, host
        assert HOSPITAL not in reply.body
    assert page.at.errors("AuthorisationError") == len(OTHERS)
    assert "status page" in (await page.asks()).body  # among what was refused


async def test_a_tunnel_may_have_another_port(page: Page) -> None:
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:9465"):
        assert (await page.asks("/", f"Host: {host}")).status == 200, host


async def test_nothing_but_looking(page: Page) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get"):
        reply = await page.asks(method=method)
        assert reply.status == 405, method
        assert "allow: get, head" in reply.head


ELSEWHERE = (
    "/../federation.toml",
    "/%2e%2e/%2e%2e/keys/identity.key",
    "//etc/passwd",
    "/static/page.css",
    "/page.css/../../view.py",
    "/page.css%00.html",
    "file:///etc/passwd",
    "/templates/page.html.j2",
    "*",
)


async def test_there_is_no_way_to_other_files(page: Page) -> None:
    for path in ELSEWHERE:
        assert (await page.asks(path)).status == 404, path


MALFORMED = (
    (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(64) + b"\r\n\r\n", 400),
    (b"GET /\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n folded: x\r\n\x00: y\r\n\r\n", 400),
    (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 505),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", 431),
    (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\n" + b"".join(b"H%d: x\r\n" % n for n in range(4000)) + b"\r\n", 431),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 413),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 413),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 413),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n", 417),
    (b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
)


async def test_malformed_requests_are_answered_once_and_cut_off(page: Page) -> None:
    for raw, status in MALFORMED:
        assert (await page.says(raw)).status == status, raw[:80]
    assert (await page.asks()).status == 200


async def test_what_a_silo_says_is_text_and_no_markup(page: Page, federation_template: FederationTemplate) -> None:
    async with Silo(page.at, federation_template.silos[HOSPITAL]) as silo:
        silo.attend()
        plan = (await silo.order(Prepare)).plan
        request = federation_pb2.ReadinessRequest(key=silo.key(plan), ready=False, reason=HOSTILE)
        await silo.stub.DeclareReadiness(request)
        body = (await page.asks("/live")).body
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in body
    assert "<script" not in body
    assert "<img" not in body


# --- who would keep others out


async def test_one_that_sends_a_head_by_drops_is_cut_off(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.5)
    async with page.connected() as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(b"GET / HTTP/1.1\r\n")
        drops = asyncio.create_task(drip(writer))
        assert b" 408 " in await reader.readuntil(b"\r\n")
        with suppress(ConnectionResetError):  # by a drop that the server did not read any more
            await reader.read()  # to the end: it is cut off
        drops.cancel()
    assert (await page.asks()).status == 200


async def drip(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"X-Slow: x\r\n")
        await asyncio.sleep(0.05)


async def test_one_that_does_not_read_is_cut_off(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SEND_S", 0.5)
    request = b"GET /page.css HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with page.connected() as (_, writer), asyncio.timeout(PATIENCE_S):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        with pytest.raises(ConnectionError):
            await ask_for_ever(writer, request)
    assert (await page.asks()).status == 200


async def ask_for_ever(writer: asyncio.StreamWriter, request: bytes) -> None:
    while True:  # as many answers as the kernel keeps, and then no more
        writer.write(request * 1000)
        await writer.drain()


async def test_one_address_does_not_take_every_connection(page: Page) -> None:
    held = [
        await asyncio.open_connection("127.0.0.1", page.port) for _ in range(http_server.MAX_CONNECTIONS_OF_ONE + 4)
    ]
    try:
        async with asyncio.timeout(PATIENCE_S):
            for reader, _ in held[http_server.MAX_CONNECTIONS_OF_ONE :]:
                assert await gone(reader)
        held[0][1].transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            while (await page.asks()).status != 200:  # it has to hear of the end first
                pass
    finally:
        for _, writer in held:
            writer.transport.abort()


async def gone(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


# --- on other addresses


async def test_a_viewer_reads_it_from_another_host(outside: Page) -> None:
    reply = await outside.asks(tls=outside.tls(await outside.viewer()))
    assert reply.status == 200
    assert HOSPITAL in reply.body
    assert (await outside.asks("/", "Host: evil.example", tls=outside.tls(await outside.viewer()))).status == 421


async def test_a_silo_does_not(outside: Page, federation_template: FederationTemplate) -> None:
    silo = federation_template.silos[HOSPITAL]
    reply = await outside.asks(tls=outside.tls((silo.tls_key_pem, silo.certificate_pem)))
    assert reply.status == 403
    assert BANK not in reply.body


async def test_a_revoked_viewer_is_refused_on_the_connection_that_is_open(outside: Page) -> None:
    tls = outside.tls(await outside.viewer())
    request = b"GET /icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with outside.connected(tls) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(request)
        assert b" 200 " in await reader.readuntil(b"\r\n")
        await reader.readuntil(b"</svg>\n")
        await outside.at.service.revoke(Role.VIEWER, "victor")
        writer.write(request)
        assert b" 403 " in await reader.readuntil(b"\r\n")
    assert (await outside.asks(tls=tls)).status == 403
    assert outside.at.errors("AuthorisationError") == 2


async def test_certificates_that_are_none_of_the_register(outside: Page) -> None:
    authority, now = outside.at.coordinator.keys.authority, datetime.now(UTC)
    stolen = await outside.asks(tls=outside.tls(forged(authority, VIEWER)))
    assert (stolen.status, outside.at.errors("AuthenticationError")) == (401, 1)
    expired = forged(authority, VIEWER, begin=now - timedelta(days=3), end=now - timedelta(minutes=1))
    foreign = forged(Authority.create(FEDERATION, now=now), VIEWER)
    for pair in (None, expired, foreign):
        assert (await outside.asks(tls=outside.tls(pair))).status == 0
    assert (await outside.asks()).status == 0  # without TLS


async def test_nothing_older_than_tls_1_3(outside: Page) -> None:
    tls = outside.tls(await outside.viewer())
    tls.maximum_version = ssl.TLSVersion.TLSv1_2
    assert (await outside.asks(tls=tls)).status == 0


async def test_the_page_shows_the_certificate_of_the_moment(outside: Page) -> None:
    viewer, authorities = await outside.viewer(), outside.at.service.authorities
    await authorities.take("rotate", force=True)
    await authorities.take("activate", force=True)
    newest = outside.at.coordinator.keys.authority.certificate
    async with asyncio.timeout(PATIENCE_S):
        while (await outside.asks(tls=outside.tls(viewer, trusting=pem(newest)))).status != 200:
            await asyncio.sleep(0.05)
    fresh = await outside.viewer()
    assert (await outside.asks(tls=outside.tls(fresh, trusting=pem(newest)))).status == 200


async def test_a_token_opens_it_and_nothing_like_it(federation_template: FederationTemplate, tmp_path: Path) -> None:
    write_token(tmp_path / "token", TOKEN)
    async with served(federation_template, tmp_path, "0.0.0.0:0", "../token") as page:
        for value in (f"Bearer {TOKEN}", basic("anybody", TOKEN)):
            assert (await page.asks("/", f"Authorization: {value}", tls=page.tls())).status == 200
        assert (await page.asks(tls=page.tls(await page.viewer()))).status == 200  # a certificate does as well
        wrong: Sequence[str] = (
            *("", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Token {TOKEN}", "Basic ???"),
            *(basic("anybody", ""), basic(TOKEN, ""), basic("", TOKEN.upper())),
        )
        for value in wrong:
            reply = await page.asks("/", f"Authorization: {value}", tls=page.tls())
            assert reply.status == 401, value
            assert "www-authenticate: basic" in reply.head
            assert TOKEN not in reply.body
        assert page.at.errors("AuthenticationError") == len(wrong)
        assert (await page.asks("/", f"Authorization: Bearer {TOKEN}")).status == 0  # never without TLS


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def write_token(path: Path, token: str, mode: int = 0o600) -> None:
    path.write_text(f"{token}\n")
    path.chmod(mode)


@pytest.mark.parametrize(
    ("token", "mode", "match"),
    [(TOKEN, 0o644, "others can read"), ("short", 0o600, "32 to"), (f"{TOKEN} {TOKEN}", 0o600, "without spaces")],
)
async def test_a_token_that_protects_nothing_keeps_the_coordinator_from_starting(
    federation_template: FederationTemplate, tmp_path: Path, token: str, mode: int, match: str
) -> None:
    write_token(tmp_path / "token", token, mode)
    with pytest.raises(ConfigurationError, match=match):
        async with served(federation_template, tmp_path, "0.0.0.0:0", "../token"):
            pass


async def test_a_token_that_nobody_is_asked_for_keeps_the_coordinator_from_starting(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    write_token(tmp_path / "token", TOKEN)
    with pytest.raises(ConfigurationError, match="nobody is asked for a token"):
        async with served(federation_template, tmp_path, "127.0.0.1:0", "../token"):
            pass
