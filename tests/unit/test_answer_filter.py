"""Answers that a silo without labels tries on its own database: in the real sandbox, within its time, and where its
people allow it alone."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.tiny_t5 import random_model
from unit.test_semi_supervised_training import plan, questions, section, trained, written

from lorica_security.errors import ConfigurationError, DataError, PolicyRefusal, UnsafeSql
from lorica_security.identifiers import SiloName
from silo_agent.edges.workshop.answers_tried import answers_tried
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.edges.workshop.workshop import Workshop
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.rounds.update import TrainingDiverged, TrainingStopped
from silo_agent.settings import Settings
from silo_agent.sql_sandbox import Limits, QueryFailed, Rows, Sandbox, SqliteTarget
from silo_agent.training.data.text_to_sql_data import load_silo_data
from silo_agent.training.generation import generated
from silo_agent.training.semi_supervised.answer_filter import AnswerFilter
from silo_agent.training.semi_supervised.consistency import Consistency
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.sections.training import TrainingSection

LAB = SiloName("lab")
ALLOWED = PolicyRules(database_in_training=True)
COUNT = "SELECT count(*) FROM people"
PARIS = "SELECT name FROM people WHERE city = 'paris'"
NOBODY = "SELECT name FROM people WHERE city = 'rome'"
NO_TABLE = "SELECT name FROM persons"
NO_END = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT i FROM n"
OVERFLOWS_WHERE = (
    "SELECT CASE WHEN EXISTS (SELECT 1 FROM people WHERE name = '{}') THEN abs(-9223372036854775807 - 1) END"
)


def make_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE people (name TEXT, city TEXT)")
        connection.executemany(
            "INSERT INTO people VALUES (?, ?)", [("ada", "paris"), ("bob", "paris"), ("eve", "oslo")]
        )
        connection.commit()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("database") / "db.sqlite"
    make_database(path)
    return path


@pytest.fixture(scope="module")
def box(database: Path) -> Iterator[Sandbox]:
    with Sandbox(SqliteTarget(database), Limits(seconds=5.0)) as opened:
        yield opened


def go_on() -> bool:
    return False


def sieve(box: Any, kind: str, **more: Any) -> AnswerFilter:
    usual: dict[str, Any] = {"prepares": False, "question_seconds": 5.0, "round_seconds": 60.0, "clock": lambda: 0.0}
    return AnswerFilter(box, filter=kind, **{**usual, **more})


# --- which answers count


@pytest.mark.parametrize(
    ("sql", "runs", "has_rows"),
    [
        (COUNT, True, True),
        (PARIS, True, True),
        (NOBODY, True, False),
        (NO_TABLE, False, False),
        ("", False, False),
        ("people in paris", False, False),
        ("DELETE FROM people", False, False),
        (f"{COUNT}; {COUNT}", False, False),
        ("SELECT load_extension('/x')", False, False),
        ("\ud800", False, False),
    ],
)
def test_an_answer_counts_by_what_the_database_says_of_it(box: Sandbox, sql: str, runs: bool, has_rows: bool) -> None:
    by_filter = {"executes": runs, "nonempty": has_rows, "agrees": has_rows}
    for kind, counts in by_filter.items():
        asked = sieve(box, kind)
        assert asked.counts_answer([sql] * (3 if kind == "agrees" else 1), go_on) is counts
        assert asked.counts == {"kept" if counts else "dropped": 1}
    assert sieve(box, "executes", prepares=True).counts_answer([sql], go_on) is runs


AGREEING = [PARIS, f"{PARIS} ORDER BY name DESC", "SELECT name FROM people WHERE city <> 'oslo'"]
OTHER = ["SELECT name FROM people", NO_TABLE, NOBODY, "nonsense", COUNT]


@given(st.lists(st.sampled_from([*AGREEING, *OTHER]), min_size=2, max_size=6))
@settings(max_examples=25, deadline=None)
def test_samples_agree_where_more_than_half_give_the_rows_of_the_first(box: Sandbox, more: list[str]) -> None:
    samples = [PARIS, *more]
    expected = sum(sql in AGREEING for sql in samples) > len(samples) / 2
    assert sieve(box, "agrees").counts_answer(samples, go_on) is expected


def test_what_agrees_on_no_rows_says_nothing(box: Sandbox) -> None:
    assert not sieve(box, "agrees").counts_answer([NOBODY] * 5, go_on)


# --- what a filter tells of rows


@pytest.mark.parametrize("name", ["ada", "nobody"])
def test_attack_an_answer_that_fails_where_a_record_is_there(box: Sandbox, name: str) -> None:
    """Whoever chooses the model sees by what counted whether somebody is in the database: unless nothing runs."""
    asked = OVERFLOWS_WHERE.format(name)
    assert sieve(box, "executes").counts_answer([asked], go_on) is (name == "nobody")
    assert sieve(box, "executes", prepares=True).counts_answer([asked], go_on)


@given(st.sampled_from([PARIS, NOBODY, COUNT, NO_TABLE, NO_END, *map(OVERFLOWS_WHERE.format, ("ada", "bob", "zoe"))]))
@settings(max_examples=8, deadline=None)
def test_what_is_only_prepared_is_the_same_whatever_the_rows(box: Sandbox, empty: Sandbox, sql: str) -> None:
    full, none = (sieve(it, "executes", prepares=True).counts_answer([sql], go_on) for it in (box, empty))
    assert full is none is (sql != NO_TABLE)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """The same schema without a row."""
    path = tmp_path_factory.mktemp("empty") / "db.sqlite"
    make_database(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM people")
        connection.commit()
    with Sandbox(SqliteTarget(path), Limits(seconds=5.0)) as opened:
        yield opened


def test_a_plan_with_privacy_has_nothing_run(box: Sandbox) -> None:
    model = random_model(3)
    bundle = plan(model, filter="executes")
    private = bundle.plan.model_copy(update={"privacy": bundle.plan.privacy.model_copy(update={"level": "silo"})})
    times: dict[str, Any] = {"question_seconds": 5.0, "round_seconds": 60.0, "clock": lambda: 0.0}
    asked = OVERFLOWS_WHERE.format("ada")
    assert AnswerFilter.of(private, box, **times).counts_answer([asked], go_on)
    assert not AnswerFilter.of(bundle.plan, box, **times).counts_answer([asked], go_on)
    for kind in ("nonempty", "agrees"):
        with pytest.raises(ConfigurationError, match="no promise of privacy covers"):
            sieve(box, kind, prepares=True)


# --- time


class Slow:
    """A box in which each statement takes a second of `now`."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.now, self.seconds, self.ran = 0.0, seconds, list[str]()

    def run(self, sql: str) -> Rows:
        self.now += self.seconds
        self.ran.append(sql)
        if sql == NO_TABLE:
            raise QueryFailed("SQL failed: no such table")
        if sql == NO_END:
            raise UnsafeSql("SQL stopped: it ran longer")
        return Rows(("n",), ((1,),))


@given(
    st.lists(st.lists(st.sampled_from([PARIS, COUNT, NO_TABLE, NO_END]), min_size=3, max_size=5), max_size=12),
    st.sampled_from(["executes", "nonempty", "agrees"]),
    st.floats(0.01, 8.0),
    st.floats(0.01, 20.0),
)
@settings(max_examples=200, deadline=None)
def test_a_round_is_held_by_one_statement_more_than_it_has_time_for(
    asked: list[list[str]], kind: str, of_question: float, of_round: float
) -> None:
    """Whatever the model answers."""
    slow = Slow()
    it = sieve(slow, kind, question_seconds=of_question, round_seconds=of_round, clock=lambda: slow.now)
    for samples in asked:
        before = slow.now
        it.counts_answer(samples, go_on)
        assert slow.now - before < of_question + slow.seconds + 1e-9
    assert slow.now < of_round + slow.seconds + 1e-9
    assert sum(it.counts.values()) == len(asked)


def test_what_was_not_tried_in_time_is_passed_over_and_may_be_tried_again() -> None:
    slow = Slow()
    it = sieve(slow, "executes", round_seconds=1.5, clock=lambda: slow.now)
    assert [it.counts_answer([sql], go_on) for sql in (PARIS, COUNT, NOBODY, PARIS)] == [True, True, False, True]
    assert (it.counts, slow.ran) == ({"kept": 3, "late": 1}, [PARIS, COUNT])
    other = sieve(slow, "agrees", question_seconds=0.5, clock=lambda: slow.now)
    assert not other.counts_answer([PARIS, COUNT, NOBODY], go_on)
    assert other.counts == {"late": 1}


def test_sql_without_end_is_stopped_and_the_next_one_runs(database: Path) -> None:
    with Sandbox(SqliteTarget(database), Limits(seconds=0.05, rows=10**7)) as opened:
        it = sieve(opened, "executes")
        assert [it.counts_answer([sql], go_on) for sql in (NO_END, COUNT)] == [False, True]


def test_work_that_is_called_off_runs_no_statement_more() -> None:
    slow = Slow()
    with pytest.raises(TrainingStopped):
        sieve(slow, "executes").counts_answer([PARIS], lambda: True)
    assert slow.ran == []


# --- in training


def test_questions_that_are_dropped_add_nothing_and_count_in_the_mean() -> None:
    def gradient(kept: Sequence[bool] | None) -> tuple[float, int, list[torch.Tensor]]:
        model = random_model(7)
        turn = iter(kept or [])
        of_one: Callable[..., bool] | None = None if kept is None else (lambda samples, should_stop: next(turn))
        objective = Consistency(
            model,
            list(model.parameters()),
            questions(),
            TrainingSection(max_output_tokens=8),
            section(loss="answer", filter="executes"),
            of_one,
        )
        total, tokens = objective.add_gradient([[0, 1], [2]], go_on)
        return total, tokens, [one.grad for one in model.parameters() if one.grad is not None]

    all_of_them, none, some = gradient(None), gradient([False] * 3), gradient([True, False, True])
    assert gradient([True] * 3)[:2] == all_of_them[:2]
    assert (none[0], none[1]) == (0.0, all_of_them[1])
    assert not any(map(torch.any, none[2]))
    assert 0 < some[0] < all_of_them[0]
    assert some[1] == all_of_them[1]
    other = gradient([False, True, False])
    assert some[0] + other[0] == pytest.approx(all_of_them[0], rel=1e-5)


def test_samples_are_drawn_by_the_models_own_probabilities() -> None:
    """The first token, 2,000 times: within five standard deviations of each frequent one's probability."""
    model = random_model(7)
    batch = questions(1)
    ids = torch.from_numpy(np.stack([batch.inputs[0].astype(np.int64)] * 2000))
    mask = torch.ones_like(ids, dtype=torch.bool)
    torch.manual_seed(1)
    with torch.inference_mode():
        hidden = model.get_encoder()(input_ids=ids, attention_mask=mask)[0]
        answers = generated(model, hidden, mask, beams=1, max_new_tokens=1, drawn=True)
        start = torch.full((1, 1), model.config.decoder_start_token_id)
        probabilities = model(encoder_outputs=(hidden[:1],), decoder_input_ids=start).logits[0, 0].softmax(-1)
    drawn = [answer[0] if answer else model.config.eos_token_id for answer in answers]
    for token in probabilities.topk(5).indices.tolist():
        expected = float(probabilities[token])
        spread = (expected * (1 - expected) / len(drawn)) ** 0.5
        assert abs(drawn.count(token) / len(drawn) - expected) < 5 * spread
    assert len(set(drawn)) > 5


def test_attack_a_model_without_probabilities_ends_the_drawing() -> None:
    model = random_model(3)
    with torch.no_grad():
        model.decoder.final_layer_norm.weight.fill_(3e38)
    objective = Consistency(
        model,
        list(model.parameters()),
        questions(),
        TrainingSection(max_output_tokens=4),
        section(filter="agrees"),
        lambda samples, should_stop: True,
    )
    with pytest.raises(TrainingDiverged, match="no probabilities"):
        objective.add_gradient([[0]], go_on)


@pytest.mark.parametrize(("kind", "samples"), [("executes", 1), ("nonempty", 1), ("agrees", 4)])
def test_a_filter_is_asked_of_each_question_with_its_answers(tmp_path: Path, kind: str, samples: int) -> None:
    model = random_model(3)
    data = load_silo_data(written(tmp_path / "data"), labelled=False)
    bundle = plan(model, filter=kind, **({"samples": samples} if kind == "agrees" else {}))
    slow = Slow(0.0)
    it = sieve(slow, kind)
    asked: list[int] = []

    def counted(texts: Sequence[str], should_stop: Callable[[], bool]) -> bool:
        assert all(isinstance(text, str) for text in texts)
        asked.append(len(texts))
        return False

    it.counts_answer = counted  # type: ignore[method-assign]
    _, delta = trained(bundle, model, data, tmp_path / "out", answers=it)
    assert asked == [samples] * 6, "three questions, two epochs"
    assert not np.frombuffer(delta, "<f4").any(), "whatever is dropped moves nothing"
    with pytest.raises(DataError, match="trains without its database"):
        trained(bundle, model, data, tmp_path / "without")


def silo(folder: Path, rules: PolicyRules, *, database: bool = True) -> tuple[Workshop, SiloSources]:
    written(folder)
    if database:
        make_database(folder / "db.sqlite")
    own = Settings.model_validate({"data": {"folder": str(folder)}, "sql": {"question_seconds": 0.5}})
    sources = SiloSources(own, folder / "scratch")
    return Workshop(settings=own, policy=SiloPolicy(rules=rules, silo=LAB), sources=sources), sources


def test_an_agent_opens_its_own_database_for_it_with_its_own_limits(tmp_path: Path) -> None:
    bundle = plan(random_model(3), filter="nonempty")
    workshop, sources = silo(tmp_path / "silo", ALLOWED)
    workshop.prepare(bundle, None)
    assert sources.filter_limits()[0].seconds == 0.5
    with answers_tried(bundle.plan, LAB, sources) as it:
        assert it is not None
        assert [it.counts_answer([sql], go_on) for sql in (PARIS, NOBODY)] == [True, False]
    with answers_tried(plan(random_model(3)).plan, LAB, sources) as it:
        assert it is None
    with answers_tried(bundle.plan, SiloName("with-labels"), sources) as it:
        assert it is None


def test_a_silo_without_a_database_takes_no_such_plan(tmp_path: Path) -> None:
    workshop, _ = silo(tmp_path / "silo", ALLOWED, database=False)
    with pytest.raises(DataError, match="this silo has no database"):
        workshop.prepare(plan(random_model(3), filter="executes"), None)


# --- who allows it


def refused(bundle: PlanBundle, rules: PolicyRules, name: SiloName = LAB) -> list[str]:
    return [refusal.rule for refusal in SiloPolicy(rules=rules, silo=name).objections(bundle)]


@pytest.mark.parametrize("kind", ["executes", "nonempty", "agrees"])
def test_a_silo_refuses_it_unless_its_people_said_otherwise(kind: str) -> None:
    bundle = plan(random_model(3), filter=kind)
    assert refused(bundle, PolicyRules()) == ["database_in_training"]
    assert refused(bundle, PolicyRules(database_in_training=True, allow_execution=False)) == ["allow_execution"]
    assert refused(bundle, ALLOWED) == []
    assert refused(bundle, PolicyRules(), SiloName("with-labels")) == [], "whose database nobody asks"
    assert refused(plan(random_model(3)), PolicyRules()) == []
    with pytest.raises(PolicyRefusal, match="sees in updates which statements ran"):
        SiloPolicy(rules=PolicyRules(), silo=LAB).check_plan(bundle)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"filter": "agrees", "privacy": True}, "which no clipped question covers"),
        ({"filter": "nonempty", "privacy": True}, "which no clipped question covers"),
        ({"filter": "executes", "task": {"kind": "wikisql"}}, "have no database to try an answer on"),
        ({"filter": "executes", "samples": 7}, 'is read with filter = "agrees" alone'),
        ({"samples": 7}, 'is read with filter = "agrees" alone'),
        ({"filter": "runs"}, "filter"),
        ({"filter": "agrees", "samples": 2}, "samples"),
        ({"filter": "agrees", "samples": 17}, "samples"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    values = plan(random_model(3)).plan.model_dump(mode="json")
    more = dict(changes)
    if more.pop("privacy", False):
        values["privacy"] |= {"level": "silo", "noise_multiplier": 1.0}
    if "task" in more:
        values["task"] = more.pop("task")
    values["semi_supervised"] |= more
    with pytest.raises(ValidationError, match=said):
        type(plan(random_model(3)).plan).model_validate(values)
