"""`lorica bench-status-page`: how long a look at the status page takes, of a coordinator with many silos and rounds.

A real coordinator serves records of rounds that never happened; asked is over HTTP on loopback. The first look reads
all rounds of the plan; every other one what is new.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from lorica.bench.figures import write_figures
from lorica.bench.made_rounds import ROUND_S, MadePlan, add_rounds, database_of, fill, make_folder, silo_names
from lorica.bench.run import empty_folder
from lorica.demo.ports import free_ports
from lorica_coordinator.composition import serving
from lorica_coordinator.edges.status_page.page import FRESH_S
from lorica_coordinator.edges.telemetry.metrics import CoordinatorMetrics
from lorica_coordinator.opened import Coordinator
from lorica_security.console.terminal import show_table

PLAN: Final = "measured"
_MARGIN: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`rounds` are there already; `repeats` looks of each kind, whose median counts."""

    silos: int
    rounds: int
    repeats: int
    work: Path
    out: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One kind of look: `wall_ms` from asking to the last byte, `cpu_ms` of the whole process meanwhile."""

    look: str
    silos: int
    rounds: int
    wall_ms: float
    cpu_ms: float
    bytes: int


def run_bench_status_page(choice: Choice, console: Console) -> list[Figures]:
    """Raises StorageError where the disk has no room."""
    place = empty_folder(choice.work, "status-page", needed=400 * choice.silos * choice.rounds)
    try:
        with console.status(f"records of {choice.rounds} rounds of {choice.silos} silos"):
            folder = make_folder(place / "coordinator", free_ports(4))
            plan = MadePlan(name=PLAN, done=choice.rounds, values={"schedule.rounds": 2 * choice.rounds})
            fill(folder, [plan], silo_names(choice.silos), now=time.time())
        found = asyncio.run(_measure(choice, Coordinator.load(folder)))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    write_figures(choice.out, [asdict(one) for one in found])
    show_table(console, table_of(found))
    return found


def table_of(found: Sequence[Figures]) -> Table:
    title = f"{found[0].silos} silos, {found[0].rounds} rounds: medians"
    table = Table("look", "wall ms", "CPU ms", "KiB", title=title, title_style="dim")
    for one in found:
        table.add_row(one.look, f"{one.wall_ms:.1f}", f"{one.cpu_ms:.1f}", f"{one.bytes / 1024:.0f}")
    return table


async def _measure(choice: Choice, coordinator: Coordinator) -> list[Figures]:
    database, plan = database_of(coordinator), coordinator.shelf.compile(PLAN).plan.digest
    names = silo_names(choice.silos)
    closed = choice.rounds
    async with serving(coordinator, CoordinatorMetrics(CollectorRegistry())) as at:
        assert at.page is not None
        port = at.page.port

        async def stale() -> None:
            await asyncio.sleep(FRESH_S + _MARGIN)

        async def new_round() -> None:
            nonlocal closed
            closed += 1
            begun = time.time() - ROUND_S * closed
            await asyncio.to_thread(add_rounds, database, plan, [closed], names, begun=begun)
            await stale()

        async def of(look: str, path: str, before: Callable[[], Awaitable[None]], repeats: int) -> Figures:
            read = []
            for _ in range(repeats):
                await before()
                read.append(await _timed(port, path))
            wall, cpu = (median(one[part] for one in read) * 1000 for part in (0, 1))
            return Figures(
                look=look, silos=choice.silos, rounds=choice.rounds, wall_ms=wall, cpu_ms=cpu, bytes=read[-1][2]
            )

        curves = f"/curves/{plan}"
        return [
            await of("the first, /", "/", stale, 1),
            await of("nothing is new, /live", "/live", stale, choice.repeats),
            await of("a round is new, /live", "/live", new_round, choice.repeats),
            await of("a round is new, curves of silos", curves, new_round, choice.repeats),
            await of("curves of all plans", "/curves", stale, choice.repeats),
            await of("somebody else looked just now, /live", "/live", _at_once, choice.repeats),
        ]


async def _at_once() -> None:
    return None


async def _timed(port: int, path: str) -> tuple[float, float, int]:
    """Wall and CPU seconds, and the bytes of the answer; raises OSError where there is none."""
    wall, cpu = time.perf_counter(), time.process_time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    reply = await reader.read()
    times = time.perf_counter() - wall, time.process_time() - cpu
    writer.close()
    if not reply.startswith(b"HTTP/1.1 200"):
        raise OSError(f"the status page answered {reply[:60]!r} to {path}")
    return *times, len(reply)
