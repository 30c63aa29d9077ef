"""Calls of a tracking server: JSON over HTTPS, or HTTP on loopback, with limits on what may come back."""

import base64
import http.client
import json
import socket
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from lorica_security.daemon.listen_address import is_loopback
from lorica_security.errors import ConfigurationError, MalformedMessage, StateError, Unreachable
from lorica_security.host.files import read_private
from lorica_security.visible_text import visible

PREFIX: Final = "/api/2.0/mlflow/"
TIMEOUT_S: Final = 10.0
LONGEST_S: Final = 20.0
"""Of one call, however slowly its answer comes; then the connection is cut."""
MOST_BYTES: Final = 4 << 20
MOST_WORDS: Final = 300
_BLOCK: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpJson:
    """One server. `authorization` is the header, which is sent to it alone: no redirect is followed."""

    where: str
    host: str
    port: int
    path: str
    secure: bool
    authorization: str = field(default="", repr=False)
    authorities: Path | None = None

    def get(self, call: str, arguments: Mapping[str, str]) -> Mapping[str, Any]:
        return self._ask("GET", f"{call}?{urlencode(arguments)}", None)

    def post(self, call: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises Unreachable where no answer comes, StateError for one that is an error, MalformedMessage."""
        return self._ask("POST", call, json.dumps(content, allow_nan=False).encode())

    def _ask(self, method: str, call: str, content: bytes | None) -> Mapping[str, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.authorization:
            headers["Authorization"] = self.authorization
        connection = self._connection()
        held: list[socket.socket] = []
        late = Timer(LONGEST_S, _cut, (connection, held))
        late.daemon = True
        late.start()
        try:
            connection.connect()
            held.append(connection.sock)
            connection.request(method, f"{self.path}{PREFIX}{call}", content, headers)
            reply = connection.getresponse()
            read = _all_of(reply)
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.where} does not answer: {visible(str(error))[:MOST_WORDS]}") from error
        finally:
            late.cancel()
            connection.close()
        if reply.status != http.client.OK:
            words = visible(read[:MOST_WORDS].decode(errors="replace"))
            raise StateError(f"{self.where} answers {call.partition('?')[0]} with {reply.status}: {words}")
        try:
            parsed = json.loads(read)
        except (ValueError, RecursionError) as error:
            raise MalformedMessage(f"{self.where} answers {call.partition('?')[0]} with no JSON") from error
        if not isinstance(parsed, Mapping):
            raise MalformedMessage(f"{self.where} answers {call.partition('?')[0]} with no JSON object")
        return parsed

    def _connection(self) -> http.client.HTTPConnection:
        if not self.secure:
            return http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        context = ssl.create_default_context(cafile=str(self.authorities) if self.authorities else None)
        return http.client.HTTPSConnection(self.host, self.port, timeout=TIMEOUT_S, context=context)


def _cut(connection: http.client.HTTPConnection, held: Sequence[socket.socket]) -> None:
    """Whatever the other side is at: its handshake, its headers, one byte of its answer every now and then.

    While it shakes hands the connection has the socket; of an answer without a length it lets go of it.
    """
    for each in held or [connection.sock]:
        with suppress(OSError, AttributeError):
            each.shutdown(socket.SHUT_RDWR)


def _all_of(reply: http.client.HTTPResponse) -> bytes:
    """Raises OSError for an answer that is too long."""
    read = b""
    while block := reply.read1(_BLOCK):
        read += block
        if len(read) > MOST_BYTES:
            raise OSError(f"its answer has more than {MOST_BYTES} bytes")
    if reply.length:
        raise OSError("its answer was cut off")
    return read


def server_at(url: str, *, credentials: Path | None, authorities: Path | None) -> HttpJson:
    """Raises ConfigurationError for an address that would show credentials or rounds to others, for what is no address,
    or for a file of credentials that others may read.

    `credentials` is a file with a token, or with NAME:PASSWORD.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise ConfigurationError(f"{url!r} is no address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise ConfigurationError(f"{url!r} is no address of a server: write https://HOST, or http://127.0.0.1:5000")
    if parts.username is not None or parts.password is not None:
        raise ConfigurationError("credentials do not belong into an address, which others see: give --credentials FILE")
    secure = parts.scheme == "https"
    if not secure and not is_loopback(parts.hostname):
        raise ConfigurationError(f"{url} is not on this machine, and would be reached in clear: use https")
    if not secure and authorities:
        raise ConfigurationError("--ca is for https")
    if authorities:
        try:
            ssl.create_default_context(cafile=str(authorities))
        except OSError as error:  # SSLError is one
            raise ConfigurationError(f"{authorities} holds no authorities in PEM: {error}") from error
    return HttpJson(
        where=f"{parts.scheme}://{parts.netloc}",
        host=parts.hostname,
        port=port or (443 if secure else 80),
        path=parts.path.rstrip("/"),
        secure=secure,
        authorization=_authorization(credentials) if credentials else "",
        authorities=authorities,
    )


def _authorization(file: Path) -> str:
    text = read_private(file).decode(errors="replace").strip()
    if not text or not text.isascii() or not text.isprintable():
        raise ConfigurationError(f"{file} holds no token and no NAME:PASSWORD in one line of ASCII")
    if ":" in text:
        return f"Basic {base64.b64encode(text.encode()).decode()}"
    return f"Bearer {text}"
