"""A coroutine is run to its end from a notebook's cell as well, whose thread runs an event loop already."""

import asyncio
import signal
import threading

import pytest

from lorica.event_loop import to_its_end


async def answer() -> tuple[int, str]:
    await asyncio.sleep(0)
    return 42, threading.current_thread().name


async def stumble() -> None:
    raise ValueError("told")


def test_without_a_loop_it_runs_in_this_thread() -> None:
    assert to_its_end(answer()) == (42, threading.current_thread().name)


def test_inside_a_loop_it_runs_in_another_thread() -> None:
    async def cell() -> tuple[int, str]:
        return to_its_end(answer())

    result, thread = asyncio.run(cell())
    assert result == 42
    assert thread != threading.current_thread().name


def test_what_it_raises_is_raised() -> None:
    async def cell() -> None:
        to_its_end(stumble())

    with pytest.raises(ValueError, match="told"):
        asyncio.run(cell())


def test_an_interruption_cancels_it_and_waits_for_its_end() -> None:
    """Ctrl-C, or a notebook's button."""
    ended = threading.Event()

    async def long() -> None:
        threading.Timer(0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def cell() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a kernel's, where asyncio's own is another
        to_its_end(long())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    assert ended.is_set()
