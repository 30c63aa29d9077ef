"""`lorica bench-simulation`: what a simulated round's time goes to, size by size."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lorica.bench.figures import write_figures
from lorica.bench.run import empty_folder
from lorica.bench.simulation.measure import NOT_COUNTED, Figures, measure
from lorica.bench.simulation.stopwatch import FORWARD, PARTS
from lorica_security.console.terminal import show_table
from silo_wire.plans.sizes import size_named

SIZES = ("mini", "tiny", "compact")
FOLDER = "bench-simulation"
"""Below WORK, emptied at first: not `simulation`, where `lorica simulate` leaves what somebody may have waited days
for."""
_NEEDED = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`work` is a folder of the benchmark's own, `out` the JSON file that is written, if any; `largest` is the largest
    silo's training examples."""

    sizes: Sequence[str]
    largest: int
    rounds: int
    threads: int
    work: Path
    out: Path | None

    def __post_init__(self) -> None:
        """Raises ConfigurationError for a size that is not in the table."""
        for size in self.sizes:
            size_named(size)


def run_bench_simulation(choice: Choice, console: Console) -> list[Figures]:
    """Measure every size and print each as it is done. Raises StorageError, and what a simulation raises."""
    results: list[Figures] = []
    for size in choice.sizes:
        place = empty_folder(choice.work, FOLDER, needed=_NEEDED)
        with console.status(f"{size}: {choice.rounds} rounds and {NOT_COUNTED} that do not count"):
            results.append(
                measure(place, size=size, largest=choice.largest, rounds=choice.rounds, threads=choice.threads)
            )
        shutil.rmtree(place)
        show_table(console, table_of(results[-1]))
        write_figures(choice.out, [one.to_json() for one in results])
    return results


def table_of(one: Figures) -> Table:
    table = Table(
        title=f"{one.size}, {one.parameters:,} parameters, {one.silos} silos, {one.examples} examples: medians of "
        f"{one.rounds} rounds",
        title_style="dim",
        show_header=False,
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_row("seconds of a round", f"{one.round_s:.2f}")
    table.add_row("training examples a second", f"{one.examples_per_s:.0f}")
    for part, what in PARTS.items():
        table.add_row(what, f"{one.shares[part]:.1%}")
    table.add_row("outside forward and backward", f"{1 - sum(one.shares[part] for part in FORWARD):.1%}", style="bold")
    return table
