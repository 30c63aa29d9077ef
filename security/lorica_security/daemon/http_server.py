"""A small HTTP/1.1 server that answers GET and HEAD and is bounded in everything: h11 parses, asyncio carries.

Whoever connects holds one task, a head of MAX_HEAD_BYTES at most, and time that is counted from the first instant, the
TLS handshake included. A request that brings a body, another method or anything that h11 refuses is answered once and
its connection closed. It knows nothing of what is served: the status page and the metrics of both programs are.
"""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Final

import h11
import structlog

from lorica_security.daemon.listen_address import Address
from lorica_security.host.attempt_limit import source_of

MAX_HEAD_BYTES: Final = 16 * 1024
MAX_CONNECTIONS: Final = 128
MAX_CONNECTIONS_OF_ONE: Final = 32
"""Of one address. A browser keeps up to six; behind a tunnel or a proxy everybody has the same."""
HANDSHAKE_S: Final = 10.0
REQUEST_S: Final = 10.0
"""For a whole head, from the answer before it; hence also how long an idle connection is kept."""
SEND_S: Final = 20.0
ACCEPT_RETRY_S: Final = 1.0
METHODS: Final = (b"GET", b"HEAD")
VERSIONS: Final = (b"1.0", b"1.1")

_ALWAYS: Final = (
    ("Cache-Control", "no-store"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
    ),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`path` without the query; `host` as sent, "" where none was; `certificate` is the DER that TLS verified, if one
    was shown.

    `source` is the address, or IPv6 network, that it came from.
    """

    path: str
    host: str
    authorization: str
    certificate: bytes | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = field(default=())

    @classmethod
    def of(cls, status: HTTPStatus, text: str = "", *headers: tuple[str, str]) -> "Response":
        """A short one for people, in plain text."""
        return cls(status=status, body=f"{status.value} {text or status.phrase}\n".encode(), headers=headers)


Answer = Callable[[Request], Awaitable[Response]]


class _Refused(Exception):
    """A request that is answered before anybody looks at what it asks for; the connection ends with it."""

    def __init__(self, status: HTTPStatus, *headers: tuple[str, str]) -> None:
        super().__init__(status.phrase)
        self.response = Response.of(status, "", *headers)


class _Ended(Exception):
    """The other side has nothing more to say, or nothing that could be answered."""


class HttpServer:
    """`start` binds, `stop` cuts every connection and closes; `answer` is asked for each request.

    What it raises is logged as a defect of `name`, and ends the connection.
    """

    def __init__(self, answer: Answer, name: str) -> None:
        self._answer, self._name = answer, name
        self._open: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    @property
    def connections(self) -> int:
        return self._open.total()

    async def start(self, at: Address, tls: ssl.SSLContext | None) -> Address:
        """Where it listens: `at`, with the port that it got. Raises OSError when that cannot be bound."""
        family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
        listening = socket.create_server(at, family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=at.host == "::")
        listening.setblocking(False)
        host, port = listening.getsockname()[:2]
        self._accepting = asyncio.create_task(self._accept(listening, tls))
        return Address(host, port)

    async def stop(self) -> None:
        tasks = [task for task in (self._accepting, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._accepting = None

    async def _accept(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    raw, place = await loop.sock_accept(listening)
                except OSError as error:  # no file descriptor left, or gone before it was accepted
                    _log.warning("no connection can be accepted", server=self._name, error=str(error))
                    await asyncio.sleep(ACCEPT_RETRY_S)
                    continue
                source = _source(place[0])
                if self.connections >= MAX_CONNECTIONS or self._open[source] >= MAX_CONNECTIONS_OF_ONE:
                    raw.close()
                    continue
                self._open[source] += 1
                task = asyncio.create_task(self._serve(raw, source, tls))
                self._tasks.add(task)
                task.add_done_callback(partial(self._gone, source))

    def _gone(self, source: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._open[source] -= 1
        if not self._open[source]:
            del self._open[source]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("defect", method=self._name, exc_info=error)

    async def _serve(self, raw: socket.socket, source: str, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, raw, ssl=tls, ssl_handshake_timeout=None if tls is None else HANDSHAKE_S
            )
        except OSError:  # of TLS as well: who has no certificate, or one of another authority, gets no further
            raw.close()
            return
        # So that whoever does not read is noticed at once. Not 0: a buffer of TLS that is empty would be too full then.
        transport.set_write_buffer_limits(high=1)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        session = transport.get_extra_info("ssl_object")
        certificate = None if session is None else session.getpeercert(binary_form=True)
        try:
            with suppress(OSError):
                with suppress(_Ended):
                    await self._converse(reader, writer, source, certificate)
                await _close(writer)
        finally:
            transport.abort()

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str, certificate: bytes | None
    ) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        while True:
            try:
                head = await _next_request(connection, reader)
            except _Refused as refused:
                await _send(connection, writer, refused.response, last=True)
                return
            response = await self._answer(_parsed(head, source, certificate))
            await _send(connection, writer, response, bare=head.method == b"HEAD")
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return
            connection.start_next_cycle()


async def _next_request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request:
    """Raises _Refused for one that is answered with an error, _Ended where there is none."""
    try:
        async with asyncio.timeout(REQUEST_S):
            head = await _next_event(connection, reader)
            if not isinstance(head, h11.Request):
                raise _Ended
            if head.http_version not in VERSIONS:
                raise _Refused(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
            if head.method not in METHODS:
                raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, ("Allow", "GET, HEAD"))
            _require_no_coding(head)
            if not isinstance(await _next_event(connection, reader), h11.EndOfMessage):
                raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return head
    except TimeoutError as error:
        if connection.trailing_data[0]:
            raise _Refused(HTTPStatus.REQUEST_TIMEOUT) from error
        raise _Ended from error
    except h11.RemoteProtocolError as error:
        raise _Refused(HTTPStatus(error.error_status_hint)) from error


def _require_no_coding(head: h11.Request) -> None:
    """Raises _Refused for a body in chunks, also an empty one: h11 looks past a length beside it, which a proxy may go
    by."""
    names = {name for name, _ in head.headers}
    if b"transfer-encoding" in names:
        both = b"content-length" in names
        raise _Refused(HTTPStatus.BAD_REQUEST if both else HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


async def _next_event(connection: h11.Connection, reader: asyncio.StreamReader) -> object:
    while (event := connection.next_event()) is h11.NEED_DATA:
        if connection.they_are_waiting_for_100_continue:
            raise _Refused(HTTPStatus.EXPECTATION_FAILED)
        connection.receive_data(await reader.read(MAX_HEAD_BYTES))
    return event


def _parsed(head: h11.Request, source: str, certificate: bytes | None) -> Request:
    headers = {
        name: value.decode("latin-1") for name, value in head.headers
    }  # h11 lets one Host through, in lower case
    return Request(
        path=head.target.decode("latin-1").partition("?")[0],
        host=headers.get(b"host", ""),
        authorization=headers.get(b"authorization", ""),
        certificate=certificate,
        source=source,
    )


async def _send(
    connection: h11.Connection,
    writer: asyncio.StreamWriter,
    response: Response,
    *,
    last: bool = False,
    bare: bool = False,
) -> None:
    """Raises _Ended where it cannot be sent, TimeoutError where it is not taken in time. `bare`: as an answer to
    HEAD."""
    headers = [
        ("Content-Type", response.content_type),
        ("Content-Length", str(len(response.body))),
        *_ALWAYS,
        *response.headers,
        *([("Connection", "close")] if last else []),
    ]
    try:
        parts = (
            connection.send(h11.Response(status_code=response.status, headers=headers)),
            b"" if bare else connection.send(h11.Data(data=response.body)),
            connection.send(h11.EndOfMessage()),
        )
    except h11.LocalProtocolError as error:  # their side is beyond an answer
        raise _Ended from error
    async with asyncio.timeout(SEND_S):
        writer.write(b"".join(part for part in parts if part))
        await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    """Once the other side has what was sent: asyncio's TLS has taken all of an answer before that. Raises OSError."""
    writer.close()
    async with asyncio.timeout(SEND_S):
        await writer.wait_closed()


def _source(host: str) -> str:
    return source_of(f"ipv6:[{host}]:0" if ":" in host else f"ipv4:{host}:0")
