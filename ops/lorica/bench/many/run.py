"""One round of many silos, each a process of its own on this machine: in the clear, then masked.

What is measured is the first round of a plan, from its opening: no model has to be checked yet. Agents share what they
have imported, so that a machine holds more of them.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from lorica.bench.federation import run_lorica
from lorica.bench.figures import figures, write_figures
from lorica.bench.many.forked import ForkedProcesses
from lorica.bench.many.journal import JournalFigures, measure_journal
from lorica.bench.run import BYTES_PER_PARAMETER, BYTES_PER_PARAMETER_AND_SILO, empty_folder
from lorica.demo.processes import Processes
from lorica_security.console.terminal import show_table
from lorica_security.errors import ConfigurationError, StateError

SILOS = (32, 64)
PARAMETERS = 25_000_000
LEAST_PARAMETERS = 2_000_000
_MASKED_VECTOR_BYTES = 4
_AGENT_BYTES, _AGENT_BYTES_PER_PARAMETER = 150_000_000, 6
"""What an agent has for itself in memory, beside what it shares with all others, as measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to measure. `parameters` 0: the journal alone. `work`: a folder of the benchmark's own, `out`: a JSON file,
    if any."""

    silos: Sequence[int]
    parameters: int
    work: Path
    out: Path | None

    def __post_init__(self) -> None:
        if min(self.silos) < 3:
            raise ConfigurationError(f"SILOS={min(self.silos)}: a masked sum takes at least 3 silos")
        if 0 < self.parameters < LEAST_PARAMETERS:
            raise ConfigurationError(f"PARAMETERS={self.parameters}: a model has {LEAST_PARAMETERS} at least")

    def require_memory(self) -> None:
        """Raises StateError where the machine has too little for the most silos, each a process with a model."""
        most = max(self.silos)
        needed = most * (_AGENT_BYTES + _AGENT_BYTES_PER_PARAMETER * self.parameters)
        if needed > (free := psutil.virtual_memory().available):
            raise StateError(
                f"{most} silos of {self.parameters / 1e6:.1f} M parameters take {needed / 1e9:.1f} GB of memory, here "
                f"are {free / 1e9:.1f}: choose fewer SILOS or PARAMETERS"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyFigures:
    """Seconds, and bytes beyond the interpreter with its imports. `agent_cpu_s`: of one silo, the mean of all.

    `aggregate_s`: from the last update, or the last share that was needed, to the model. `masking_s`: from the last
    delta that was trained to that share; None in the clear.
    """

    system: str
    silos: int
    parameters: int
    wall_s: float
    agent_cpu_s: float
    coordinator_cpu_s: float
    coordinator_peak_bytes: int
    wire_bytes: int
    masking_s: float | None
    aggregate_s: float


class WarmAgents(ForkedProcesses):
    """Agents and commands are forked. The coordinator starts as it does elsewhere: its memory is measured."""

    def start(self, name: str, module: str, arguments: Sequence[str], extra: Mapping[str, str] | None = None) -> None:
        how = Processes if module == "lorica_coordinator.cli" else ForkedProcesses
        how.start(self, name, module, arguments, extra)


def run_bench_many(choice: Choice, console: Console) -> tuple[list[JournalFigures], list[ManyFigures]]:
    """Measure each number of silos; raises StorageError, StateError."""
    if choice.parameters:
        choice.require_memory()
    journals: list[JournalFigures] = []
    rounds: list[ManyFigures] = []
    for silos in choice.silos:
        place = empty_folder(choice.work, "journal", needed=0)
        journals.append(measure_journal(place, silos))
        shutil.rmtree(place)
        for masked in (False, True) if choice.parameters else ():
            with console.status(f"{silos} silos{', masked' if masked else ''}"):
                rounds.append(_measure(choice, silos, masked=masked))
            _write(choice.out, journals, rounds)
        _write(choice.out, journals, rounds)  # after each
    show_table(console, _table_of_journals(journals))
    if rounds:
        show_table(console, _table_of_rounds(rounds))
    return journals, rounds


def _write(out: Path | None, journals: Sequence[JournalFigures], rounds: Sequence[ManyFigures]) -> None:
    write_figures(out, {"journals": [asdict(one) for one in journals], "rounds": [asdict(one) for one in rounds]})


def _measure(choice: Choice, silos: int, *, masked: bool) -> ManyFigures:
    per_silo = BYTES_PER_PARAMETER_AND_SILO + (_MASKED_VECTOR_BYTES if masked else 0)
    needed = choice.parameters * (BYTES_PER_PARAMETER + silos * per_silo)
    place = empty_folder(choice.work, "many", needed=needed * 2 // 3)
    run = run_lorica(
        place,
        silos=silos,
        parameters=choice.parameters,
        rounds=1,
        masked="off" if masked else None,
        kind=WarmAgents,
    )
    entered = first_entered(place / "coordinator.log")
    shutil.rmtree(place)
    whole = figures(run)
    agents_cpu_s = run.readings[-1].agents_cpu_s - run.readings[0].agents_cpu_s
    return ManyFigures(
        system=whole.system,
        silos=silos,
        parameters=whole.parameters,
        wall_s=whole.wall_s,
        agent_cpu_s=round(agents_cpu_s / silos, 3),
        coordinator_cpu_s=round(whole.cpu_s - agents_cpu_s, 3),
        coordinator_peak_bytes=whole.coordinator_peak_bytes,
        wire_bytes=whole.wire_bytes,
        masking_s=round(entered["aggregating"] - entered["masking"], 3) if masked else None,
        aggregate_s=round(entered["finished"] - entered["aggregating"], 3),
    )


def first_entered(log: Path) -> dict[str, float]:
    """When the coordinator first was in each phase, in Unix seconds; raises StateError where it never made a model."""
    entered: dict[str, float] = {}
    for line in log.read_text().splitlines():
        told = json.loads(line) if line.startswith("{") else {}
        if told.get("event") == "transition":
            entered.setdefault(told["phase"], datetime.fromisoformat(told["timestamp"]).timestamp())
    if not {"aggregating", "finished"} <= set(entered):
        raise StateError(f"{log} tells of no round that was aggregated, but of {', '.join(entered) or 'nothing'}")
    return entered


def _table_of_journals(journals: Sequence[JournalFigures]) -> Table:
    table = Table(title="the coordinator's journal of one masked attempt, MB", title_style="dim")
    for column in ("silos", "events", "the events", "written", "erased", "CPU ms a transition"):
        table.add_column(column, justify="right")
    for one in journals:
        bytes_of = (one.event_bytes, one.written_bytes, one.erased_bytes)
        megabytes = (f"{value / 1e6:.2f}" for value in bytes_of)
        table.add_row(str(one.silos), str(one.events), *megabytes, f"{1e3 * one.cpu_s:.2f}")
    return table


def _table_of_rounds(rounds: Sequence[ManyFigures]) -> Table:
    table = Table(title=f"the first round, {rounds[0].parameters:,} parameters", title_style="dim")
    columns = ("wall s", "CPU s a silo", "coordinator's CPU s", "its peak MB", "masking s", "aggregating s")
    for column in ("silos", "system", *columns):
        table.add_column(column, justify="left" if column == "system" else "right")
    for one in rounds:
        table.add_row(
            str(one.silos),
            one.system,
            *(f"{value:.2f}" for value in (one.wall_s, one.agent_cpu_s, one.coordinator_cpu_s)),
            f"{one.coordinator_peak_bytes / 1e6:.0f}",
            "" if one.masking_s is None else f"{one.masking_s:.2f}",
            f"{one.aggregate_s:.2f}",
        )
    return table
