"""A bare TLS handshake with the coordinator, to see whose certificate answers. Nothing is sent over it."""

import socket
import ssl
from dataclasses import dataclass

from lorica_security.daemon.listen_address import Address
from lorica_security.daemon.unverified_tls import unverified_tls
from lorica_security.errors import MalformedMessage, Unreachable
from silo_agent.edges.keys.key_store import split_address
from silo_agent.edges.wire.https_proxy import ConnectProxy, proxy_for

TIMEOUT_S = 10.0
_MOST_REPLY_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The leaf certificate (DER) that answered, and the proxy it was reached through."""

    certificate: bytes
    proxy: ConnectProxy | None

    @property
    def route(self) -> str:
        return f" through the proxy {self.proxy.shown}" if self.proxy else ""


def probe(address: str, server_name: str) -> Answer:
    """Whoever answers at `address` (host:port) over TLS 1.3, unverified; raises Unreachable.

    Verification is the caller's: the certificate is compared with a pin or a trust bundle before anything is said.
    """
    host, port = split_address(address)
    proxy = proxy_for(host)
    context = unverified_tls()
    via = f" through the proxy {proxy.shown}" if proxy else ""
    try:
        with connected(host, port, proxy) as raw, context.wrap_socket(raw, server_hostname=server_name) as connection:
            certificate = connection.getpeercert(binary_form=True)
    except ssl.SSLError as error:
        raise Unreachable(
            f"{address}{via} does not speak TLS 1.3 ({error.reason or error}): "
            "check the address, and whether a TLS-intercepting proxy stands between"
        ) from error
    except (OSError, EOFError) as error:
        raise Unreachable(
            f"{address}{via} does not answer ({error}): check the address, the network and HTTPS_PROXY"
        ) from error
    if certificate is None:
        raise Unreachable(f"{address}{via} showed no certificate: check the address")
    return Answer(certificate=certificate, proxy=proxy)


def connected(host: str, port: int, proxy: ConnectProxy | None) -> socket.socket:
    """A connection there, through `proxy` where there is one; raises OSError, EOFError, Unreachable,
    MalformedMessage."""
    if proxy is None:
        return socket.create_connection((host, port), TIMEOUT_S)
    connection = socket.create_connection((proxy.host, proxy.port), TIMEOUT_S)
    try:
        connection.sendall(proxy.request(str(Address(host, port))))
        _expect_tunnel(connection, proxy)
    except BaseException:
        connection.close()
        raise
    return connection


def _expect_tunnel(connection: socket.socket, proxy: ConnectProxy) -> None:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)  # one at a time: what follows the head belongs to TLS
        if not byte:
            raise EOFError(f"proxy {proxy.shown} closed the connection")
        head += byte
        if len(head) > _MOST_REPLY_BYTES:
            raise MalformedMessage(f"proxy {proxy.shown} answers CONNECT with more than {_MOST_REPLY_BYTES} bytes")
    status = head.split(b"\r\n", 1)[0].decode("latin-1")
    if not status.startswith("HTTP/1.") or status.split(" ")[1:2] != ["200"]:
        shown = "".join(character if character.isprintable() else " " for character in status)[:80]
        raise Unreachable(f"proxy {proxy.shown} refuses the tunnel ({shown}): allow CONNECT there, or set NO_PROXY")
