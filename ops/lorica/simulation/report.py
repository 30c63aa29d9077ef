"""What a simulation shows: a table of rounds on a terminal, one JSON line a round in a file, a summary at the end."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lorica.simulation.run import Simulated
from lorica_coordinator.service.records import COMPLETED, RoundRow, SiloRow
from lorica_security.console.terminal import show_table
from lorica_security.host import files

ROUNDS_FILE, SUMMARY_FILE = "rounds.jsonl", "summary.json"


def round_facts(row: RoundRow) -> dict[str, Any]:
    """Losses in nats of a target token, scores from 0 to 1."""
    return {
        "round": row.round,
        "attempt": row.attempt,
        "outcome": row.outcome,
        "model": row.model,
        "macro_exact_match": row.macro_exact_match,
        "micro_exact_match": row.micro_exact_match,
        "silos": {silo.silo: _silo_facts(silo) for silo in row.silos},
    }


def _silo_facts(silo: SiloRow) -> dict[str, Any]:
    score = silo.evaluation
    facts: dict[str, Any] = {"outcome": silo.outcome}
    if silo.examples:
        facts |= {
            "examples": silo.examples,
            "loss_max": silo.loss_max,
            "loss_min": silo.loss_min,
            "loss_reduction": silo.loss_reduction,
            "weight": silo.weight,
            "share": silo.share,
            "delta_norm": silo.delta_norm,
        }
    if score is not None:
        facts |= {
            "dev_examples": score.examples,
            "exact_match": score.exact_matches / score.examples,
            "execution_accuracy": score.execution_matches / score.executed if score.executed else None,
            "loss_per_token": score.loss_per_token,
        }
    return facts


def print_round(console: Console, row: RoundRow) -> None:
    averages = {"MacroAvg": row.macro_exact_match, "MicroAvg": row.micro_exact_match}
    told = [f"{name} {average:.1%}" for name, average in averages.items() if average is not None]
    scores = f", exact match {', '.join(told)}" if told else ""
    parts = [f"{silo.silo} {silo.loss_reduction:.3f} ({silo.share:.0%})" for silo in row.silos if silo.examples]
    silos = f": loss reduction {', '.join(parts)}" if parts else ""
    console.print(f"round {row.round} {row.outcome}{silos}{scores}", highlight=False, soft_wrap=True, markup=False)


def write(out: Path, done: Simulated) -> None:
    lines = "".join(f"{json.dumps(round_facts(row))}\n" for row in done.rows)
    files.replace(out / ROUNDS_FILE, lines.encode())
    applied = [row for row in done.rows if row.outcome in COMPLETED]
    summary = {
        "plan": done.plan,
        "rounds": len(applied),
        "best_model": done.best,
        "final_model": done.final,
        "seconds": done.seconds,
    }
    files.replace(out / SUMMARY_FILE, (json.dumps(summary, indent=1) + "\n").encode())


def print_end(console: Console, done: Simulated, out: Path) -> None:
    scored = [row for row in done.rows if row.micro_exact_match is not None]
    if scored:
        last = scored[-1]
        table = Table(title=f"dev scores after round {last.round}", title_style="dim")
        for column in ("silo", "exact match", "execution accuracy", "loss per token"):
            table.add_column(column, justify="left" if column == "silo" else "right")
        for silo in last.silos:
            if (score := silo.evaluation) is not None:
                executed = f"{score.execution_matches / score.executed:.1%}" if score.executed else ""
                table.add_row(
                    silo.silo, f"{score.exact_matches / score.examples:.1%}", executed, f"{score.loss_per_token:.3f}"
                )
        table.add_section()
        for name, average in (("MacroAvg", last.macro_exact_match), ("MicroAvg", last.micro_exact_match)):
            if average is not None:
                table.add_row(name, f"{average:.1%}", "", "")
        show_table(console, table)
    console.print(
        f"{out / ROUNDS_FILE} has every round, {out / SUMMARY_FILE} how it ended", highlight=False, soft_wrap=True
    )
