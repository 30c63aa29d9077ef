"""What a simulation shows on a terminal: a line for each round, a table of scores at its end."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from lorica.simulation.simulated import ROUNDS_FILE, SUMMARY_FILE, Simulated
from lorica_coordinator.service.records import RoundRow
from lorica_security.console.terminal import show_table

SHOWN_SILOS = 8
"""Of more, a round's line gives the least and the largest loss reduction: a terminal has no room for hundreds."""


def print_round(console: Console, row: RoundRow, *, score: str) -> None:
    """`score` is by what answers count, as people are shown it."""
    averages = {"MacroAvg": row.macro_exact_match, "MicroAvg": row.micro_exact_match}
    told = [f"{name} {average:.1%}" for name, average in averages.items() if average is not None]
    scores = f", {score} {', '.join(told)}" if told else ""
    trained = [silo for silo in row.silos if silo.examples]
    silos = ""
    if len(trained) > SHOWN_SILOS:
        of = [silo.loss_reduction for silo in trained]
        silos = f": loss reduction of {len(trained)} silos {min(of):.3f} to {max(of):.3f}"
    elif trained:
        parts = [f"{silo.silo} {silo.loss_reduction:.3f} ({silo.share:.0%})" for silo in trained]
        silos = f": loss reduction {', '.join(parts)}"
    console.print(f"round {row.round} {row.outcome}{silos}{scores}", highlight=False, soft_wrap=True, markup=False)


def print_end(console: Console, done: Simulated, out: Path, *, score: str) -> None:
    scored = [row for row in done.rows if row.micro_exact_match is not None]
    if scored:
        last = scored[-1]
        table = Table(title=f"dev scores after round {last.round}", title_style="dim")
        told = {silo.silo: silo.evaluation for silo in last.silos if silo.evaluation is not None}
        executes = any(of.executed for of in told.values())  # SQL where there are databases; nothing else runs
        for column in ("silo", score, *(["execution accuracy"] if executes else []), "loss per token"):
            table.add_column(column, justify="left" if column == "silo" else "right")
        for silo, of in told.items():
            executed = f"{of.execution_matches / of.executed:.1%}" if of.executed else ""
            cells = [f"{of.exact_matches / of.examples:.1%}", *([executed] if executes else [])]
            table.add_row(silo, *cells, f"{of.loss_per_token:.3f}")
        table.add_section()
        for name, average in (("MacroAvg", last.macro_exact_match), ("MicroAvg", last.micro_exact_match)):
            if average is not None:
                table.add_row(name, f"{average:.1%}")
        show_table(console, table)
    console.print(
        f"{out / ROUNDS_FILE} has every round, {out / SUMMARY_FILE} how it ended", highlight=False, soft_wrap=True
    )
