"""`lorica bench-dp`: what private training costs beside plain training, in time and in memory.

One way after the other, turn by turn, each in a process of its own; figures are medians over the turns, and ratios
medians of those within a turn. What is timed is one step of `batch` records.
"""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lorica.bench.figures import write_figures
from lorica.bench.own_process import measured_apart
from lorica.bench.private.measure import Measured, Task
from lorica.bench.private.ways import WAYS
from lorica_security.console.terminal import show_table
from lorica_security.errors import ConfigurationError
from silo_wire.plans.sizes import size_named

SIZES = ("mini", "small")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    sizes: Sequence[str]
    ways: Sequence[str]
    batch: int
    physical: int
    steps: int
    turns: int
    device: str
    threads: int
    out: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One way at one size: medians over `turns`. Ratios are to the way that it stands beside, and None where that was
    not measured."""

    task: Task
    turns: int
    measured: Measured
    beside: str | None
    time_ratio: float | None
    cpu_ratio: float | None
    memory_ratio: float | None

    def to_json(self) -> Mapping[str, object]:
        noise = self.measured.noise_s / self.measured.step_s
        return {
            **asdict(self.task),
            "turns": self.turns,
            **{key: round(value, 4) for key, value in asdict(self.measured).items()},
            "noise_share": round(noise, 4),
            "beside": self.beside,
            "time_ratio": self.time_ratio,
            "cpu_ratio": self.cpu_ratio,
            "memory_ratio": self.memory_ratio,
            "load_average": round(os.getloadavg()[0], 1),
        }


def choice(
    *,
    sizes: Sequence[str] | None,
    ways: Sequence[str] | None,
    batch: int,
    physical: int,
    steps: int,
    turns: int,
    device: str,
    threads: int,
    out: Path | None,
) -> Choice:
    """With what is left out filled in; raises ConfigurationError for what cannot be measured."""
    for size in sizes or ():
        size_named(size)
    if unknown := set(ways or ()) - set(WAYS):
        raise ConfigurationError(f"way {min(unknown)!r} to train is unknown: use {', '.join(WAYS)}")
    if physical > batch:
        raise ConfigurationError(f"PHYSICAL={physical} is more than BATCH={batch}: a step has no more records")
    return Choice(
        sizes=tuple(sizes or SIZES),
        ways=tuple(way for way in WAYS if way in (ways or WAYS)),
        batch=batch,
        physical=physical,
        steps=steps,
        turns=turns,
        device=device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu"),
        threads=threads,
        out=out,
    )


def run_bench_dp(chosen: Choice, console: Console) -> list[Entry]:
    """Measure every way at every size and print each size as it is done; raises StateError where one fails."""
    results: list[Entry] = []
    for size in chosen.sizes:
        of_size: list[Entry] = []
        for of_size in _measured(chosen, size, console):
            write_figures(chosen.out, [one.to_json() for one in (*results, *of_size)])
        results += of_size
        show_table(console, _table(of_size))
    return results


def _measured(chosen: Choice, size: str, console: Console) -> Iterator[list[Entry]]:
    """What is known of the ways after each that was measured."""
    tasks = {
        name: Task(
            way=name,
            size=size,
            batch=chosen.batch,
            physical=chosen.physical,
            steps=chosen.steps,
            device=chosen.device,
            threads=chosen.threads,
        )
        for name in chosen.ways
    }
    done: dict[str, list[Measured]] = {name: [] for name in tasks}
    for turn in range(chosen.turns):
        for name, task in tasks.items():
            with console.status(f"{size}: {name}, {turn + 1} of {chosen.turns}"):
                told = measured_apart("lorica.bench.private.measure", asdict(task), name=f"{size}, {name}")
            done[name].append(Measured(**told))
            yield [_entry(one, done) for one in tasks.values() if done[one.way]]


def _entry(task: Task, done: Mapping[str, Sequence[Measured]]) -> Entry:
    own, beside = done[task.way], WAYS[task.way].beside
    others = done.get(beside, ()) if beside is not None else ()
    return Entry(
        task=task,
        turns=len(own),
        measured=_median(own),
        beside=beside,
        time_ratio=_ratio("step_s", own, others),
        cpu_ratio=_ratio("cpu_s", own, others),
        memory_ratio=_ratio("peak_bytes", own, others),
    )


def _median(turns: Sequence[Measured]) -> Measured:
    """Field by field; of counts the lower one in the middle, which is one."""
    step_s, cpu_s, noise_s = (
        statistics.median(getattr(one, field) for one in turns) for field in ("step_s", "cpu_s", "noise_s")
    )
    return replace(
        turns[0],
        step_s=step_s,
        cpu_s=cpu_s,
        noise_s=noise_s,
        peak_bytes=statistics.median_low(one.peak_bytes for one in turns),
    )


def _ratio(field: str, turns: Sequence[Measured], others: Sequence[Measured]) -> float | None:
    """The median of the turns' ratios, of those that both have."""
    ratios = [getattr(one, field) / getattr(other, field) for one, other in zip(turns, others, strict=False)]
    if not ratios:
        return None
    return round(float(statistics.median(ratios)), 3)


def _table(found: Sequence[Entry]) -> Table:
    first = found[0]
    table = Table(
        title=f"{first.task.size}, {first.measured.parameters:,} parameters, {first.task.batch} records a step, "
        f"{first.task.physical} at a time, {first.task.device}",
        title_style="dim",
    )
    for column in ("way", "step s", "CPU s", "noise s", "share", "peak MB", "time", "CPU", "memory", "beside"):
        table.add_column(column, justify="left" if column in ("way", "beside") else "right")
    for one in found:
        measured = one.measured
        private = WAYS[one.task.way].backend is not None
        table.add_row(
            one.task.way,
            f"{measured.step_s:.2f}",
            f"{measured.cpu_s:.2f}",
            f"{measured.noise_s:.2f}" if private else "",
            f"{measured.noise_s / measured.step_s:.0%}" if private else "",
            f"{measured.peak_bytes / 1e6:,.0f}",
            "" if one.time_ratio is None else f"{one.time_ratio:.2f} x",
            "" if one.cpu_ratio is None else f"{one.cpu_ratio:.2f} x",
            "" if one.memory_ratio is None else f"{one.memory_ratio:.2f} x",
            one.beside or "",
        )
    return table
