"""The model that a study begins with, made once and used by all its runs; and the practice that stands in for T5's
pre-training.

A start without training keeps the practice's tokenizer, so that a study from scratch and one from a warm start differ
in the parameters alone.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rich.console import Console

from lorica.experiments.data import lower_sql
from lorica.experiments.definition import PracticeSection, StartSection
from lorica.experiments.practice import random_schemas, random_tables, wikisql
from lorica.experiments.practice.random_schemas import Pair
from lorica.warm_start import write_warm_start
from lorica_coordinator.plans.model_source import FolderModel, ModelSource, SizedModel
from lorica_security.host import files
from silo_agent.training.data.serialisation import model_input
from silo_agent.training.data.text_to_sql_data import SiloData
from silo_agent.training.device import DeviceSettings
from silo_agent.training.tasks.named import task_named
from silo_wire.canonical import canonical_json, digest_of

TOKENIZER_PAIRS = 8000
"""More teach a tokenizer nothing, and take minutes."""


def start(
    section: StartSection, data: Path, out: Path, device: DeviceSettings, console: Console, *, lower_case: bool = False
) -> ModelSource:
    """What the runs' plans are made from; trained here if it is to be and is not in `out` yet. With `lower_case` the
    practice's SQL is, outside quotes."""
    if section.folder:
        return FolderModel(data / section.folder, section.added_tokens)
    practice, vocabulary = section.practice, section.vocabulary or None
    if practice is None:
        return SizedModel(section.size, vocabulary)
    name = _name(section) + ("-lower" if lower_case else "")
    text = out / f"practice-{name}.txt"
    if not text.exists():
        out.mkdir(parents=True, exist_ok=True)
        files.replace(text, "".join(_text(practice, data, lower_case=lower_case)).encode())
    source = SizedModel(section.size, vocabulary, text)
    if not practice.warms_up:
        return source
    first = _practised(
        practice, source, out / f"start-{name}", _pairs(practice, data, lower_case=lower_case), device, console
    )
    if not practice.strange:
        return first
    strange = random_tables.pairs(practice.strange, seed=practice.seed, strange=True)
    return _practised(practice, first, out / f"start-{name}-{practice.strange}", strange, device, console)


def _name(section: StartSection) -> str:
    """Of the first part. What this file has learnt since leaves the names of earlier starts alone."""
    said = section.model_dump()
    del said["practice"]["strange"]
    if said["practice"]["task"] == "sql":
        del said["practice"]["task"]
    return digest_of(canonical_json(said))[:12]


def _practised(
    practice: PracticeSection,
    source: ModelSource,
    folder: Path,
    pairs: Iterator[Pair],
    device: DeviceSettings,
    console: Console,
) -> FolderModel:
    if not folder.exists():
        console.print(f"warming up a model, once for all runs: {folder.name}", highlight=False)
        with console.status("") as status:
            write_warm_start(
                folder,
                source,
                _as_data(pairs, practice.task),
                {"task.kind": practice.task, **{f"training.{key}": value for key, value in practice.training.items()}},
                seed=practice.seed,
                device=device,
                on_progress=lambda done, loss: status.update(f"{done:.0%}, loss {loss:.3f}"),
            )
    return FolderModel(folder)


def _pairs(
    practice: PracticeSection, data: Path, most: int | None = None, *, lower_case: bool = False
) -> Iterator[Pair]:
    count = practice.pairs if most is None else min(practice.pairs, most)
    if practice.task == "wikisql":
        return random_tables.pairs(count, seed=practice.seed)
    questions = wikisql.pairs(data / practice.wikisql) if practice.wikisql else iter(())
    found = chain(questions, random_schemas.pairs(count, seed=practice.seed))
    return (replace(pair, query=lower_sql(pair.query)) for pair in found) if lower_case else found


def _text(practice: PracticeSection, data: Path, *, lower_case: bool) -> Iterator[str]:
    shown = task_named(practice.task).shown
    for pair in _pairs(practice, data, TOKENIZER_PAIRS, lower_case=lower_case):
        for line in (model_input(pair.question, shown(pair.schema)), pair.query):
            yield f"{' '.join(line.split())}\n"


def _as_data(pairs: Iterator[Pair], task: str) -> SiloData:
    examples, schemas = [], []
    for pair in pairs:
        examples.append(pair.example)
        schemas.append(pair.schema)
    return SiloData(
        train=tuple(examples),
        dev=(),
        test=(),
        schema=schemas[0],
        further_schemas=tuple(schemas[1:]),
        database=None,
        bad_lines=(),
        task=task,
    )
