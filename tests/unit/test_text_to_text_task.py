"""Text in, text out: its scores by hand and by the library's own definition, its lines, and what a plan may say of
it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU, CHRF

from lorica_security.errors import ConfigurationError, DataError
from silo_agent.edges.disk.answers_right import AnswersRight
from silo_agent.edges.personal.own_scores import Scored
from silo_agent.training.data.schema import Schema
from silo_agent.training.evaluation import whole
from silo_agent.training.tasks import similarity, text_task
from silo_agent.training.tasks.named import task_marked_by, task_of
from silo_agent.training.tasks.task import Task
from silo_agent.training.tasks.text_to_sql import TEXT_TO_SQL
from silo_agent.training.tasks.text_to_text import TEXT_TO_TEXT
from silo_agent.training.tasks.wikisql import WIKISQL
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.task import SCORE_LABELS, TaskSection
from tests.support.coordinator_edges import make_plan

NO_SCHEMA = Schema("text", "", ())
ANSWERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.lists(
    st.sampled_from(["the", "cat", "Cat,", "sat", "läuft", "猫", "42", "."]), max_size=8
).map(" ".join)


# --- scores


@pytest.mark.parametrize(
    ("answer", "reference", "f1", "rouge"),
    [
        ("the cat sat", "A cat sat down.", 2 * 2 / (2 + 3), 2 * 2 / (3 + 4)),
        ("the cat sat on the mat", "the cat is on the mat", 2 * 3 / (4 + 4), 2 * 5 / (6 + 6)),
        ("cat cat", "cat", 2 * 1 / (2 + 1), 2 * 1 / (2 + 1)),  # a word counts as often as the other has it
        ("b a", "a b", 1.0, 2 * 1 / (2 + 2)),  # order counts in one of them; "a" alone is an article
        ("", "cat", 0.0, 0.0),
        ("the", "an", 1.0, 0.0),  # nothing but articles
        ("Läuft 猫", "läuft 猫", 1.0, 1.0),
    ],
)
def test_words_by_hand(answer: str, reference: str, f1: float, rouge: float) -> None:
    assert similarity.token_f1(answer, reference) == pytest.approx(f1)
    assert similarity.rouge_l(answer, reference) == pytest.approx(rouge)


@given(ANSWERS, ANSWERS)
def test_every_score_is_a_share_and_a_whole_answer_is_all_of_it(answer: str, reference: str) -> None:
    for score in TEXT_TO_TEXT.right(answer, reference, NO_SCHEMA):
        assert 0.0 <= score <= 1.0
    assert similarity.exact_match(reference, f" {reference}\n") == 1.0
    assert similarity.token_f1(reference, reference) == 1.0
    if reference.split():
        assert similarity.chrf(reference, reference) == pytest.approx(1.0)
    assert similarity.token_f1(answer, reference) == similarity.token_f1(reference, answer)
    assert similarity.rouge_l(answer, reference) == similarity.rouge_l(reference, answer)


@given(ANSWERS, ANSWERS)
def test_chrf_and_bleu_are_those_of_a_corpus_of_one(answer: str, reference: str) -> None:
    assert similarity.chrf(answer, reference) == pytest.approx(
        CHRF().corpus_score([answer], [[reference]]).score / 100, abs=1e-9
    )
    assert similarity.bleu(answer, reference) == pytest.approx(
        BLEU(effective_order=True).corpus_score([answer], [[reference]]).score / 100, abs=1e-9
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_what_leaves_a_silo_is_a_whole_number_of_its_questions(scores: list[float]) -> None:
    told = whole(sum(scores))
    assert 0 <= told <= len(scores)
    assert abs(told - sum(scores)) <= 0.5 + 1e-9


def test_the_plans_score_is_the_one_that_leaves() -> None:
    for name in SCORE_LABELS:
        task = task_of(TaskSection(kind="text-to-text", score=name))
        assert task.metrics[0] == name
        assert sorted(task.metrics) == sorted(SCORE_LABELS)
        right = task.right("the cat sat", "a cat sat down on it", NO_SCHEMA)
        assert right[0] == getattr(similarity, name)("the cat sat", "a cat sat down on it")


@pytest.mark.parametrize("task", [TEXT_TO_TEXT, WIKISQL])
def test_a_silo_can_keep_what_it_counts_by_each_score(task: Task) -> None:
    right = dict.fromkeys(task.metrics, 1.0)
    assert AnswersRight(questions=2, right=right).right == right
    evaluation = Evaluation(
        split="dev", examples=2, exact_matches=1, executed=0, execution_matches=0, loss_per_token=1.0, seconds=1.0
    )
    scored = Scored.of(Digest("a" * 64), evaluation, right, method="finetune", goal=None)
    assert tuple(scored.right) == task.metrics[1:]


# --- a silo's lines


def written(folder: Path, **splits: list[Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return folder


def line(number: int, **more: Any) -> dict[str, Any]:
    return {"id": f"n{number}", "input": f"summarise note {number}", "target": f"note {number}", **more}


def test_lines_are_read(tmp_path: Path) -> None:
    folder = written(tmp_path / "d", train=[line(1, patient=7), line(2, patient="x")], dev=[line(3)], test=[line(4)])
    data = TEXT_TO_TEXT.data(folder)
    assert (data.task, data.database, data.labelled) == ("text-to-text", None, True)
    assert [(one.question, one.query) for one in data.train] == [
        ("summarise note 1", "note 1"),
        ("summarise note 2", "note 2"),
    ]
    assert [one.unit for one in TEXT_TO_TEXT.data(folder, unit_field="patient").train] == ["7", "x"]
    unread = TEXT_TO_TEXT.data(written(tmp_path / "u", train=[line(1, target=5)]), labelled=False)
    assert [one.query for one in unread.train] == [""]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"id": "n", "input": "a"}, "key target is missing"),
        ({"id": "n", "target": "a"}, "key input is missing"),
        ({"id": "n", "input": ["a"], "target": "b"}, "input is a list, expected text"),
        ({"id": "n", "input": "a", "target": "  "}, "target is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        TEXT_TO_TEXT.data(written(tmp_path / "d", train=[bad], dev=[line(1)]))


def test_a_folder_of_another_task_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "d", train=[line(1)], dev=[line(2)])
    (folder / "schema.json").write_text("{}")
    with pytest.raises(DataError, match="no database; give the folder of such lines"):
        TEXT_TO_TEXT.data(folder)


def test_what_is_not_installed_is_said_when_data_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_task, "find_spec", lambda name: None)
    with pytest.raises(
        DataError, match=r"needs sacrebleu, which is not installed: install Lorica's wheel with the extra text"
    ):
        TEXT_TO_TEXT.data(written(tmp_path / "d", train=[line(1)], dev=[line(2)]))


def test_lines_tell_their_task() -> None:
    assert task_marked_by({"id", "input", "target"}) is TEXT_TO_TEXT
    assert task_marked_by({"id", "input"}) is TEXT_TO_TEXT
    assert task_marked_by({"id", "question", "query", "db_id"}) is TEXT_TO_SQL
    assert task_marked_by({"id", "question", "header", "types", "sql"}) is WIKISQL


# --- a plan


@pytest.mark.parametrize("kind", ["sql", "wikisql"])
def test_a_score_in_parts_is_of_text_alone(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=r'score = "rouge_l" goes with kind = "text-to-text" alone'):
        make_plan(tmp_path, overrides={"task.kind": kind, "task.score": "rouge_l"})


def test_the_score_is_in_a_plans_digest_and_a_plan_without_one_keeps_its_own(tmp_path: Path) -> None:
    plans = {}
    for name, task in (("none", {}), ("text", {"kind": "text-to-text"}), ("rouge", {"score": "rouge_l"})):
        values = {**({"kind": "text-to-text"} if name == "rouge" else {}), **task}
        plans[name] = make_plan(tmp_path / name, overrides={f"task.{key}": value for key, value in values.items()}).plan
        assert Plan.from_json(plans[name].to_json()) == plans[name]
    assert "task" not in json.loads(plans["none"].to_json())
    assert json.loads(plans["text"].to_json())["task"] == {"kind": "text-to-text"}
    assert json.loads(plans["rouge"].to_json())["task"] == {"kind": "text-to-text", "score": "rouge_l"}
    assert len({plan.digest for plan in plans.values()}) == 3
