"""A clock that is set is told of, once each time, and by how much; one that drifts is not."""

import asyncio

from lorica_security.daemon.clock_watch import LOOK_S, wall_ahead, watched_clock
from tests.support.virtual_time import in_virtual_time


def test_what_is_set_is_told_once_with_its_sign() -> None:
    async def main() -> None:
        wall, told = [1_000.0], list[float]()
        async with watched_clock(told.append, lambda: wall[0]):
            for by in (10_800.0, 0.0, -10_800.0, 59.0):
                await asyncio.sleep(2 * LOOK_S)
                wall[0] += by
            await asyncio.sleep(2 * LOOK_S)
        assert told == [10_800.0, -10_800.0]

    in_virtual_time(main())


def test_small_steps_add_up() -> None:
    async def main() -> None:
        wall, told = [0.0], list[float]()
        async with watched_clock(told.append, lambda: wall[0]):
            for _ in range(7):
                wall[0] += 10.0
                await asyncio.sleep(LOOK_S)
        assert told == [60.0]

    in_virtual_time(main())


def test_a_clock_that_nobody_sets_stays_where_it_is() -> None:
    assert abs(wall_ahead() - wall_ahead()) < 1.0
