"""Deadlines and clocks: wall clocks that are set by minutes and by years, restarts, crashes, and time that passes all
the same.

In virtual time, against the loop that moves the round machine. The whole service is in
tests/integration/test_clocks.py.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorica_coordinator.edges.database.state_json import STATE_VERSION, journal_of, state_from_json, state_to_json
from lorica_coordinator.rounds.effects import Record, RoundAbandoned
from lorica_coordinator.rounds.states import Collecting, Idle, State, deadline_of
from lorica_coordinator.service.loop.round_loop import PAID_LEAST_S, PAID_MOST_S, RoundLoop, paid_until_next_save
from lorica_coordinator.service.threads import Threads
from lorica_security.errors import StateError, StorageError
from tests.support.rounds import T0, A, B, C, ready, started
from tests.support.virtual_time import in_virtual_time

MINUTE_S, HOUR_S, YEAR_S = 60.0, 3600.0, 365.25 * 86_400
STEPS = [sign * by for sign in (1, -1) for by in (MINUTE_S, 3 * HOUR_S, 86_400.0, YEAR_S, 40 * YEAR_S)]
"""A machine that sleeps is one of them: its wall clock goes ahead, and the steady one stands still."""
TRAINING_S = 600.0  # of tests.support.rounds.terms


@dataclass
class Disk:
    """What outlasts a process. As a RoundStore, of the machine alone; `broken`: nothing can be saved."""

    kept: tuple[str, str, tuple[bytes, ...]] | None = None
    records: list[tuple[Record, float]] = field(default_factory=list)
    broken: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """The attempt was abandoned, `ended_at` by the loop's time."""
    ended_at: float = 0.0

    async def over_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ended.wait()

    def load(self, now: float = 0.0) -> State:
        if self.kept is None:
            return Idle(population=frozenset({A, B, C}))
        phase, text, journal = self.kept
        kept = {"version": STATE_VERSION, "phase": phase, "text": text, "journal": journal}
        return state_from_json(**kept, where="the disk", now=now)

    def lost_attempt(self) -> bool | None:
        return None

    def transition(self, state: State, records: Sequence[Record], *, at: float, now: float) -> None:
        if self.broken:
            raise StorageError("the disk is full")
        self.kept = state.phase, state_to_json(state, now=now), journal_of(state)
        self.records += [(record, at) for record in records]
        if any(isinstance(record, RoundAbandoned) for record in records) and not self.ended.is_set():
            self.ended.set()
            self.ended_at = asyncio.get_running_loop().time()

    def silos(self) -> tuple[Any, ...]:
        return tuple(SimpleNamespace(silo=silo, revoked_unix_s=None) for silo in (A, B, C))

    def closed_attempts(self, last: int) -> tuple[Any, ...]:
        return ()


class _NoDesk:
    async def opened(self, plan: object) -> object:
        raise StateError("there are no files here")


class Wall:
    def __init__(self) -> None:
        self.set_by = 0.0

    def __call__(self) -> float:
        return T0 + asyncio.get_running_loop().time() + self.set_by


class Process:
    """One process of the coordinator, as far as the loop of its rounds goes. Its steady clock begins where it likes."""

    def __init__(self, disk: Disk, wall: Wall, began: float) -> None:
        loop = asyncio.get_running_loop()
        self.rounds = RoundLoop(
            store=disk,  # type: ignore[arg-type]
            desk=_NoDesk(),  # type: ignore[arg-type]
            groups=SimpleNamespace(foreseen=None),  # type: ignore[arg-type]
            spools=MagicMock(),
            keys=MagicMock(),
            observer=MagicMock(),
            clock=wall,
            steady=lambda: loop.time() + began,
            threads=Threads(),
            checks=MagicMock(),
        )
        self._work: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.rounds.resume()
        self._work = asyncio.create_task(self.rounds.run())

    async def crash(self) -> None:
        assert self._work is not None
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)

    async def stop(self) -> None:
        await self.crash()
        await self.rounds.end()

    async def train(self) -> None:
        """Until the first attempt is open, and its silos train for ever."""
        now = self.rounds.now()
        for event in (started(now), ready(A, now), ready(B, now), ready(C, now)):
            await self.rounds.post(event)
        assert isinstance(self.rounds.state, Collecting)


STEP = st.tuples(st.just("wall"), st.sampled_from(STEPS))
PASS = st.tuples(st.just("pass"), st.floats(0.1, 200.0))
RESTART = st.tuples(st.sampled_from(["restart", "crash"]), st.floats(0.0, 10_000.0))
THE_ISSUE = [("wall", 3 * HOUR_S), ("pass", 1.0), ("wall", -6 * HOUR_S), ("pass", 1.0), ("wall", 3 * HOUR_S)]


@given(before=st.lists(STEP, max_size=2), schedule=st.lists(st.one_of(STEP, PASS, RESTART), max_size=12))
@example(before=[("wall", 3 * HOUR_S)], schedule=[("wall", -3 * HOUR_S)])
@example(before=[], schedule=THE_ISSUE)
@example(before=[("wall", -40 * YEAR_S)], schedule=[("pass", 100.0), ("restart", 9000.0), ("wall", 40 * YEAR_S)])
@settings(max_examples=60, deadline=None)
def test_a_deadline_passes_after_its_seconds_whatever_the_wall_clock_does(
    before: list[tuple[str, float]], schedule: list[tuple[str, float]]
) -> None:
    """Down time is not counted. A crash costs what was paid until the next save, and gives nothing back."""

    async def main() -> None:
        loop, disk, wall = asyncio.get_running_loop(), Disk(), Wall()
        process, starts, down, lost = Process(disk, wall, began=0.0), 1, 0.0, 0.0
        for _, seconds in before:
            wall.set_by += seconds
        await process.start()
        await process.train()
        opened = loop.time()
        for what, seconds in schedule:
            left = process.rounds.seconds_left
            if disk.ended.is_set() or left is None:
                break
            if what == "wall":
                wall.set_by += seconds
            elif what == "pass":
                await disk.over_within(seconds)
            else:
                if what == "crash":
                    lost += paid_until_next_save(left)
                    await process.crash()
                else:
                    await process.stop()
                await asyncio.sleep(seconds)
                process, starts, down = Process(disk, wall, began=starts * 1e6), starts + 1, down + seconds
                await process.start()
        await disk.over_within(TRAINING_S + 1)
        assert disk.ended.is_set()
        assert TRAINING_S - lost - 0.01 <= disk.ended_at - opened - down <= TRAINING_S + 0.01
        await process.stop()

    in_virtual_time(main())


@pytest.mark.parametrize("up_s", [2.0, 15.0, 59.0])
def test_a_coordinator_that_crashes_over_and_over_puts_no_deadline_off(up_s: float) -> None:
    async def main() -> None:
        loop, disk, wall = asyncio.get_running_loop(), Disk(), Wall()
        process, starts, up = Process(disk, wall, began=0.0), 1, 0.0
        await process.start()
        await process.train()
        while not disk.ended.is_set():
            began = loop.time()
            await process.rounds.post(ready(C, process.rounds.now()))  # a transition saves, too
            await disk.over_within(up_s)
            up += loop.time() - began
            assert up <= TRAINING_S + 0.01
            await process.crash()
            process, starts = Process(disk, wall, began=-starts * 1e6), starts + 1
            await process.start()
        await process.stop()

    in_virtual_time(main())


def test_what_is_paid_until_the_next_save_is_a_tenth_a_minute_at_most_and_a_second_at_least() -> None:
    assert paid_until_next_save(86_400.0) == PAID_MOST_S
    assert paid_until_next_save(100.0) == 10.0
    assert paid_until_next_save(0.5) == PAID_LEAST_S


def test_a_disk_that_is_full_for_a_while_loses_no_deadline_and_what_is_left_is_saved_once_there_is_room() -> None:
    async def main() -> None:
        disk, wall = Disk(), Wall()
        process = Process(disk, wall, began=5.0)
        await process.start()
        await process.train()
        disk.broken = True
        await asyncio.sleep(300.0)
        disk.broken = False
        await asyncio.sleep(70.0)
        saved = deadline_of(disk.load())
        assert saved is not None
        assert saved < 240.0, "as it stood before the disk was full, more was left"
        await process.stop()
        assert deadline_of(disk.load()) == pytest.approx(230.0, abs=0.01)

    in_virtual_time(main())


def test_the_date_of_what_is_recorded_is_that_of_the_wall_clock() -> None:
    async def main() -> None:
        disk, wall = Disk(), Wall()
        process = Process(disk, wall, began=123.0)
        await process.start()
        wall.set_by = -3 * HOUR_S
        await process.train()
        await process.stop()
        assert {at for _, at in disk.records} == {T0 - 3 * HOUR_S}

    in_virtual_time(main())
