"""A federation whose silos have inputs and targets: it learns, and the score that its plan names chooses the model."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorica.simulation.run import silos_in, simulate
from tests.support.coordinator_edges import make_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = ("fever", "cough", "rash", "pain")
PLACES = ("leeds", "york")


def lines(split: str, count: int) -> Iterator[str]:
    for number in range(count):
        word, place = WORDS[number % len(WORDS)], PLACES[number % len(PLACES)]
        last = "today" if split.endswith("train") else "tonight"  # so that no held-out answer is right as a whole
        note = {"id": f"{split}-{number}", "input": f"note of {word} in {place}", "target": f"{word} at {place} {last}"}
        yield f"{json.dumps(note)}\n"


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("silos")
    for name in ("clinic", "ward"):
        (folder / name).mkdir()
        for split, count in (("train", 32), ("dev", 8), ("test", 8)):
            (folder / name / f"{split}.jsonl").write_text("".join(lines(f"{name}-{split}", count)))
    return folder


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_the_score_of_the_plan_is_told_and_chooses(silos: Path, tmp_path: Path, masked: bool) -> None:
    if masked:
        (silos / "third").mkdir(exist_ok=True)
        for split in ("train", "dev", "test"):
            text = (silos / "ward" / f"{split}.jsonl").read_text().replace("ward-", "third-")
            (silos / "third" / f"{split}.jsonl").write_text(text)
    chosen = {name: path for name, path in silos_in(silos).items() if masked or name != "third"}
    make_plan(
        tmp_path,
        overrides={
            "task.kind": "text-to-text",
            "task.score": "token_f1",
            "schedule.rounds": 4,
            "schedule.min_silos": len(chosen),
            "evaluation.every": 2,
            "training.epochs": 6,
            "training.batch_size": 8,
            "training.learning_rate": 5e-3,
            "training.dropout": 0.0,
            "training.max_output_tokens": 24,
            "aggregation.weighting": "equal",
            "aggregation.secure_aggregation": masked,
        },
    )
    simulated = simulate(tmp_path / "plans" / "first", chosen, tmp_path / "out", device="cpu", threads=1)
    rows = [row for row in simulated.rows if row.micro_exact_match is not None]
    assert rows, "it was scored"
    assert simulated.best is not None
    best = max(rows, key=lambda row: row.micro_exact_match or 0.0)
    assert best.micro_exact_match is not None
    # "fever at york today" for "fever at leeds tonight" has half of its words right, and is no exact match.
    assert best.micro_exact_match > 0.3
