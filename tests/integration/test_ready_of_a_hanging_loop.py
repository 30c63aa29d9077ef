"""A coordinator whose event loop hangs is not ready, though its port accepts: a probe that only connects would keep
sending silos to it."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection

import pytest
from prometheus_client import CollectorRegistry

from lorica_security.daemon.listen_address import Address
from lorica_security.daemon.metrics_port import READY, metrics_port


@contextmanager
def serving(hangs: threading.Event, hanging: threading.Event, goes_on: threading.Event) -> Iterator[Address]:
    """From a thread with an event loop of its own, which stands still from `hangs`, told by `hanging`, to `goes_on`."""
    begun, over, at = threading.Event(), threading.Event(), list[Address]()

    async def serve() -> None:
        async with metrics_port(Address("127.0.0.1", 0), CollectorRegistry(), ready=lambda: True) as address:
            at.append(address)
            begun.set()
            while not over.is_set():
                if hangs.is_set():
                    hanging.set()
                    goes_on.wait(60)
                    hangs.clear()
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert begun.wait(60)
        yield at[0]
    finally:
        goes_on.set()
        over.set()
        thread.join(60)


def probe(at: Address, seconds: float) -> int:
    connection = HTTPConnection(at.host, at.port, timeout=seconds)
    try:
        connection.request("GET", READY)
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_loop_that_hangs_accepts_and_does_not_answer() -> None:
    hangs, hanging, goes_on = threading.Event(), threading.Event(), threading.Event()
    with serving(hangs, hanging, goes_on) as at:
        assert probe(at, 60) == 200
        hangs.set()
        assert hanging.wait(60)
        with pytest.raises(TimeoutError):
            probe(at, 1)
        with socket.create_connection(at, timeout=5):
            pass
        goes_on.set()
        assert probe(at, 60) == 200
