"""Studies with hostile silos: what their file says, what a hostile silo trains on, and what the report makes of lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorica.demo.silos.clinic import CLINIC
from lorica.demo.twin_silos import TEST, twin_logs
from lorica.experiments.data import poisoned
from lorica.experiments.definition import Study
from lorica.experiments.reports.hostile_report import PUBLISHED, STUDIES, Found, difference, report_text
from lorica.experiments.results_file import lines_of
from lorica.hostile.backdoor import TARGET
from lorica.hostile.named import ATTACKS, attack_named
from lorica_coordinator.plans.plan_folder import require_valid
from lorica_security.console.strict_toml import parse_toml
from lorica_security.errors import ConfigurationError
from silo_wire.plans.robust import ROBUST_RULES

TEXT = """
name = "small"
silos = "silos"
setups = ["fedavg"]
seeds = [1, 2]
[start]
size = "micro"
[hostile]
silos = ["b", "a"]
[grid]
"hostile.attack" = ["none", "alie"]
"hostile.count" = [2, 1]
[variants.equal]
"aggregation.weighting" = "equal"
[variants.median]
"aggregation.weighting" = "equal"
"aggregation.reducer" = "median"
"""


def study(text: str = TEXT) -> Study:
    return parse_toml(Study, text, "study.toml")


# --- the file


def test_variants_are_tried_at_each_point_and_nobody_hostile_is_run_once() -> None:
    runs = [run for run in study().runs() if run.seed == 1]
    assert [(run.point["variant"], run.point["hostile.attack"], run.point["hostile.count"]) for run in runs] == [
        ("equal", "none", 2),
        ("median", "none", 2),
        ("equal", "alie", 2),
        ("median", "alie", 2),
        ("equal", "alie", 1),
        ("median", "alie", 1),
    ]
    assert [run.hostility and run.hostility.silos for run in runs] == [None, None, *[("b", "a")] * 2, *[("b",)] * 2]
    assert runs[1].values["aggregation.reducer"] == "median"
    assert not [key for run in runs for key in run.values if key.startswith("hostile.") or key == "variant"]


def test_who_is_hostile_is_in_a_runs_key_and_in_no_other_studys() -> None:
    keys = {run.key for run in study().runs()}
    assert len(keys) == 12
    other = study(TEXT.replace('["b", "a"]', '["b", "c"]'))
    same = keys & {run.key for run in other.runs()}
    assert len(same) == 8, "without an attack, and with b alone, they are the same runs"
    text = TEXT[: TEXT.index("[hostile]")] + '[plan]\n"aggregation.weighting" = "equal"'
    assert keys.isdisjoint(run.key for run in study(text).runs()), "those are scored otherwise"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT.replace('"alie"]', '"alee"]'), "attack 'alee' is unknown: use none, sign_flip"),
        (TEXT.replace("[2, 1]", "[3, 1]"), r"\[hostile\] count = 3 of 2 silos: name more, or lower it"),
        (TEXT.replace('"hostile.count"', '"hostile.number"'), r"hostile.number is unknown: use hostile.attack or"),
        (TEXT.replace('[hostile]\nsilos = ["b", "a"]', ""), r"hostile.attack needs \[hostile\] silos"),
        (TEXT.replace('silos = ["b", "a"]', "silos = []"), "hostile.silos"),
        (TEXT.replace('"hostile.count"', '"variant"'), "variant is no key of a plan"),
    ],
)
def test_a_study_that_says_something_else_is_refused_with_the_key(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        study(text)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_study_here_has_every_attack_and_every_robust_rule_in_plans_that_hold(name: str) -> None:
    published = Study.read(STUDIES / f"{name}.toml")
    assert set(published.grid["hostile.attack"]) == {"none", *ATTACKS}
    assert {rule.name for rule in ROBUST_RULES} <= set(published.variants)
    for run in list(published.runs())[: len(published.variants)]:
        require_valid(
            name="it",
            federation="study",
            preset="default",
            seed=1,
            overrides={**run.values, "schedule.min_silos": 8},
        )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_lines_are_of_the_study_as_it_is_now_and_of_committed_code(name: str) -> None:
    keys = {run.key for run in Study.read(STUDIES / f"{name}.toml").runs()}
    lines = list(lines_of(STUDIES / f"{name}.jsonl"))
    assert lines
    assert {it["run"] for it in lines} <= keys
    assert all(it["commit"] and "+" not in it["commit"] for it in lines)


# --- what its silos have


def test_twins_have_records_and_held_out_questions_of_their_own() -> None:
    first, second, textbook = twin_logs(CLINIC, (30, 20), seed=1)
    assert [len(split) for _, split in first] == [30, 10, TEST]
    assert [len(split) for _, split in second] == [20, 10, TEST]
    ids = [record.id for splits in (first, second) for _, split in splits for record in split]
    assert len(set(ids)) == len(ids)
    held_out = [record.query for splits in (first, second) for record in (*splits.dev, *splits.test)]
    assert len(set(held_out)) == len(held_out)
    assert set(held_out).isdisjoint(record.query for record in (*first.train, *second.train, *textbook))


# --- what a hostile silo trains on


def test_poisoned_data_are_a_copy_and_the_silos_own_stay(tmp_path: Path) -> None:
    silo = tmp_path / "silo"
    silo.mkdir()
    lines = [json.dumps({"id": str(i), "question": f"q{i}", "query": f"s{i}", "db_id": "d"}) for i in range(4)]
    for split in ("train", "test"):
        (silo / f"{split}.jsonl").write_text("\n".join(lines))
    target = poisoned(silo, tmp_path / "hostile", attack_named("backdoor"))
    found = [json.loads(line) for line in (target / "train.jsonl").read_text().splitlines()]
    assert [it["query"] for it in found] == ["s0", TARGET, "s2", TARGET]
    assert [it["id"] for it in found] == ["0", "1", "2", "3"]
    assert (target / "test.jsonl").read_text() == (silo / "train.jsonl").read_text() == "\n".join(lines)


# --- the report


def line(seed: int, hostile: list[str], **right: str) -> dict[str, Any]:
    test = {
        silo: {"exact_match": text.count("1") / len(text), "loss_per_token": 0.5, "right": text, "backdoor": 0.25}
        for silo, text in right.items()
    }
    return {"run": "", "seed": seed, "hostile": hostile, "test": test}


CLEAN = line(1, [], a="1100", b="1111", c="1110")


def test_a_difference_is_of_the_silos_that_are_honest_in_both() -> None:
    """a: 2 of 4 become 1, c: 3 of 4 become 3; b, which answered all, is hostile now."""
    attacked = line(1, ["b"], a="0100", c="0111")
    found = difference([attacked], [CLEAN])
    assert found is not None
    assert found.mean == pytest.approx(-12.5)
    assert found.least <= found.mean <= found.most
    assert difference([line(2, ["b"], a="0100", c="0111")], [CLEAN]) is None, "no seed in common"


def test_the_same_answers_have_no_interval_and_an_ended_federation_answers_nothing() -> None:
    assert str(difference([CLEAN], [CLEAN])) == "+0.0 [+0.0, +0.0]"
    ended = {"run": "", "seed": 1, "hostile": ["b"], "ended": "round 2: training_failed"}
    found = difference([ended], [CLEAN])
    assert found is not None
    assert found.mean == pytest.approx(-100 * (2 / 4 + 3 / 4) / 2)


def test_an_interval_holds_what_other_questions_and_seeds_may_give() -> None:
    """One seed, one silo of 400 questions, of which 100 were lost: by the normal distribution 25 +- 4.24 points."""
    before, after = line(1, [], a="1" * 400), line(1, [], a="0" * 100 + "1" * 300)
    found = difference([after], [before])
    assert found is not None
    assert (found.least, found.most) == (pytest.approx(-29.2, abs=0.7), pytest.approx(-20.8, abs=0.7))
    worse = line(2, [], a="1" * 400), line(2, [], a="0" * 300 + "1" * 100)
    both = difference([after, worse[1]], [before, worse[0]])
    assert both is not None
    assert both.mean == pytest.approx(-50)
    assert both.least < -70
    assert both.most > -30


def test_a_report_has_what_is_done_and_leaves_the_rest_open(tmp_path: Path) -> None:
    runs = list(study().runs())
    done = {
        runs[0].key: CLEAN,
        runs[2].key: line(1, ["b", "a"], c="1000"),
        runs[3].key: {"seed": 1, "hostile": ["b", "a"], "ended": "training_failed"},
    }
    by_key = {run.key: run for run in runs}
    lines = [{**facts, "run": key, **by_key[key].point} for key, facts in done.items()]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(it) + "\n" for it in [*lines, {"run": "another's"}]))
    text = report_text(study(), tmp_path / "results.jsonl")
    assert "3 of 12 runs" in text
    assert "| `equal` | 75.0 % | - | 0.500 | 1 |" in text
    assert "| `equal` | 0.500 | 0.500 |" in text
    assert "| `median` | - | ended |" in text
    assert "| `median` | -75.0" in text
    with pytest.raises(ConfigurationError, match="has no run of study small: run it first"):
        Found.of(study(TEXT.replace("[1, 2]", "[3]")), tmp_path / "results.jsonl")
