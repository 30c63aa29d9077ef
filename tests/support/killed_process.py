"""One of the two programs, run as its command runs it, but for one thing: at a named point it kills itself.

    python -m tests.support.killed_process coordinator --at round-opened --round 3 --note FILE -- serve --dir DIR

SIGKILL, so nothing of the program runs after it: no handler, no `finally`, no flush. `--nth` counts the calls that fit
the point; `--round` counts those of that round alone. FILE gets a line of JSON just before the end, so that a test can
tell this death from any other. Without `--at` it lives on. With `--draws` what secure aggregation draws is repeatable
(repeatable_draws.py), and the process is known by the name of its note. With `--eager` an agent hardly waits before it
tries again to reach the coordinator: a run of many kills is as long as these waits.
"""

import argparse
import functools
import importlib
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NoReturn

from silo_wire.tls import leave_tls_1_3_alone
from tests.support.kill_points import PROGRAMS, Arguments, Point
from tests.support.repeatable_draws import Draws

MAIN = {"coordinator": "lorica_coordinator.cli", "silo-agent": "silo_agent.cli"}


class Rounds:
    """`under_way`, and the one that was `closed` last, as far as this process knows."""

    def __init__(self) -> None:
        self.under_way: int | None = None
        self.closed: int | None = None


class Fate:
    """Counts the calls that fit the point, over all threads, and ends the process at the one that was asked for."""

    def __init__(
        self, name: str, point: Point, rounds: Rounds, *, nth: int, only_round: int | None, note: Path
    ) -> None:
        self._name, self._point, self._rounds = name, point, rounds
        self._left, self._only_round, self._note = nth, only_round, note
        self._counting = threading.Lock()

    @property
    def round(self) -> int | None:
        """The round that a call of the point belongs to now."""
        return self._rounds.closed if self._point.of_closed else self._rounds.under_way

    def meet(self, arguments: Arguments) -> None:
        if not self._point.only(arguments) or self._only_round not in (None, self.round):
            return
        with self._counting:
            self._left -= 1
            if self._left == 0:
                self._end()

    def _end(self) -> NoReturn:
        self._note.write_text(json.dumps({"point": self._name, "round": self.round, "process": os.getpid()}))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL returned")


def install(fate: Fate, point: Point) -> None:
    holder, name, function = point.place()
    setattr(holder, name, _wrapped(function, fate, point.side))


def _wrapped(function: Callable[..., Any], fate: Fate, side: str) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def generating(*arguments: Any, **named: Any) -> AsyncIterator[Any]:
            async for item in function(*arguments, **named):
                yield item
                if side == "item":
                    fate.meet(arguments)
            if side == "end":
                fate.meet(arguments)

        return generating

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def waiting(*arguments: Any, **named: Any) -> Any:
            if side == "before":
                fate.meet(arguments)
            result = await function(*arguments, **named)
            if side == "after":
                fate.meet(arguments)
            return result

        return waiting

    @functools.wraps(function)
    def calling(*arguments: Any, **named: Any) -> Any:
        if side == "before":
            fate.meet(arguments)
        result = function(*arguments, **named)
        if side == "after":
            fate.meet(arguments)
        return result

    return calling


def follow_rounds(program: str, rounds: Rounds) -> None:
    """Have `rounds` be right: from what the program makes durable, just before it does so."""
    if program == "coordinator":
        from lorica_coordinator.edges.database.round_store import SqlRoundStore
        from lorica_coordinator.rounds.effects import EvaluationClosed, RoundClosed
        from lorica_coordinator.rounds.states import State, round_of

        transition, load = SqlRoundStore.transition, SqlRoundStore.load

        def saving(store: SqlRoundStore, state: State, records: Any, **when: float) -> None:
            rounds.under_way = round_of(state)[0]
            for record in records:
                if isinstance(record, RoundClosed | EvaluationClosed):
                    rounds.closed = record.key.round
            transition(store, state, records, **when)

        def loading(store: SqlRoundStore, now: float = 0.0) -> State:
            state = load(store, now)
            rounds.under_way = round_of(state)[0]
            return state

        SqlRoundStore.transition = saving  # type: ignore[method-assign, assignment]
        SqlRoundStore.load = loading  # type: ignore[method-assign, assignment]
    else:
        from silo_agent.edges.disk.round_journal import RoundJournal

        record = RoundJournal.record

        def recording(journal: RoundJournal, effect: Any) -> None:
            if (key := getattr(effect, "key", None)) is not None:
                rounds.under_way = key.round
            record(journal, effect)

        RoundJournal.record = recording  # type: ignore[method-assign, assignment]


def come_back_at_once() -> None:
    """Have an agent wait no longer than half a second before it looks for a coordinator that is gone."""
    from silo_agent.edges.wire import channel
    from silo_agent.edges.wire.backoff import Backoff

    Backoff.__init__.__kwdefaults__ = {"first_s": 0.1, "most_s": 0.5}  # type: ignore[attr-defined]
    names = ("initial", "min", "max")
    channel.CHANNEL_OPTIONS = (  # type: ignore[attr-defined]
        *channel.CHANNEL_OPTIONS,  # type: ignore[attr-defined]
        *((f"grpc.{name}_reconnect_backoff_ms", 100) for name in names),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=sorted(PROGRAMS))
    parser.add_argument("--at")
    parser.add_argument("--nth", type=int, default=1)
    parser.add_argument("--round", type=int)
    parser.add_argument("--note", type=Path, required=True)
    parser.add_argument("--draws", type=Path)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("arguments", nargs="+")
    given = parser.parse_args()
    rounds = Rounds()
    leave_tls_1_3_alone()  # before whatever imports grpc

    if given.at is not None:
        point = PROGRAMS[given.program][given.at]
        install(Fate(given.at, point, rounds, nth=given.nth, only_round=given.round, note=given.note), point)
    if given.draws is not None:
        Draws(given.draws).install(given.program, given.note.stem, lambda: rounds.under_way)
    if given.eager:
        come_back_at_once()
    follow_rounds(given.program, rounds)
    sys.argv = [given.program, *given.arguments]
    importlib.import_module(MAIN[given.program]).main()


if __name__ == "__main__":
    main()
