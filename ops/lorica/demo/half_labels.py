"""The demo with labels hidden at two of its four silos: branches of the bank and the insurer, whose people ask as those
of the main house do, and where nobody writes SQL. `[semi_supervised]` has them learn from a teacher.

What that is worth is seen beside the same plan without the branches, which is simulated.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from lorica.demo.plan import SIZE, set_arguments
from lorica.demo.scoring import Score, Scores, score_simulated
from lorica.demo.silos.bank import BANK
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.query_log import DEV, query_log
from lorica.demo.silos.silos import Record, Splits, write_silo
from lorica.demo.warm_start import write_textbook_start
from lorica.simulation.run import silos_in, simulate
from lorica_coordinator.commands.plan_commands import assignments
from lorica_coordinator.plans.model_source import FolderModel
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_security.console.terminal import show_table
from lorica_security.errors import ConfigurationError

HALF: Final = "half"
LABELLED: Final = (BANK.name, INSURER.name)
BRANCHES: Final = tuple(f"{name}-branch" for name in LABELLED)
NAMES: Final = (*LABELLED, *BRANCHES)
PAIRS: Final = 8
"""Of rounds: one of the silos with labels, and one of the branches."""
_NAMED: Final = "semi_supervised.unlabelled"
_COUNTED: Final = ("schedule.rounds", "evaluation.every")
"""In rounds."""
_QUESTIONS: Final = {"labelled": 200, "branch": 400}
_DEV: Final = 40
_TEST: Final = 70

_TRAINING: Mapping[str, object] = {
    "schedule.start_when_ready": True,
    "aggregation.weighting": "equal",
    "aggregation.reduction_memory": 0.0,
    "aggregation.momentum": 0.0,
    "training.epochs": 3,
    "training.batch_size": 16,
    "training.learning_rate": 2.5e-3,
    "training.dropout": 0.0,
    "training.schema_in_input": False,
    "training.max_input_tokens": 64,
    "training.max_output_tokens": 64,
    "evaluation.batch_size": 64,
    "evaluation.initial": False,
    _NAMED: list(BRANCHES),
}
_TEACHER: Mapping[str, object] = {
    "schedule.rounds": 2 * PAIRS,
    "schedule.min_silos": len(BRANCHES),
    "evaluation.every": 2,  # as many models to choose from as without the branches
    "semi_supervised.min_labelled": len(LABELLED),
    "semi_supervised.loss": "answer",
    "semi_supervised.min_confidence": 0.95,
    "semi_supervised.student_dropout": 0.0,
    # What a teacher says is a small correction: it is passed over once, in small steps.
    **{f"training.overrides.{name}.epochs": 1 for name in BRANCHES},
    **{f"training.overrides.{name}.learning_rate": 5e-4 for name in BRANCHES},
}
_WITHOUT: Mapping[str, object] = {
    "schedule.rounds": PAIRS,
    "schedule.min_silos": len(LABELLED),
    "evaluation.every": 1,
    "semi_supervised.teacher": "none",
}


def overrides(*, teacher: bool) -> Mapping[str, object]:
    """What the plan says otherwise than the preset: with branches that learn, or without them."""
    return {**_TRAINING, **(_TEACHER if teacher else _WITHOUT)}


def plan_arguments(model: Path) -> Sequence[str]:
    """Of `coordinator plan new`, from the public `model`."""
    told = {**overrides(teacher=True), _NAMED: json.dumps(BRANCHES)}
    return ("--model", str(model), *set_arguments(told))


def require_sound(labels: str, *, secure: bool, private: bool) -> None:
    """Raises ConfigurationError for a share of labels that there is not, and for what silos without do not go with."""
    if labels != HALF:
        raise ConfigurationError(f'labels {labels!r} is no share that the demo has: take "{HALF}", or leave LABELS out')
    if secure:
        raise ConfigurationError(
            f"labels at half of the silos do not go with secure aggregation here: {len(LABELLED)} silos with labels "
            "train alone in their rounds, and masks take 3; leave SECURE or LABELS out"
        )
    if private:
        raise ConfigurationError(
            "labels at half of the silos do not go with record-level privacy, whose training takes no questions "
            "without answers yet: leave DP or LABELS out"
        )


def write_half_labelled(silos: Path, kept: Path, warm_start: Path, *, seed: int) -> None:
    """The four silos below `silos`, a public model of the textbooks on their tables, and in `kept` what the branches do
    not have: their answers, by which the demo judges in the end."""
    write_textbook_start(warm_start, write_silos(silos, kept, seed=seed), size=SIZE, seed=seed)


def write_silos(silos: Path, kept: Path, *, seed: int) -> Sequence[Record]:
    """As `write_half_labelled`, but for the model: the textbooks."""
    textbook: list[Record] = []
    for silo in (BANK, INSURER):
        of_branch = f"{silo.name}-branch"
        labelled = _QUESTIONS["labelled"]
        made = query_log(silo, records=sum(_QUESTIONS.values()), seed=seed, test=_DEV - DEV + 2 * _TEST)
        train, held_out = made.log.train, made.log.dev + made.log.test
        dev, test = held_out[:_DEV], held_out[_DEV:]
        write_silo(silos / silo.name, silo, seed=seed, splits=Splits(train[:labelled], dev, test[:_TEST]))
        write_silo(kept / of_branch, silo, seed=seed, splits=Splits(train[labelled:], dev, test[_TEST:]))
        shutil.copytree(kept / of_branch, silos / of_branch)
        _hide_labels(silos / of_branch)
        textbook += made.textbook
    return textbook


def _hide_labels(folder: Path) -> None:
    (folder / "dev.jsonl").unlink()
    for split in ("train", "test"):
        file = folder / f"{split}.jsonl"
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        kept = ({key: value for key, value in line.items() if key != "query"} for line in lines)
        file.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")


def judged_on(silos: Path, kept: Path) -> Mapping[str, Path]:
    """By silo, the folder that has the answers to its held-out questions."""
    return {name: (kept if name in BRANCHES else silos) / name for name in NAMES}


def without_branches(
    work: Path, silos: Path, warm_start: Path, data: Mapping[str, Path], *, seed: int, values: Sequence[str] = ()
) -> Scores:
    """What the same plan comes to, simulated in `work`, where the branches train in no round. `values` are the user's
    KEY=VALUE of the plan with branches."""
    create_plan(
        work / "plans",
        name="without",
        federation="demo",
        source=FolderModel(warm_start),
        seed=seed,
        overrides={**overrides(teacher=False), **_of_half_the_rounds(assignments(values))},
    )
    simulated = simulate(work / "plans" / "without", silos_in(silos), work / "run", device="cpu", threads=1)
    return score_simulated(simulated, data)


def _of_half_the_rounds(values: Mapping[str, object]) -> Mapping[str, object]:
    """The user's values where every second round is left out, and the teacher with it."""
    kept = {key: value for key, value in values.items() if not key.startswith("semi_supervised.")}
    counted = {key: -(-count // 2) for key in _COUNTED if isinstance(count := kept.get(key), int)}
    return {key: value for key, value in kept.items() if key != "schedule.min_silos"} | counted


def show(console: Console, after: Mapping[str, Score], without: Mapping[str, Score]) -> None:
    table = Table(
        title="held-out questions that are answered exactly, after as many rounds on labels", title_style="dim"
    )
    for column in ("silo", "labels", "branches left out", "branches learn from a teacher"):
        table.add_column(column, justify="left" if column in ("silo", "labels") else "right")
    for name in NAMES:
        labels = "none" if name in BRANCHES else "all"
        table.add_row(name, labels, f"{without[name].exact_match:.1%}", f"{after[name].exact_match:.1%}")
    means = (f"{mean(without):.1%}", f"{mean(after):.1%}")
    table.add_row("MacroAvg", "", *means, style="bold")
    show_table(console, table)
    questions = sum(score.questions for score in after.values())
    console.print(f"Of {questions} questions and one run: a few points more or less may be chance.", highlight=False)


def mean(scores: Mapping[str, Score]) -> float:
    """Exact match, each silo counting the same."""
    return sum(score.exact_match for score in scores.values()) / len(scores)


TOLD: Final = (
    f"{' and '.join(BRANCHES)} have no labels: nobody there writes SQL, and none is in their files. They learn from a "
    "teacher, an average of the model that they train, which answers their own questions. Rounds take turns: "
    f"{' and '.join(LABELLED)} train on their labels, then the branches on what came of it."
)
