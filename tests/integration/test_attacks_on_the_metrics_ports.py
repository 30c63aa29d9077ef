"""The metrics ports of both programs against strangers who hold connections, and against pages that were pointed at
them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from lorica.demo.ports import free_ports
from lorica_coordinator.composition import serve
from lorica_coordinator.edges.telemetry.logs import Whereabouts
from lorica_coordinator.opened import Coordinator
from lorica_security.daemon import http_server
from lorica_security.daemon.listen_address import address
from silo_agent.edges.console.metrics import metrics_served
from tests.support.coordinator import FederationTemplate
from tests.support.coordinator import federation_template as federation_template

PATIENCE_S = 60.0
MUCH = 200
OTHERS = (
    "evil.example",
    "[::1].evil.example",
    "[::1]evil",
    "[::1]:9464.evil.example",
    "[::1",
    "::1",
    "[127.0.0.1]",
    "localhost.evil.example",
    "localhost:9464.evil.example",
    "localhost:evil",
    "localhost:9464:80",
    "127.0.0.1.evil.example:80",
    "127.0.0.1@evil.example",
    "evil.example@127.0.0.1",
    "127.0.0.1/evil",
    "",
)
OF_THIS_MACHINE = ("localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:9464")
MALFORMED = (
    (b"GET /metrics\r\n\r\n", 400),
    (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
    (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
    (
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    (
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        400,
    ),
    (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 413),
    (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 413),
    (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", 431),
    (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    (b"GET http://evil.example/metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404),
)

Served = Callable[[str], AbstractAsyncContextManager[int]]
"""The metrics of one program, listening on a host; inside, their port."""


@asynccontextmanager
async def of_a_coordinator(template: FederationTemplate, root: Path, host: str) -> AsyncIterator[int]:
    folder = template.copy(root / "coordinator")
    port = address(Coordinator.load(folder).settings.listen.metrics).port
    text = folder.settings.read_text()
    folder.settings.write_text(text.replace(f'metrics = "127.0.0.1:{port}"', f'metrics = "{host}:{port}"'))
    ready = asyncio.Event()
    running = asyncio.create_task(
        serve(Coordinator.load(folder), offer="", ready=ready.set, where=Whereabouts()), name="coordinator"
    )
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        assert ready.is_set(), running
        yield port
    finally:
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)


@asynccontextmanager
async def of_a_silo(root: Path, host: str) -> AsyncIterator[int]:
    (port,) = free_ports(1)
    async with metrics_served(f"{host}:{port}", root):
        yield port


@pytest.fixture(params=["coordinator", "silo"])
def served(request: pytest.FixtureRequest, federation_template: FederationTemplate, tmp_path: Path) -> Served:
    if request.param == "silo":
        return partial(of_a_silo, tmp_path)
    return partial(of_a_coordinator, federation_template, tmp_path)


@pytest.fixture
async def port(served: Served) -> AsyncIterator[int]:
    async with served("127.0.0.1") as port:
        yield port


async def says(port: int, raw: bytes) -> tuple[int, str]:
    """The status of the first answer, 0 where there is none, and all that comes back until the other side closes."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(raw)
            answer = (await reader.read()).decode()
        finally:
            writer.transport.abort()
    return int(answer.split()[1]) if answer else 0, answer


async def asks(port: int, host: str = "localhost") -> tuple[int, str]:
    return await says(port, f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())


async def gone(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


async def test_strangers_who_say_nothing_hold_a_few_connections_and_no_thread(port: int) -> None:
    threads, files = threading.active_count(), psutil.Process().num_fds()
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MUCH)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            for reader, _ in held[http_server.MAX_CONNECTIONS_OF_ONE :]:
                assert await gone(reader)
        own = sum(not reader.at_eof() for reader, _ in held)
        assert own <= http_server.MAX_CONNECTIONS_OF_ONE
        assert threading.active_count() < threads + own
        assert psutil.Process().num_fds() < files + MUCH + 2 * own  # this process is the strangers as well
    finally:
        for _, writer in held:
            writer.transport.abort()


async def test_a_stranger_who_says_nothing_is_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as impatient:
        impatient.setattr(http_server, "REQUEST_S", 0.2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.transport.abort()
    assert (await asks(port))[0] == 200


async def test_a_stranger_who_goes_on_after_an_answer_is_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 1.0)
    status, answer = await says(port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\nGET /metr")
    assert status == 200
    assert "HTTP/1.1 408 " in answer


async def test_the_build_is_told_and_no_series_of_when_counters_began(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prometheus_client.metrics._use_created", True)  # as it is in a new process
    async with served("127.0.0.1") as port:
        _, answer = await asks(port)
    assert "\nlorica_build_info{" in answer
    assert "_total" in answer
    assert "_created" not in answer


async def test_a_page_of_another_name_that_was_pointed_here_is_refused(port: int) -> None:
    for host in OTHERS:
        status, answer = await asks(port, host)
        assert status == 421, host
        assert "process_cpu_seconds" not in answer
    for host in OF_THIS_MACHINE:
        status, answer = await asks(port, host)
        assert (status, "process_cpu_seconds_total" in answer) == (200, True), host


async def test_on_all_addresses_it_is_served_for_addresses_and_for_no_foreign_name(served: Served) -> None:
    async with served("0.0.0.0") as port:
        for host in (*OF_THIS_MACHINE, "10.20.30.40:9464", "[fd00::5]:9464"):
            assert (await asks(port, host))[0] == 200, host
        for host in OTHERS:
            assert (await asks(port, host))[0] == 421, host


async def test_malformed_requests_are_answered_once_and_cut_off(port: int) -> None:
    for raw, status in MALFORMED:
        assert (await says(port, raw))[0] == status, raw[:100]
    assert (await asks(port))[0] == 200
