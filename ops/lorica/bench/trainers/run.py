"""`lorica bench-training`: examples a second of Lorica's trainer beside Hugging Face's `Seq2SeqTrainer`.

Both by turns, each in a process of its own; figures are medians over the turns, so that what else the machine does
meets both.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from lorica.bench.figures import write_figures
from lorica.bench.own_process import measured_apart
from lorica.bench.trainers.task import WAYS, Measured, Task
from lorica_security.console.terminal import show_table
from lorica_security.errors import StateError
from silo_wire.plans.sizes import size_named

SIZES = ("small", "base")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`turns` of each way at each size; `out` is the JSON file that is written, if any."""

    sizes: Sequence[str]
    batch: int
    accumulation: int
    steps: int
    turns: int
    precision: Literal["float32", "bfloat16"]
    device: str
    threads: int
    out: Path | None

    def __post_init__(self) -> None:
        """Raises ConfigurationError for a size that is not in the table."""
        for size in self.sizes:
            size_named(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One way at one size, of all its turns. Ratios are to the first way: the median of the turns' ratios, and the
    least and the largest of them; None for the first way itself."""

    task: Task
    turns: Sequence[Measured]
    time_ratios: Sequence[float] | None
    cpu_ratios: Sequence[float] | None

    @property
    def examples(self) -> int:
        """Of a step."""
        return self.task.batch * self.task.accumulation

    def median(self, field: str) -> float:
        """Of a field of Measured, over the turns."""
        return float(statistics.median(getattr(turn, field) for turn in self.turns))

    def to_json(self) -> Mapping[str, object]:
        step_s, cpu_s = self.median("step_s"), self.median("cpu_s")
        return {
            **asdict(self.task),
            "turns": len(self.turns),
            "parameters": self.turns[0].parameters,
            "examples": self.turns[0].examples,
            "examples_per_s": round(self.examples / step_s, 3),
            "examples_per_cpu_s": round(self.examples / cpu_s, 3),
            **{field: round(self.median(field), 4) for field in ("step_s", "cpu_s", "before_s", "after_s", "loss")},
            "peak_bytes": int(self.median("peak_bytes")),
            "time_ratios": self.time_ratios,
            "cpu_ratios": self.cpu_ratios,
        }


def run_bench_training(chosen: Choice, console: Console) -> list[Entry]:
    """Measure both ways at every size and print each size as it is done. Raises StateError where one fails, or where
    they did not train on the same."""
    results: list[Entry] = []
    for size in chosen.sizes:
        of_size: list[Entry] = []
        for of_size in _turns(chosen, size, console):
            write_figures(chosen.out, [one.to_json() for one in (*results, *of_size)])
        results += of_size
        show_table(console, _table(of_size))
    return results


def _turns(chosen: Choice, size: str, console: Console) -> Iterator[list[Entry]]:
    """What is known of each way, after each turn."""
    first = Task(
        way=WAYS[0],
        size=size,
        batch=chosen.batch,
        accumulation=chosen.accumulation,
        steps=chosen.steps,
        precision=chosen.precision,
        device=chosen.device if chosen.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu"),
        threads=chosen.threads,
    )
    tasks = [replace(first, way=way) for way in WAYS]
    turns: list[list[Measured]] = [[] for _ in tasks]
    for turn in range(chosen.turns):
        for task, done in zip(tasks, turns, strict=True):
            with console.status(f"{size}: {task.way}, {turn + 1} of {chosen.turns}"):
                told = measured_apart("lorica.bench.trainers.measure", asdict(task), name=f"{size}, {task.way}")
            done.append(Measured(**told))
        if len({(one.examples, one.parameters) for done in turns for one in done}) > 1:
            raise StateError(f"{size}: the ways to train did not see the same examples and the same model")
        yield [
            Entry(
                task=task,
                turns=tuple(done),
                time_ratios=None if task is tasks[0] else _ratios("step_s", done, turns[0]),
                cpu_ratios=None if task is tasks[0] else _ratios("cpu_s", done, turns[0]),
            )
            for task, done in zip(tasks, turns, strict=True)
        ]


def _ratios(field: str, turns: Sequence[Measured], beside: Sequence[Measured]) -> Sequence[float]:
    ratios = [getattr(one, field) / getattr(other, field) for one, other in zip(turns, beside, strict=True)]
    return [round(ratio, 3) for ratio in (statistics.median(ratios), min(ratios), max(ratios))]


def _table(found: Sequence[Entry]) -> Table:
    first = found[0]
    table = Table(
        title=f"{first.task.size}, {first.turns[0].parameters:,} parameters, {first.examples} examples a step, "
        f"{first.task.precision}, {first.task.device}: medians of {len(first.turns)} turns",
        title_style="dim",
    )
    for column in ("trainer", "examples/s", "examples/CPU s", "step s", "CPU s", "peak MB", "time", "CPU", "loss"):
        table.add_column(column, justify="left" if column == "trainer" else "right")
    for one in found:
        table.add_row(
            one.task.way,
            f"{one.examples / one.median('step_s'):.2f}",
            f"{one.examples / one.median('cpu_s'):.2f}",
            f"{one.median('step_s'):.2f}",
            f"{one.median('cpu_s'):.2f}",
            f"{one.median('peak_bytes') / 1e6:,.0f}",
            "" if one.time_ratios is None else f"{one.time_ratios[0]:.2f} x",
            "" if one.cpu_ratios is None else f"{one.cpu_ratios[0]:.2f} x",
            f"{one.median('loss'):.3f}",
        )
    return table
