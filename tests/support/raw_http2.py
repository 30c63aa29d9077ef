"""HTTP/2 over mutual TLS by hand, for what no gRPC client would send: half a message, one byte at a time, silence.

Blocking sockets and no thread: whoever holds a connection decides when it reads. Headers go as literals, without
Huffman coding and without the dynamic table (RFC 7541 6.2.2), so nothing has to be remembered.
"""

import socket
import ssl
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorica_security.identifiers import coordinator_dns_name
from tests.support.coordinator import FEDERATION

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
WINDOW_BYTES, FRAME_BYTES = 65_535, 16_384
PATIENCE_S = 20.0


def nobody() -> ssl.SSLContext:
    """A client without a certificate; it trusts whoever answers, and is not the one under test."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def client_context(key_pem: bytes, certificate_pem: bytes, folder: Path) -> ssl.SSLContext:
    """The same with this certificate."""
    pair = folder / "client.pem"
    pair.write_bytes(key_pem + certificate_pem)
    context = nobody()
    context.load_cert_chain(pair)
    return context


def _literal(name: bytes, value: bytes) -> bytes:
    assert len(name) < 127
    assert len(value) < 127
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


class Gone(Exception):
    """The server has ended the connection, or the stream, before what was asked of it happened."""


class RawConnection:
    """`with raw_connection(...) as connection`: streams of it are opened, fed and left as the attack wants."""

    def __init__(self, raw: ssl.SSLSocket) -> None:
        self._socket = raw
        self._buffer = b""
        self._next_stream = 1
        self._connection_window = WINDOW_BYTES
        self._initial_window = WINDOW_BYTES
        self._granted: defaultdict[int, int] = defaultdict(int)
        self._sent: defaultdict[int, int] = defaultdict(int)
        self.ended: set[int] = set()
        raw.sendall(PREFACE + _frame(SETTINGS, 0, 0, b"") + _frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 24)))

    def open(self, method: str, service: str = "Federation") -> int:
        """A new stream that calls `method`; its number."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = (
            (b":method", b"POST"),
            (b":scheme", b"https"),
            (b":path", f"/silo_wire.v1.{service}/{method}".encode()),
            (b":authority", coordinator_dns_name(FEDERATION).encode()),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        )
        block = b"".join(_literal(name, value) for name, value in fields)
        self._socket.sendall(_frame(HEADERS, END_HEADERS, stream, block))
        return stream

    def reset(self, stream: int) -> None:
        """End a stream without a reason."""
        self._socket.sendall(_frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))

    def send(self, stream: int, data: bytes) -> int:
        """As much of `data` as the server's windows let through now; how much that was."""
        size = min(len(data), self._window(stream), FRAME_BYTES)
        if size:
            self._socket.sendall(_frame(DATA, 0, stream, data[:size]))
            self._connection_window -= size
            self._sent[stream] += size
        return size

    def _window(self, stream: int) -> int:
        return max(0, min(self._connection_window, self._initial_window + self._granted[stream] - self._sent[stream]))

    def read(self, seconds: float) -> bool:
        """Take one frame in; False when none came within `seconds`. Raises Gone when the connection has ended."""
        self._socket.settimeout(max(seconds, 0.001))
        try:
            header = self._exactly(9)
        except TimeoutError:
            return False
        finally:
            self._socket.settimeout(PATIENCE_S)
        size, kind, flags = int.from_bytes(header[:3]), header[3], header[4]
        stream = int.from_bytes(header[5:9]) & 0x7FFF_FFFF
        payload = self._exactly(size)
        match kind:
            case 4 if not flags & ACK:
                for at in range(0, size, 6):
                    key, value = struct.unpack(">HI", payload[at : at + 6])
                    if key == 4:
                        self._initial_window = value
                self._socket.sendall(_frame(SETTINGS, ACK, 0, b""))
            case 6 if not flags & ACK:
                self._socket.sendall(_frame(PING, ACK, 0, payload))
            case 8:
                more = int.from_bytes(payload) & 0x7FFF_FFFF
                if stream:
                    self._granted[stream] += more
                else:
                    self._connection_window += more
            case 3:
                self.ended.add(stream)
            case 0 | 1 if flags & END_STREAM:
                self.ended.add(stream)
            case 7:
                raise Gone(f"GOAWAY {payload!r}")
        return True

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            try:
                more = self._socket.recv(1 << 16)
            except (ConnectionError, ssl.SSLError) as error:
                if isinstance(error, TimeoutError):
                    raise
                raise Gone(str(error)) from error
            if not more:
                raise Gone("the server closed the connection")
            self._buffer += more
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def close(self) -> None:
        self._socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def grpc_message(size: int, held: bytes) -> bytes:
    """The beginning of a gRPC message that says it is `size` bytes long and has sent `held` of them."""
    return b"\0" + size.to_bytes(4) + held


@contextmanager
def raw_connection(port: int, context: ssl.SSLContext) -> Iterator[RawConnection]:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain, context.wrap_socket(plain) as raw:
        yield RawConnection(raw)
