"""The sign of life: a file that grows no older while the event loop turns, and what a service manager is told."""

import asyncio
import os
import queue
import socket
from pathlib import Path

import pytest

from lorica_security.daemon import heartbeat


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "agent.lock"
    path.touch()
    os.utime(path, (0, 0))
    return path


async def test_systemd_is_told_ready_alive_and_stopping_and_the_file_is_young(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        loop = asyncio.get_running_loop()
        async with heartbeat.beating(lock):
            told = [await loop.sock_recv(systemd, 64), await loop.sock_recv(systemd, 64)]
            assert lock.stat().st_mtime > 0
        told.append(await loop.sock_recv(systemd, 64))
    assert told == [b"READY=1", b"WATCHDOG=1", b"STOPPING=1"]


async def test_an_abstract_socket_is_told_too(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"lorica-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}")
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        async with heartbeat.beating(lock):
            assert await asyncio.get_running_loop().sock_recv(systemd, 64) == b"READY=1"


async def test_it_beats_again_and_stops_with_what_it_is_about(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: asyncio.Queue[Path] = asyncio.Queue()
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.0)
    monkeypatch.setattr(os, "utime", beats.put_nowait)
    async with heartbeat.beating(lock):
        assert [await beats.get() for _ in range(3)] == [lock] * 3
    seen = beats.qsize()
    await asyncio.sleep(0)
    assert beats.qsize() == seen


async def test_neither_a_lost_file_nor_a_socket_that_is_gone_ends_the_service(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    lock.unlink()
    async with heartbeat.beating(lock):
        await asyncio.sleep(0)
    assert not lock.exists()


class Clock:
    """Each look at it is told, and it stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks: queue.Queue[float] = queue.Queue()

    def __call__(self) -> float:
        self.looks.put(self.now)
        return self.now

    def look(self) -> None:
        """Returns after the second look from now on: what followed the first is over."""
        while not self.looks.empty():
            self.looks.get()
        for _ in range(2):
            self.looks.get(timeout=60)


def test_a_start_shows_that_it_is_alive_for_as_long_as_it_goes_on(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: queue.Queue[Path] = queue.Queue()
    monkeypatch.setattr(os, "utime", touched.put)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.001)
    clock = Clock()
    with heartbeat.Start(lock, step_s=100.0, clock=clock) as start:
        assert [touched.get(timeout=60) for _ in range(3)] == [lock] * 3
        clock.now = 100.0
        assert touched.get(timeout=60) == lock
        for hangs in (lambda: setattr(clock, "now", 101.0), start.rest):
            hangs()
            clock.look()
            seen = touched.qsize()
            clock.look()
            assert touched.qsize() == seen, "a step that takes too long, or none, is no sign of life"
            start.went_on()
            while not touched.empty():
                touched.get()
            assert touched.get(timeout=60) == lock
    start._thread.join(60)
    assert not start._thread.is_alive()


async def test_signs_of_a_start_end_where_those_of_its_loop_begin(lock: Path) -> None:
    with heartbeat.Start(lock) as start:
        async with heartbeat.beating(lock, start):
            await asyncio.to_thread(start._thread.join, 5)
            assert not start._thread.is_alive()
