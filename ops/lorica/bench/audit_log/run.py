"""`lorica bench-log`: what an entry of the coordinator's audit log costs, in files and in rows of PostgreSQL.

By turns, one entry here and one there, so that both have the same machine. Rows end with a seal each time, files every
64 entries. What the server does is in the wall time, and in no CPU time.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

from rich.console import Console
from rich.table import Table

from lorica.bench.elsewhere.storage import Storage
from lorica.bench.figures import write_figures
from lorica.bench.made_rounds import make_folder
from lorica.bench.run import empty_folder
from lorica.demo.ports import free_ports
from lorica_coordinator.opened import Coordinator, leading
from lorica_security.audit.entry import Event
from lorica_security.console.terminal import show_table
from lorica_security.host.process_lock import ProcessLock
from lorica_security.on_disk.log_file import AuditLog

_PLAN: Final = "f" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    entries: int
    storage: Storage
    work: Path
    out: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one entry, medians: `wall_ms` until it is durable, `cpu_ms` of the process that enters it."""

    place: str
    entries: int
    wall_ms: float
    cpu_ms: float


def run_bench_log(choice: Choice, console: Console) -> list[Figures]:
    """Raises StorageError, and ConfigurationError where the database is not this one's to use."""
    place = empty_folder(choice.work, "log", needed=0)
    in_files, in_rows = (make_folder(place / name, free_ports(4)) for name in ("files", "rows"))
    choice.storage.write_into(in_rows.settings)
    try:
        with ProcessLock(in_rows.lock, "benchmark"), leading(Coordinator.load(in_rows)) as leader:
            found = _measure([Coordinator.load(in_files).audit(), leader.audit()], choice.entries)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    write_figures(choice.out, [asdict(one) for one in found])
    show_table(console, table_of(found))
    return found


def table_of(found: Sequence[Figures]) -> Table:
    table = Table("an entry in", "wall ms", "CPU ms", title=f"medians of {found[0].entries} entries", title_style="dim")
    for one in found:
        table.add_row(one.place, f"{one.wall_ms:.2f}", f"{one.cpu_ms:.2f}")
    return table


def _measure(logs: Sequence[AuditLog], entries: int) -> list[Figures]:
    took: list[list[tuple[float, float]]] = [[] for _ in logs]
    for number in range(1 + entries):
        for log, of_log in zip(logs, took, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            log.append(Event.UPDATE_RECEIVED, plan=_PLAN, round=number, update=f"{number:064x}")
            of_log.append((time.perf_counter() - wall, time.process_time() - cpu))
    return [
        Figures(
            place=place,
            entries=entries,
            wall_ms=round(1000 * median(wall for wall, _ in of_log[1:]), 3),  # the first finds the log's end
            cpu_ms=round(1000 * median(cpu for _, cpu in of_log[1:]), 3),
        )
        for place, of_log in zip(("files", "rows of PostgreSQL"), took, strict=True)
    ]
