"""`lorica simulate` with silos that have no labels beside ones that have: all train, the latter alone are scored."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.silos import keep_first, write_silo
from lorica.simulation.forecast.dry_run import dry_run
from lorica.simulation.run import silos_in, simulate
from tests.support.coordinator_edges import make_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OVERRIDES: dict[str, Any] = {
    "schedule.rounds": 2,
    "schedule.min_silos": 2,
    "evaluation.every": 1,
    "evaluation.max_examples": 8,
    "training.max_output_tokens": 16,
    "aggregation.weighting": "equal",
    "semi_supervised.unlabelled": ["ward-*"],
    "semi_supervised.order": "together",
    "semi_supervised.loss": "answer",
}


@pytest.fixture
def silos(tmp_path: Path) -> Path:
    folder = tmp_path / "silos"
    for name, specification in (("clinic", CLINIC), ("ward-1", INSURER)):
        write_silo(folder / name, specification, seed=3)
        keep_first(folder / name / "train.jsonl", 32)
    ward = folder / "ward-1"
    lines = [json.loads(line) for line in (ward / "train.jsonl").read_text().splitlines()]
    (ward / "train.jsonl").write_text("".join(json.dumps({**line, "query": 0}) + "\n" for line in lines))
    (ward / "dev.jsonl").unlink()
    return folder


def test_silos_without_labels_train_and_are_not_scored(silos: Path, tmp_path: Path) -> None:
    make_plan(tmp_path, overrides=OVERRIDES)
    plan = tmp_path / "plans" / "first"
    simulated = simulate(plan, silos_in(silos), tmp_path / "out", device="cpu", threads=1)
    rows = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["outcome"] == "applied"]
    assert [sorted(row["silos"]) for row in trained] == [["clinic", "ward-1"]] * 2
    for row in trained:
        assert {silo["outcome"] for silo in row["silos"].values()} == {"committed"}, "neither fails, in either round"
        assert row["micro_exact_match"] is not None, "one silo's scores are enough"
        assert ["dev_examples" in row["silos"][silo] for silo in ("clinic", "ward-1")] == [True, False]
    assert simulated.best is not None
    told = dry_run(plan, silos_in(silos), tmp_path / "dry", device="cpu", threads=1)
    told.require_no_problem()
