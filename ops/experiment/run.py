"""`lorica experiment`: every run of a study, one after the other, each appended to results.jsonl as it ends; those that are there are not done again.

A run is a simulated federation (ops/simulation), or one for each silo (`alone`), or one silo that has all data (`centralized`): the same rounds,
the same number of epochs over the same examples for each. The best model by MicroAvg on dev is scored on each silo's test split.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from coordinator.plans.model_source import FolderModel, ModelSource, SizedModel
from coordinator.plans.plan_folder import create_plan
from ops.experiment.data import merged, own_copy
from ops.experiment.definition import SETUPS, Run, Study
from ops.experiment.scoring import scores
from ops.simulation.report import round_facts
from ops.simulation.run import Simulated, silos_in, simulate
from security.errors import ConfigurationError
from security.identifiers import SiloName

RESULTS = "results.jsonl"
ALL = SiloName("all")
_FEDERATION = "study"


def run_study(study: Study, out: Path, *, device: str, threads: int, console: Console) -> None:
    """Do what is not done yet. Raises what a run raises; it begins where it was the next time."""
    out.mkdir(parents=True, exist_ok=True)
    data = own_copy(silos_in(Path(study.silos)), out / "data", study.at_most)
    done = {line["run"] for line in results(out)}
    runs = list(study.runs())
    for number, run in enumerate(runs, 1):
        if run.key in done:
            continue
        console.print(
            f"run {number} of {len(runs)}: {SETUPS[run.setup].label}, seed {run.seed}, {dict(run.point)}",
            highlight=False,
            markup=False,
        )
        began = time.monotonic()
        facts = _Doing(run, data, out / "runs" / run.key, device, threads).facts()
        facts["seconds"] = time.monotonic() - began
        with (out / RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")
        shutil.rmtree(out / "runs" / run.key)
        console.print(_line(facts), highlight=False, markup=False)


def results(out: Path) -> Iterator[dict[str, Any]]:
    """The runs that are done, as they were written; a line that a kill tore is none."""
    path = out / RESULTS
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            continue


class _Doing:
    def __init__(self, run: Run, data: Mapping[SiloName, Path], work: Path, device: str, threads: int) -> None:
        self._run, self._data, self._work = run, data, work
        self._device, self._threads = device, threads

    def facts(self) -> dict[str, Any]:
        match SETUPS[self._run.setup].way:
            case "together":
                parts = [(self._data, self._simulated("plan", self._data))]
            case "alone":
                parts = [({silo: path}, self._simulated(silo, {silo: path})) for silo, path in self._data.items()]
            case "centralized":
                folder = merged(self._data, self._work / "merged" / ALL)
                parts = [(self._data, self._simulated("plan", {ALL: folder}))]
        by_silo: dict[str, dict[str, float]] = {}
        for silos, simulated in parts:
            by_silo |= scores(simulated, silos, device=self._device, threads=self._threads, work=self._work)
        return {
            "run": self._run.key,
            "study": self._run.study.name,
            "setup": self._run.setup,
            "seed": self._run.seed,
            "point": dict(self._run.point),
            "commit": commit(),
            "plans": [simulated.plan for _, simulated in parts],
            "test": by_silo,
            "macro_exact_match": sum(score["exact_match"] for score in by_silo.values()) / len(by_silo),
            "micro_exact_match": sum(score["exact_match"] * score["examples"] for score in by_silo.values())
            / sum(score["examples"] for score in by_silo.values()),
            "rounds": [[round_facts(row) for row in simulated.rows] for _, simulated in parts],
        }

    def _simulated(self, name: str, silos: Mapping[SiloName, Path]) -> Simulated:
        plans = self._work / "plans"
        if not (plans / name).exists():
            create_plan(
                plans,
                name=name,
                federation=_FEDERATION,
                source=_source(self._run.study),
                preset=self._run.study.preset,
                seed=self._run.seed,
                overrides={**self._run.values, "schedule.min_silos": len(silos)},
            )
        return simulate(plans / name, silos, self._work / f"of-{name}", device=self._device, threads=self._threads)


def _source(study: Study) -> ModelSource:
    start = study.start
    if start.folder:
        return FolderModel(Path(start.folder), start.added_tokens)
    return SizedModel(
        start.size, start.vocabulary or None, Path(start.tokenizer_text) if start.tokenizer_text else None
    )


def commit() -> str:
    """Of the code that runs, with a `+` where it was changed since; empty outside a repository."""
    git = shutil.which("git")
    if git is None:
        return ""
    try:
        done = subprocess.run(
            [git, "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _line(facts: Mapping[str, Any]) -> str:
    silos = ", ".join(f"{silo} {score['exact_match']:.1%}" for silo, score in facts["test"].items())
    return (
        f"  exact match on test: MacroAvg {facts['macro_exact_match']:.1%}, MicroAvg {facts['micro_exact_match']:.1%}; {silos}; "
        f"{facts['seconds']:.0f} s"
    )


def require_done(study: Study, out: Path) -> Sequence[dict[str, Any]]:
    """Results of this study alone; raises ConfigurationError where there is none."""
    wanted = {run.key for run in study.runs()}
    found = [line for line in results(out) if line["run"] in wanted]
    if not found:
        raise ConfigurationError(f"{out / RESULTS} has no run of study {study.name}: run it first")
    return found
