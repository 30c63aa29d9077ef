"""`lorica simulate` with silos that have no labels beside ones that have: together or in turn they train, the latter
alone are scored."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.silos import keep_first, write_silo
from lorica.simulation.forecast.dry_run import dry_run
from lorica.simulation.run import silos_in, simulate
from lorica_coordinator.service.records import RoundRow
from lorica_security.errors import StateError
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


IN_TURN = {
    **{key: value for key, value in OVERRIDES.items() if key != "semi_supervised.order"},
    "schedule.rounds": 2,
    "schedule.min_silos": 1,
    "aggregation.momentum": 0.0,
}


def test_rounds_in_turn_are_of_one_kind_and_go_on_where_a_simulation_was_cut_off(silos: Path, tmp_path: Path) -> None:
    make_plan(tmp_path, overrides=IN_TURN)
    plan = tmp_path / "plans" / "first"

    def cut(row: RoundRow) -> None:
        if row.round == 1:  # what ends after it is told on the way out
            raise KeyboardInterrupt

    whole = simulate(plan, silos_in(silos), tmp_path / "whole", device="cpu", threads=1)
    with pytest.raises(KeyboardInterrupt):
        simulate(plan, silos_in(silos), tmp_path / "cut", device="cpu", threads=1, on_round=cut)
    assert simulate(plan, silos_in(silos), tmp_path / "cut", device="cpu", threads=1).final == whole.final
    rows = [json.loads(line) for line in (tmp_path / "whole" / "rounds.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["outcome"] == "applied"]
    shown = [[name for name, silo in row["silos"].items() if silo["outcome"] == "committed"] for row in trained]
    assert shown == [["clinic"], ["ward-1"]]
    assert len({row["model"] for row in trained}) == 2, "each round moved it"
    assert all(row["micro_exact_match"] is not None for row in trained), "by the silo with labels"


def test_a_plan_for_which_a_kind_of_rounds_has_nobody_is_not_begun(silos: Path, tmp_path: Path) -> None:
    make_plan(tmp_path, overrides={**IN_TURN, "schedule.min_silos": 2})
    plan = tmp_path / "plans" / "first"
    with pytest.raises(StateError, match="min_silos = 2 for rounds of silos without labels, and 1 of 2 enrolled"):
        simulate(plan, silos_in(silos), tmp_path / "out", device="cpu", threads=1)


def test_masked_rounds_in_turn_are_of_groups_of_one_kind_each(silos: Path, tmp_path: Path) -> None:
    """Three silos with labels and three without, each kind a release group, and a closing round of those with scores.
    Every silo makes chunks of each model again before it trains from it."""
    names = [*(f"clinic-{n}" for n in range(3)), *(f"ward-{n}" for n in range(3))]
    for name in names:
        shutil.copytree(silos / "clinic", tmp_path / "six" / name)
        keep_first(tmp_path / "six" / name / "train.jsonl", 8)
    changes = {
        "schedule.min_silos": 3,
        "aggregation.secure_aggregation": True,
        "evaluation.every": 0,
        "evaluation.initial": False,
        "semi_supervised.teacher": "mlm",
        "semi_supervised.loss": "probabilities",
        "semi_supervised.min_labelled": 3,
    }
    make_plan(tmp_path, overrides={**IN_TURN, **changes})
    simulate(tmp_path / "plans" / "first", silos_in(tmp_path / "six"), tmp_path / "out", device="cpu", threads=1)
    rows = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    made = {row["round"]: row for row in rows if row["outcome"] in ("applied", "scored")}
    committed = {
        number: [name for name, silo in row["silos"].items() if silo["outcome"] == "committed"]
        for number, row in made.items()
    }
    assert committed == {1: names[:3], 2: names[3:], 3: names[:3]}
    assert [row["outcome"] for row in made.values()] == ["applied", "applied", "scored"]
    assert made[1]["model"] != made[2]["model"]
    assert made[2]["micro_exact_match"] is not None, "by the closing round's sum"
