"""Work behind a transfer: in order, bounded, its error told once and for all, and no one woken who does not wait."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from silo_wire.work_behind import MOST_WAITING, WorkBehind


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


async def test_work_is_done_in_order_and_one_piece_at_a_time(threads: ThreadPoolExecutor) -> None:
    behind, done, busy = WorkBehind(threads), list[int](), threading.Lock()

    def work(number: int) -> None:
        assert busy.acquire(blocking=False)
        done.append(number)
        busy.release()

    for number in range(200):
        await behind.put(partial(work, number))
    await behind.done()
    assert done == list(range(200))


async def test_no_more_waits_than_the_bound(threads: ThreadPoolExecutor) -> None:
    behind, release, given = WorkBehind(threads), threading.Event(), 0

    async def give() -> None:
        nonlocal given
        for _ in range(50):
            await behind.put(release.wait)
            given += 1

    giving = asyncio.create_task(give())
    while threads._work_queue.empty() and given < MOST_WAITING:
        await asyncio.sleep(0)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert given <= MOST_WAITING + 1  # one of them is being done
    assert not giving.done()
    release.set()
    await giving
    await behind.done()


async def test_a_single_piece_is_done_when_the_end_is_awaited(threads: ThreadPoolExecutor) -> None:
    behind, done = WorkBehind(threads), list[int]()
    await behind.put(partial(done.append, 1))
    await behind.done()
    assert done == [1]
    await behind.done()


def fail() -> None:
    raise ValueError("the first")


async def test_nothing_is_done_after_an_error_which_everyone_hears_who_asks(threads: ThreadPoolExecutor) -> None:
    behind, done = WorkBehind(threads), list[int]()
    await behind.put(fail)
    await behind.put(partial(done.append, 1))
    with pytest.raises(ValueError, match="the first"):
        await behind.done()
    with pytest.raises(ValueError, match="the first"):
        await behind.put(partial(done.append, 2))
    with pytest.raises(ValueError, match="the first"):
        await behind.done()
    assert done == []


async def test_an_error_reaches_one_who_waits_for_room(threads: ThreadPoolExecutor) -> None:
    behind, release = WorkBehind(threads), threading.Event()

    def fail_later() -> None:
        release.wait()
        fail()

    async def give() -> None:
        while True:
            await behind.put(fail_later)

    giving = asyncio.create_task(give())
    for _ in range(100):
        await asyncio.sleep(0)
    release.set()
    with pytest.raises(ValueError, match="the first"):
        await giving


async def test_settling_waits_and_tells_nobody(threads: ThreadPoolExecutor) -> None:
    behind, done = WorkBehind(threads), list[int]()
    await behind.put(partial(done.append, 1))
    await behind.put(fail)
    await behind.settle()
    assert done == [1]


async def test_what_was_put_is_done_though_its_giver_is_cancelled(threads: ThreadPoolExecutor) -> None:
    behind, release, done = WorkBehind(threads), threading.Event(), list[int]()

    def work(number: int) -> None:
        release.wait()
        done.append(number)

    async def give() -> None:
        for number in range(100):
            await behind.put(partial(work, number))

    giving = asyncio.create_task(give())
    for _ in range(100):
        await asyncio.sleep(0)
    giving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await giving
    release.set()
    await behind.settle()
    assert done == list(range(len(done)))
    assert len(done) >= MOST_WAITING
