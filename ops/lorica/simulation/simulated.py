"""How a simulation ended, and the files that it leaves: one JSON line a round, a summary."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorica.simulation.model_files import KeptModel
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.service.records import COMPLETED, RoundRow, SiloRow
from lorica_security.errors import StorageError
from lorica_security.host import files
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest

ROUNDS_FILE, SUMMARY_FILE = "rounds.jsonl", "summary.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """How it ended. `best` is by MicroAvg, `kept` has the one by MacroAvg. `rows` are all attempts at rounds, oldest
    first, with what single silos told.

    `losses` are those of training by silo: optimizer steps since the first round, and the mean of the steps since the
    point before. `seconds` are those since it began, or went on: the clock that rounds are dated by stands still.
    """

    coordinator: Coordinator
    plan: Digest
    best: Digest
    final: Digest
    kept: KeptModel
    rows: Sequence[RoundRow]
    seconds: float
    losses: Mapping[SiloName, Sequence[tuple[int, float]]]

    def export(self, target: Path) -> None:
        """Write the best model, by MicroAvg, to the new folder `target`, as `coordinator export` does; raises
        ConfigurationError where `target` is there, StateError where no round has ended."""
        self.coordinator.export(self.plan, self.best, target)


def write(out: Path, done: Simulated, *, score: str) -> None:
    """Both files, in the folder `out`; `score` is by what answers count, as people are shown it.

    Raises StorageError.
    """
    lines = "".join(f"{json.dumps({'score': score, **round_facts(row)})}\n" for row in done.rows)
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


def make_folder(out: Path) -> None:
    """Make it, unless it is there; raises StorageError where nothing can be written into it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{out} cannot be made: {error.strerror or error}; choose another --out") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise StorageError(f"{out} cannot be written: choose another --out")
