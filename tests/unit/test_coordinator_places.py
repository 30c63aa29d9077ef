"""Places for transfers: bounded, given up by those that wait for their peer, and passed on in turn."""

import asyncio

import pytest

from lorica_coordinator.edges.server.places import TIDY_BYTES, Places

LONG_S = 30.0


async def moving(places: Places, order: list[str], name: str, chunks: int) -> None:
    async with places.place() as place:
        for _ in range(chunks):
            await place.keep()
            order.append(name)
            await asyncio.sleep(0)


async def test_no_more_transfers_move_at_once_than_there_are_places() -> None:
    places, now, most = Places(2, patience_s=LONG_S), 0, 0

    async def transfer() -> None:
        nonlocal now, most
        async with places.place() as place:
            now += 1
            most = max(most, now)
            for _ in range(3):
                await place.keep()
                with place.waiting_for_peer():
                    await asyncio.sleep(0)
            now -= 1

    async with asyncio.timeout(LONG_S):
        await asyncio.gather(*(transfer() for _ in range(9)))
    assert most == 2


async def test_first_come_first_served() -> None:
    places, order = Places(1), list[str]()
    async with asyncio.timeout(LONG_S):
        await asyncio.gather(*(moving(places, order, name, 3) for name in "abc"))
    assert order == list("aaabbbccc")


async def test_a_transfer_that_waits_for_its_peer_holds_nobody_up() -> None:
    places, peer, order = Places(1, patience_s=0.0), asyncio.Event(), list[str]()

    async def slow() -> None:
        async with places.place() as place:
            with place.waiting_for_peer():
                await peer.wait()
            order.append("its peer moved")
            await place.keep()
            order.append("slow")

    async with asyncio.timeout(LONG_S):
        task = asyncio.create_task(slow())
        await moving(places, order, "quick", 2)
        peer.set()
        await task
    assert order == ["quick", "quick", "its peer moved", "slow"]


async def test_a_peer_that_is_quick_leaves_the_place_where_it_is() -> None:
    places = Places(1, patience_s=LONG_S)
    async with asyncio.timeout(LONG_S), places.place() as place:
        waiting = asyncio.create_task(moving(places, [], "other", 1))
        for _ in range(5):
            with place.waiting_for_peer():
                await asyncio.sleep(0)
            await place.keep()
            assert not waiting.done()
        place.give_up()
        await waiting


async def test_a_long_transfer_lets_others_in_after_its_turn() -> None:
    places, order = Places(1, turn_s=-1.0), list[str]()
    async with asyncio.timeout(LONG_S):
        async with places.place():
            both = [asyncio.create_task(moving(places, order, name, 3)) for name in "ab"]
            await asyncio.sleep(0)
        await asyncio.gather(*both)
    assert order == list("ababab")


@pytest.mark.parametrize("held", [True, False], ids=["held", "given up"])
async def test_the_end_of_a_transfer_gives_its_place_back_once(held: bool) -> None:
    places = Places(1)
    async with places.place() as first:
        if not held:
            first.give_up()
    async with asyncio.timeout(LONG_S), places.place():
        third = asyncio.create_task(moving(places, [], "third", 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not third.done()
    await third


async def test_memory_is_tidied_after_a_large_transfer_and_after_many_small_ones() -> None:
    tidied: list[str] = []
    places = Places(2, tidy=lambda: tidied.append("once"))
    async with places.place() as large:
        large.moved_bytes += TIDY_BYTES
        async with places.place() as small:
            small.moved_bytes += TIDY_BYTES - 1
        assert tidied == []
    assert tidied == ["once"]
    for _ in range(3):
        async with places.place() as half:
            half.moved_bytes += TIDY_BYTES // 2
    assert tidied == ["once", "once"]


async def test_a_peer_that_was_quick_may_be_slow_once() -> None:
    """On a busy machine a quick peer has its pauses."""
    places = Places(1, patience_s=0.01, most_patience_s=LONG_S)
    async with asyncio.timeout(LONG_S), places.place() as place:
        for _ in range(1000):
            with place.waiting_for_peer():
                pass
        waiting = asyncio.create_task(moving(places, [], "other", 1))
        with place.waiting_for_peer():
            await asyncio.sleep(0.05)
        assert not waiting.done()
    await waiting


async def test_a_peer_that_is_slow_again_and_again_is_not_waited_for() -> None:
    places = Places(1, patience_s=0.01, most_patience_s=0.1)
    async with asyncio.timeout(LONG_S), places.place() as place:
        waiting = asyncio.create_task(moving(places, [], "other", 1))
        while not waiting.done():
            with place.waiting_for_peer():
                await asyncio.sleep(0.03)


async def test_who_goes_away_while_waiting_takes_no_place() -> None:
    places = Places(1)
    async with asyncio.timeout(LONG_S):
        async with places.place():
            waiting = asyncio.create_task(moving(places, [], "gone", 1))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        async with places.place():
            pass
