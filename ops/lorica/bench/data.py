"""`lorica bench-data`: reading, tokenising and training on a silo's lines, from a spool and from memory, at several
sizes.

Each figure is of a process of its own. "memory" is as it was before there were spools: every line and every token id
an object in memory.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from rich.console import Console
from rich.table import Table

from lorica.bench.figures import write_figures
from lorica.bench.run import empty_folder
from lorica.memory_readings import memory_bytes
from lorica_security.console.terminal import show_table
from lorica_security.errors import StateError

Way = Literal["spool", "memory"]
WAYS: Final[Sequence[Way]] = ("spool", "memory")
_WORDS: Final = "how,many,patients,over,sixty,are,there,in,each,ward,of,the,city,with,more,than,two".split(",")  # noqa: SIM905
_SCHEMA: Final = {
    "db_id": "bench",
    "source": "bench",
    "tables": [
        {
            "name": "ward",
            "columns": [{"name": "beds", "sql_type": "int", "type": "number", "primary_key": False}],
        }
    ],
}
_CHILD: Final = "import sys; from lorica.bench.data import main; main(sys.argv[1])"
_NOT_COUNTED: Final = 2
"""Steps, which warm up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`lines` of about `characters` each; `steps` are timed, of a model of `size`."""

    lines: Sequence[int]
    characters: int
    steps: int
    size: str
    work: Path
    out: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Seconds, and bytes beyond the interpreter with its imports and the model; `step_s` is a median.

    `data_peak_bytes` is the peak until the first step, `peak_bytes` with the steps, whose batches take memory too.
    """

    way: Way
    lines: int
    data_bytes: int
    read_s: float
    tokenise_s: float
    step_s: float
    data_peak_bytes: int
    peak_bytes: int


def run_bench_data(choice: Choice, console: Console) -> list[Figures]:
    """Print and write each size as it is done. Raises StorageError, StateError for a process that failed."""
    results: list[Figures] = []
    for lines in choice.lines:
        place = empty_folder(choice.work, "data", needed=6 * lines * choice.characters)
        try:
            _write(place, lines, choice.characters)
            _write(place / "few", 64, choice.characters)
            for way in WAYS:
                with console.status(f"{lines:,} lines, {way}"):
                    results.append(_measured(place, way, lines, choice))
        finally:
            shutil.rmtree(place)
        write_figures(choice.out, [asdict(one) for one in results])
    show_table(console, table_of(results))
    return results


def table_of(results: Sequence[Figures]) -> Table:
    table = Table(title="beyond imports and model", title_style="dim")
    for column in ("way", "lines", "data MB", "read s", "tokenise s", "ms a step", "peak MB", "with steps"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for one in results:
        table.add_row(
            one.way,
            f"{one.lines:,}",
            f"{one.data_bytes / 1e6:,.0f}",
            f"{one.read_s:.1f}",
            f"{one.tokenise_s:.1f}",
            f"{one.step_s * 1e3:.1f}",
            f"{one.data_peak_bytes / 1e6:,.0f}",
            f"{one.peak_bytes / 1e6:,.0f}",
        )
    return table


def _write(folder: Path, lines: int, characters: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "schema.json").write_text(json.dumps(_SCHEMA), encoding="utf-8")
    for split, numbers in (("train", range(lines)), ("dev", range(lines, lines + 10))):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(_line(number, characters // 5) for number in numbers)


def _line(number: int, words: int) -> str:
    question = [_WORDS[(number + place * (1 + number % 13)) % len(_WORDS)] for place in range(words)]
    line = {"id": str(number), "question": " ".join(question), "query": " ".join(question[:8]), "db_id": "bench"}
    return json.dumps(line) + "\n"


def _measured(place: Path, way: Way, lines: int, choice: Choice) -> Figures:
    order = {"folder": str(place), "way": way, "steps": choice.steps, "size": choice.size}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(order)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise StateError(f"measuring {way} failed: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Figures(way=way, lines=lines, data_bytes=(place / "train.jsonl").stat().st_size, **found)


def main(order: str) -> None:
    """What a process of its own does: one figure on standard output."""
    from lorica.simulation.model_files import round_file
    from lorica_coordinator.edges.models.model_store import ModelStore
    from lorica_coordinator.plans.model_source import SizedModel
    from lorica_coordinator.plans.plan_folder import create_plan
    from lorica_coordinator.vectors.model_file import MODEL_FILE
    from silo_agent.rounds.update import TrainingStopped
    from silo_agent.training.data.spool import SpoolPlace
    from silo_agent.training.data.text_to_sql_data import DataLimits, load_silo_data
    from silo_agent.training.device import DeviceSettings
    from silo_agent.training.silo_trainer import SiloTrainer

    asked = json.loads(order)
    folder, steps = Path(asked["folder"]), int(asked["steps"]) + _NOT_COUNTED
    work = folder / asked["way"]
    bundle = create_plan(
        work / "plans",
        name="bench",
        federation="bench",
        source=SizedModel(asked["size"]),
        overrides={"schedule.min_silos": 1, "training.loss_reduction": "logged", "training.max_input_tokens": 256},
    )
    models = ModelStore(
        work / "models",
        layout=bundle.layout,
        model_layout=bundle.model_layout,
        initial=bundle.plan.initial_model,
        initial_file=work / "plans" / "bench" / MODEL_FILE,
    )
    model = round_file(models, models.initial(), work / "model")
    settings = DeviceSettings(device="cpu", threads=1)
    ends: list[float] = []

    def train(trainer: SiloTrainer) -> None:
        ends.append(time.perf_counter())
        try:
            trainer.train(
                round_number=1,
                model_path=model.file,
                model=model.manifest,
                update_path=work / "update",
                on_progress=lambda fraction, loss: ends.append(time.perf_counter()),
                should_stop=lambda: len(ends) > steps,
            )
        except TrainingStopped:
            return

    # A few lines first, so that the model and what libraries take are there before memory is counted.
    train(SiloTrainer(bundle, load_silo_data(folder / "few"), "silo", settings))
    ends.clear()
    before = memory_bytes(os.getpid())[0]
    began = time.perf_counter()
    data = load_silo_data(folder, DataLimits(spool=SpoolPlace(work / "spool")))
    if asked["way"] == "memory":
        data = replace(data, train=tuple(data.train))
    read = time.perf_counter()
    trainer = SiloTrainer(bundle, data, "silo", settings)
    made = trainer.encoded("train")
    if asked["way"] == "memory":
        trainer._encoded["train"] = replace(made, inputs=tuple(made.inputs), targets=tuple(made.targets))
    tokenised, data_peak = time.perf_counter(), memory_bytes(os.getpid())[1]
    train(trainer)
    took = [end - begin for begin, end in pairwise(ends)][_NOT_COUNTED:]
    figures = {
        "read_s": read - began,
        "tokenise_s": tokenised - read,
        "step_s": statistics.median(took),
        "data_peak_bytes": data_peak - before,
        "peak_bytes": memory_bytes(os.getpid())[1] - before,
    }
    print(json.dumps(figures))
