"""What a benchmark run gives: a reading at the end of each round, and the medians that are reported."""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from lorica.source_commit import commit
from lorica_security.errors import StateError
from lorica_security.host import files


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Taken as a round ended: totals since the processes began, peaks since the reading before.

    Memory is in bytes and includes the interpreter; `agent_peak_bytes` is the largest of the agents'.
    """

    at_s: float
    cpu_s: float
    agents_cpu_s: float
    wire_bytes: int
    coordinator_bytes: int
    coordinator_peak_bytes: int
    agent_peak_bytes: int

    @property
    def coordinator_cpu_s(self) -> float:
        return self.cpu_s - self.agents_cpu_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One system at one size. The first reading ends the round that is not counted, or opens the only one.

    `*_imports_bytes` is what such a process has in memory once it has done its imports.
    """

    system: str
    silos: int
    parameters: int
    readings: Sequence[Reading]
    coordinator_imports_bytes: int
    agent_imports_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Medians over the counted rounds: seconds, and bytes beyond the interpreter with its imports.

    `growth_bytes_per_round` is the slope of the coordinator's memory at the rounds' ends (least squares).
    """

    system: str
    silos: int
    parameters: int
    rounds: int
    wall_s: float
    cpu_s: float
    coordinator_cpu_s: float
    coordinator_peak_bytes: int
    agent_peak_bytes: int
    wire_bytes: int
    growth_bytes_per_round: int

    def to_json(self) -> Mapping[str, str | int | float]:
        return asdict(self)


def figures(run: Run) -> Figures:
    """Raises StateError when nothing was counted. A single round has no growth."""
    counted = run.readings[1:]
    if not counted:
        raise StateError(f"{run.system}: no round was measured to its end")
    steps = list(zip(run.readings, counted, strict=False))
    ends = [reading.coordinator_bytes for reading in counted]
    return Figures(
        system=run.system,
        silos=run.silos,
        parameters=run.parameters,
        rounds=len(counted),
        wall_s=round(statistics.median(after.at_s - before.at_s for before, after in steps), 3),
        cpu_s=round(statistics.median(after.cpu_s - before.cpu_s for before, after in steps), 3),
        coordinator_cpu_s=round(
            statistics.median(after.coordinator_cpu_s - before.coordinator_cpu_s for before, after in steps), 3
        ),
        coordinator_peak_bytes=int(statistics.median(one.coordinator_peak_bytes for one in counted))
        - run.coordinator_imports_bytes,
        agent_peak_bytes=int(statistics.median(one.agent_peak_bytes for one in counted)) - run.agent_imports_bytes,
        wire_bytes=int(statistics.median(after.wire_bytes - before.wire_bytes for before, after in steps)),
        growth_bytes_per_round=round(statistics.linear_regression(range(len(ends)), ends).slope) if ends[1:] else 0,
    )


_BEGAN_WITH, _BEGAN_AT_LOAD = commit(), os.getloadavg()[0]  # now, not at the end: the code on disk may be another then


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What else a reader of figures must know. `load_average` of a minute: as the benchmark began and at its end."""

    commit: str
    when: str
    load_average: tuple[float, float]
    cores: int
    memory_gb: int

    @classmethod
    def now(cls) -> "Measured":
        return cls(
            commit=_BEGAN_WITH,
            when=datetime.now(UTC).isoformat(timespec="minutes"),
            load_average=(round(_BEGAN_AT_LOAD, 1), round(os.getloadavg()[0], 1)),
            cores=len(os.sched_getaffinity(0)),
            memory_gb=round(psutil.virtual_memory().total / 1e9),
        )


def write_figures(out: Path | None, found: Sequence[Mapping[str, object]] | Mapping[str, object]) -> None:
    """To the JSON file `out`, if there is one, with what was measured where: after each figure, so that a run that is
    cut short leaves what it has."""
    if out is not None:
        files.replace(
            out, (json.dumps({"measured": asdict(Measured.now()), "figures": found}, indent=1) + "\n").encode()
        )


def read_figures(path: Path) -> tuple[Measured, Any]:
    """What `write_figures` wrote. Raises OSError, and ValueError or TypeError for a file that it did not write."""
    content = json.loads(path.read_text(encoding="utf-8"))
    measured = content["measured"]
    return Measured(**{**measured, "load_average": tuple(measured["load_average"])}), content["figures"]
