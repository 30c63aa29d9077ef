"""What the demo shows while it runs: a bar for each silo's work, and a table with one block of rows per round."""

from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lorica_coordinator.service.records import COMPLETED
from silo_wire.v1 import operator_pb2


class RoundDisplay:
    """Live on a terminal; one plain line per event elsewhere."""

    def __init__(self, console: Console, silos: Sequence[str], rounds: int) -> None:
        self._console = console
        self._silos = silos
        self._rounds = rounds
        self._printed: set[str] = set()
        self._records: list[operator_pb2.RoundRecord] = []
        self._overall = Progress(
            TextColumn("[bold]{task.description:<12}"),
            BarColumn(40),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._round_task = self._overall.add_task("federation", total=rounds, note="starting")
        self._work = Progress(
            TextColumn("  {task.description:<10}"), BarColumn(40), TextColumn("{task.fields[note]}"), console=console
        )
        self._tasks: dict[str, TaskID] = {silo: self._work.add_task(silo, total=1.0, note="") for silo in silos}
        self._live = Live(self._render(), console=console, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> "RoundDisplay":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def update(self, status: operator_pb2.StatusReply, records: Sequence[operator_pb2.RoundRecord]) -> None:
        self._records = list(records)
        done = sum(record.outcome in COMPLETED for record in records)
        self._overall.update(
            self._round_task, completed=done, note=f"round {status.round} of {self._rounds}, {status.phase}"
        )
        for silo in status.silos:
            if silo.silo in self._tasks:
                self._work.update(self._tasks[silo.silo], completed=silo.fraction, note=silo.state)
        if self._live:
            self._live.update(self._render())
        else:
            self._print_new(records)

    def _print_new(self, records: Sequence[operator_pb2.RoundRecord]) -> None:
        for record in records:
            for line in (_trained(record), _scored(record)):
                if line and line not in self._printed:
                    self._printed.add(line)
                    self._console.print(line, highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        return Group(round_table(self._records, self._silos, last=8), self._overall, self._work)


def _trained(record: operator_pb2.RoundRecord) -> str:
    committed = [silo for silo in record.silos if silo.outcome == "committed"]
    parts = [
        f"{silo.silo} loss reduction {silo.loss_reduction:.3f}, weight {silo.weight:.0f} ({silo.share:.0%})"
        for silo in committed
        if silo.examples
    ]
    if committed and not parts:
        parts = [f"{len(committed)} updates, of which nothing is shown but what they come to"]
    return f"round {record.round} {record.outcome}: {'; '.join(parts)}" if parts and record.outcome != "running" else ""


def _scored(record: operator_pb2.RoundRecord) -> str:
    if record.micro_exact_match < 0:
        return ""
    if record.macro_exact_match < 0:  # summed under masks
        return f"round {record.round} exact match: {record.micro_exact_match:.1%} of all questions together"
    parts = [
        f"{silo.silo} {silo.dev_exact_matches / silo.dev_examples:.0%}" for silo in record.silos if silo.dev_examples
    ]
    return f"round {record.round} exact match: {', '.join((f'MacroAvg {record.macro_exact_match:.1%}', *parts))}"


def round_table(records: Sequence[operator_pb2.RoundRecord], silos: Sequence[str], last: int = 0) -> Table:
    """Rounds down, silos across: loss reduction, share of the weighted mean, exact match and execution accuracy on
    dev."""
    table = Table(
        title="loss reduction · weight share, then exact match / execution accuracy on dev", title_style="dim"
    )
    table.add_column("round", justify="right")
    for silo in silos:
        table.add_column(silo, justify="right")
    table.add_column("MacroAvg", justify="right")
    table.add_column("MicroAvg", justify="right")
    ended = [record for record in records if record.outcome != "running" or record.micro_exact_match >= 0]
    for record in ended[-last:] if last else ended:
        by_silo = {silo.silo: silo for silo in record.silos}
        cells = [_cell(by_silo.get(name)) for name in silos]
        macro = "" if record.macro_exact_match < 0 else f"{record.macro_exact_match:.1%}"
        micro = "" if record.micro_exact_match < 0 else f"{record.micro_exact_match:.1%}"
        table.add_row(str(record.round), *cells, macro, micro)
    return table


def _cell(silo: operator_pb2.SiloRound | None) -> Text:
    if silo is None:
        return Text("-", style="dim")
    lines = []
    if silo.outcome == "committed" and not silo.examples:
        lines.append("took part")
    elif silo.outcome == "committed":
        lines.append(f"{silo.loss_reduction:.2f} · {silo.share:.0%}")
    elif silo.outcome not in ("", "evaluated"):
        lines.append(silo.outcome)
    if silo.dev_examples:
        execution = f" / {silo.dev_execution_matches / silo.dev_executed:.0%}" if silo.dev_executed else ""
        lines.append(f"{silo.dev_exact_matches / silo.dev_examples:.0%}{execution}")
    return Text("\n".join(lines))
