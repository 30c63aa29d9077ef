"""A coroutine is run to its end from a notebook's cell as well, whose thread runs an event loop already."""

import asyncio
import signal
import threading
from types import FrameType

import pytest

from lorica.event_loop import LEFT, STILL_ENDING, to_its_end


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


@pytest.mark.parametrize("times", [2, 3])
def test_it_is_waited_for_once_more_and_then_left_with_a_word(times: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Each interruption comes when the one before it was heard, and is waited for."""
    heard, left, ended = threading.Semaphore(0), threading.Event(), threading.Event()
    had_ended: list[bool] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        heard.release()
        signal.default_int_handler(number, frame)

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert heard.acquire(timeout=10)

    async def long() -> None:
        threading.Timer(0, interrupt).start()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(times - 1):
                await asyncio.sleep(0.1)  # one that came before the last one's message were none of its own
                if not left.is_set():
                    interrupt()
            left.wait(0.3 if times == 2 else 10)
            ended.set()

    async def cell() -> None:
        signal.signal(signal.SIGINT, interrupted)
        try:
            to_its_end(long())
        finally:
            had_ended.append(ended.is_set())
            left.set()

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            asyncio.run(cell())
    finally:
        signal.signal(signal.SIGINT, before)
    assert had_ended == [times == 2]
    assert raised.value.args == (() if times == 2 else (LEFT,))
    assert capsys.readouterr().err == f"{STILL_ENDING}\n"
    assert ended.wait(10)
