"""A listener whose certificate changes while strangers shake hands with it from many sides: `python -m
tests.support.handshakes`.

In a process of its own, since what it looks for kills one. Prints how many handshakes came to their end.
"""

import asyncio
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import grpc.aio

from lorica_coordinator.edges.keys.key_store import TlsPair
from lorica_coordinator.edges.server.presented import Presented
from lorica_security.identifiers import FederationName, Identity, Role
from lorica_security.pki.authority import Authority
from lorica_security.pki.trust_bundle import TrustBundle
from silo_wire.transport import SERVER_OPTIONS
from tests.support.certificates import forged
from tests.support.raw_http2 import nobody

STRANGERS = 16
FEDERATION = FederationName("clinics")


async def hold_out(handshakes: int) -> int:
    """Through that many between two changes, and after the second."""
    now = datetime.now(UTC)
    authority = Authority.create(FEDERATION, now=now)

    def pair() -> TlsPair:
        key, certificate = forged(authority, Identity(FEDERATION, Role.COORDINATOR))
        return TlsPair(key_pem=key, certificate_pem=certificate)

    trust = TrustBundle((authority.certificate,))
    presented = Presented(pair(), trust)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    port = server.add_secure_port("127.0.0.1:0", presented.credentials(clients=True))
    await server.start()
    over, done = threading.Event(), [0] * STRANGERS

    def stranger(number: int) -> None:
        context = nobody()
        while not over.is_set():
            with socket.create_connection(("127.0.0.1", port), 20.0) as plain, context.wrap_socket(plain):
                done[number] += 1

    with ThreadPoolExecutor(STRANGERS) as crowd:
        strangers = [crowd.submit(stranger, number) for number in range(STRANGERS)]
        for _ in range(2):
            before = sum(done)
            presented.show(pair(), trust)
            while sum(done) < before + handshakes and not any(ended.done() for ended in strangers):
                await asyncio.sleep(0.01)
        over.set()
    for ended in strangers:
        ended.result()
    await server.stop(None)
    return sum(done)


if __name__ == "__main__":
    print(asyncio.run(hold_out(int(sys.argv[1]))))
