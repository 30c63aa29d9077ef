"""The data of the study `ladder`: sizes, what is held out, and what the two controls change."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorica.demo.silos.uneven_silos import (
    EQUAL,
    MISLABELLED,
    SILOS,
    TEST,
    TRAIN,
    uneven_questions,
    write_uneven_silos,
)
from lorica.experiments.definition import SETUPS, Study
from lorica.experiments.reports.hostile_report import STUDIES
from lorica.simulation.run import silos_in
from lorica_coordinator.plans.plan_folder import require_valid
from tests.support.nearest_neighbour import nearest_neighbour_answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    write_uneven_silos(folder)
    return folder


def lines(folder: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def pairs(folder: Path, split: str) -> set[tuple[str, str]]:
    return {(line["question"], line["query"]) for line in lines(folder, split)}


def test_sizes_are_thirty_to_one_and_each_silo_has_many_held_out_questions(folder: Path) -> None:
    sizes = {name: len(lines(folder / "silos" / name, "train")) for name in TRAIN}
    assert sizes == TRAIN
    assert max(sizes.values()) == 30 * min(sizes.values())
    assert {len(lines(folder / "silos" / name, "test")) for name in TRAIN} == {TEST} == {200}
    assert {len(lines(folder / "equal" / name, "train")) for name in TRAIN} == {EQUAL}


def test_the_control_of_equal_sizes_asks_the_same_questions(folder: Path) -> None:
    for name in TRAIN:
        for split in ("dev", "test"):
            assert pairs(folder / "silos" / name, split) == pairs(folder / "equal" / name, split)


def test_the_mislabelled_silo_has_its_own_questions_with_other_sql_and_no_other_silo_is_changed(folder: Path) -> None:
    for name in TRAIN:
        honest, flipped = (lines(folder / of / name, "train") for of in ("silos", "mislabelled"))
        assert [line["question"] for line in honest] == [line["question"] for line in flipped]
        wrong = [a["query"] != b["query"] for a, b in zip(honest, flipped, strict=True)]
        assert (sum(wrong) > 0.95 * len(wrong)) if name == MISLABELLED else not any(wrong)
        assert pairs(folder / "silos" / name, "test") == pairs(folder / "mislabelled" / name, "test")


@pytest.mark.parametrize("name", ["ladder", "ladder-equal", "ladder-long", "ladder-mislabelled", "ladder-server"])
def test_the_studies_of_these_silos_have_plans_that_hold(folder: Path, name: str) -> None:
    study = Study.read(STUDIES / f"{name}.toml")
    assert set(silos_in(folder / study.silos)) == set(TRAIN)
    for run in list(study.runs())[: len(study.variants)]:
        together = SETUPS[run.setup].way == "together"
        overrides = {**run.values, "schedule.min_silos": len(TRAIN) if together else 1}
        require_valid(name="it", federation="study", preset="default", seed=1, overrides=overrides)


def test_no_silo_has_trained_on_a_held_out_sql_of_its_own_and_what_others_have_is_known() -> None:
    splits = {silo.name: uneven_questions(silo, TRAIN[silo.name], seed=1) for silo in SILOS}
    known = {
        (name, other): sum(record.query in {one.query for one in theirs.train} for record in own.test)
        for name, own in splits.items()
        for other, theirs in splits.items()
    }
    # Hospital and clinic both have patients with a city and an age: ops/docs/results.md names the number.
    assert {pair: count for pair, count in known.items() if count} == {
        ("clinic", "hospital"): 39,
        ("hospital", "clinic"): 2,
    }


def test_copying_the_nearest_training_question_scores_next_to_nothing() -> None:
    splits = {silo.name: uneven_questions(silo, TRAIN[silo.name], seed=1) for silo in SILOS}
    everybody = [record for each in splits.values() for record in each.train]
    asked = splits["clinic"].test[:40]
    answers = nearest_neighbour_answers(everybody, [record.question for record in asked])
    right = sum(answer == record.query for answer, record in zip(answers, asked, strict=True))
    assert 0 < right < 12, "the baseline answers, and what hospital knows is all that it has"
