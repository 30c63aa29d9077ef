"""By what gRPC and the coordinator agree on the keys of a TLS connection.

gRPC does not tell a client. The coordinator's first record does, which TLS 1.3 sends in clear (RFC 8446, 4.1.3 and
4.2.8): the connection goes through a relay on this machine that reads it.
"""

import asyncio
import socket
from contextlib import closing
from typing import Final

from lorica_security.errors import MalformedMessage, Unreachable
from silo_agent.edges.keys.key_store import SiloCredentials, split_address
from silo_agent.edges.wire.channel import mutual_channel
from silo_agent.edges.wire.https_proxy import proxy_for
from silo_agent.edges.wire.tls_probe import connected

TIMEOUT_S: Final = 10.0
PIECE_BYTES: Final = 64 << 10
HYBRID: Final = "X25519MLKEM768"
NAMES: Final = {0x11EC: HYBRID, 0x001D: "X25519", 0x0017: "P-256", 0x0018: "P-384", 0x0019: "P-521"}
"""Of the groups that gRPC offers, as IANA registers them."""
_RECORD_HEAD, _RANDOM_BYTES = 5, 32
_HANDSHAKE, _SERVER_HELLO, _KEY_SHARE = 22, 2, 51


async def key_exchange(credentials: SiloCredentials) -> str:
    """The name of what was agreed on, HYBRID where that holds against a quantum computer; raises Unreachable,
    MalformedMessage."""
    host, port = split_address(credentials.address)
    arrived: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()

    def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if arrived.done():
            writer.close()  # gRPC tries again what was cut off
        else:
            arrived.set_result((reader, writer))

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        at = server.sockets[0].getsockname()[1]
        async with mutual_channel(credentials, relay=f"127.0.0.1:{at}") as channel:
            channel.get_state(try_to_connect=True)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    reader, writer = await arrived
                    with closing(writer):
                        raw = await asyncio.to_thread(connected, host, port, proxy_for(host))
                        return agreed_group(await _answered(raw, reader))
            except (OSError, EOFError) as error:  # TimeoutError is one
                raise Unreachable(f"{credentials.address} breaks off before it agrees on keys ({error})") from error


async def _answered(raw: socket.socket, hello: asyncio.StreamReader) -> bytes:
    """The first record that comes over `raw` when `hello` goes there."""
    there, to_there = await asyncio.open_connection(sock=raw)
    with closing(to_there):
        sent = asyncio.create_task(_pump(hello, to_there))
        try:
            return await _record(there)
        finally:
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)


async def _record(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(_RECORD_HEAD)
    return head + await reader.readexactly(int.from_bytes(head[3:]))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()


def agreed_group(record: bytes) -> str:
    """Of the first record that a server sends; raises MalformedMessage for anything but a ServerHello that has a key
    share."""
    if record[:1] != bytes((_HANDSHAKE,)) or record[5:6] != bytes((_SERVER_HELLO,)):
        raise MalformedMessage("the coordinator began with something else than a ServerHello of TLS")
    at = _RECORD_HEAD + 4 + 2 + _RANDOM_BYTES
    at += 1 + int.from_bytes(record[at : at + 1])  # session
    at += 2 + 1 + 2  # cipher, compression, length of extensions
    while at + 6 <= len(record):
        kind, length = int.from_bytes(record[at : at + 2]), int.from_bytes(record[at + 2 : at + 4])
        if kind == _KEY_SHARE and length >= 2:
            group = int.from_bytes(record[at + 4 : at + 6])
            return NAMES.get(group, f"group {group:#06x}")
        at += 4 + length
    raise MalformedMessage("the coordinator's ServerHello agrees on no key: it does not speak TLS 1.3")
