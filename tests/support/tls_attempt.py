"""One TLS connection with Python's own TLS library, to say what gRPC's client never would."""

import asyncio
import socket
import ssl
from pathlib import Path

TIMEOUT_S = 10.0
CUT_OFF = "cut off in the handshake"


async def greeted(
    port: int, *, version: ssl.TLSVersion, key_and_certificate: tuple[bytes, bytes] | None = None, folder: Path
) -> str:
    """ "" if the server at `port` goes on talking HTTP/2 after the handshake, else what it says instead.

    Certificates are not checked: this is an attacker, who takes whatever answers. `folder` is for the key's file, since
    the library reads keys from files alone.
    """
    return await asyncio.to_thread(_greeted, port, version, key_and_certificate, folder)


def _greeted(port: int, version: ssl.TLSVersion, key_and_certificate: tuple[bytes, bytes] | None, folder: Path) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    if key_and_certificate is not None:
        file = folder / "client.pem"
        file.write_bytes(b"".join(key_and_certificate))
        context.load_cert_chain(file)
    try:
        with (
            socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as connection,
        ):
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            return "" if connection.recv(1) else "closed"
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # which of the two, is a matter of timing
        return CUT_OFF
    except ssl.SSLError as error:
        return error.reason or str(error)
    except OSError as error:
        return str(error)
