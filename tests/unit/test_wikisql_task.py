"""WikiSQL as a task: lines to one form of SQL and back, and the seven metrics by hand, by WikiSQL's own definition and
by HydraNet's."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_t5 import bundle_of, random_model, write_model

from lorica_security.errors import DataError, MalformedMessage
from silo_agent.edges.workshop.silo_sources import Reading, SiloSources
from silo_agent.settings import Settings
from silo_agent.training.data.schema import Schema
from silo_agent.training.data.text_to_sql_data import DataLimits, SiloData
from silo_agent.training.device import DeviceSettings
from silo_agent.training.model.model import layout_of
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.tasks.named import TASKS, task_marked_by, task_named
from silo_agent.training.tasks.wikisql import MOST_COLUMNS, WIKISQL
from silo_agent.training.tasks.wikisql_query import (
    AGGREGATES,
    METRICS,
    MOST_CHARACTERS,
    MOST_CONDITIONS,
    OPERATORS,
    Condition,
    Query,
    column_names,
    folded,
    is_number,
    parsed,
    right,
    text,
)
from silo_wire.manifest import Manifest, manifest_of
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.task import BUILT_IN, TaskSection

NAMES = ("Week", 'High "r" bounds', "Date", "Location Attendance")
GOLD = Query(3, 1, (Condition(0, 1, "5", quoted=False), Condition(2, 0, "Mar 28, 2004")))
GOLD_TEXT = """SELECT COUNT("High ""r"" bounds") FROM table WHERE "Week" > 5 AND "Date" = 'Mar 28, 2004'"""


def line(number: int, **changes: Any) -> bytes:
    entry: dict[str, Any] = {
        "id": f"w-{number}",
        "table_id": "1-1",
        "question": f"question {number} ?",
        "header": list(NAMES),
        "types": ["real", "text", "text", "text"],
        "sql": {"agg": 3, "sel": 1, "conds": [[0, 1, 5], [2, 0, "Mar 28,  2004"]]},
        "query": "never read",
        **changes,
    }
    return json.dumps({key: value for key, value in entry.items() if value is not None}).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(line(n) for n in range(10)) + b"\n")
    (tmp_path / "dev.jsonl").write_bytes(
        line(100, header=["A", "B"], types=["text"] * 2, sql={"agg": 0, "sel": 1, "conds": []})
    )
    return tmp_path


# --- the form


def test_the_form_is_as_the_page_of_the_data_has_it() -> None:
    assert text(GOLD, NAMES) == GOLD_TEXT
    assert parsed(GOLD_TEXT, NAMES) == GOLD
    assert text(Query(0, 3), NAMES) == 'SELECT "Location Attendance" FROM table'


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).map(lambda words: " ".join(words.split()))
NUMBERS = st.one_of(st.integers().map(str), st.floats(allow_nan=False, allow_infinity=False).map(repr))
HEADERS = st.lists(
    st.one_of(WORDS, st.sampled_from(["", "a", "A", "a (2)", 'a"', "from", "column 1"])), min_size=1, max_size=6
)


@st.composite
def queries(draw: st.DrawFn, columns: int) -> Query:
    column = st.integers(0, columns - 1)
    condition = st.one_of(
        st.builds(Condition, column, st.integers(0, 2), st.one_of(WORDS, st.sampled_from(["'", "''", "a' AND", ""]))),
        st.builds(Condition, column, st.integers(0, 2), NUMBERS, st.just(False)),
    )
    conditions = draw(st.lists(condition, max_size=5))
    return Query(draw(st.integers(0, 5)), draw(column), tuple(conditions))


@st.composite
def asked(draw: st.DrawFn, several: int = 1) -> tuple[tuple[str, ...], list[Query]]:
    names = column_names(draw(HEADERS))
    return names, [draw(queries(len(names))) for _ in range(several)]


@given(asked())
def test_what_is_written_is_read_back(case: tuple[tuple[str, ...], list[Query]]) -> None:
    names, (query,) = case
    again = parsed(text(query, names), names)
    assert again == query
    assert again is not None
    assert text(again, names) == text(query, names), "quotation marks of values as well"
    assert parsed(f"  {text(query, names)} ; ", names) == query


@given(HEADERS)
def test_no_two_columns_have_one_name(header: list[str]) -> None:
    names = column_names(header)
    assert len({folded(name) for name in names}) == len(header)
    assert all(name.strip() for name in names)


def test_columns_of_one_name_are_told_apart() -> None:
    assert column_names(["Pts", "pts", "", "Pts (2)"]) == ("Pts", "pts (2)", "column 3", "Pts (2) (2)")


def test_case_and_white_space_of_words_and_names_do_not_matter() -> None:
    answer = """select  count ( "high  ""R"" BOUNDS" )from Table\nwhere"WEEK">5and "date"='Mar 28, 2004';"""
    assert parsed(answer, NAMES) == GOLD


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "SELECT",
        'SELECT "Week"',
        'SELECT "Week" FROM tables',
        'SELECT "Weak" FROM table',
        'SELECT SUMME("Week") FROM table',
        'SELECT COUNT "Week" FROM table',
        'SELECT COUNT("Week" FROM table',
        'SELECT ("Week") FROM table',
        'SELECT "Week FROM table',
        'SELECT "Week" FROM table WHERE',
        'SELECT "Week" FROM table AND "Week" = 1',
        'SELECT "Week" FROM table WHERE "Week" = ',
        'SELECT "Week" FROM table WHERE "Week" = five',
        'SELECT "Week" FROM table WHERE "Week" = 5 5',
        'SELECT "Week" FROM table WHERE "Week" = 5..5',
        'SELECT "Week" FROM table WHERE "Week" ! 5',
        'SELECT "Week" FROM table WHERE "Week" >= 5',
        """SELECT "Week" FROM table WHERE "Week" = 'a""",
        """SELECT "Week" FROM table WHERE "Week" = 'a' OR "Week" = 'b'""",
        'SELECT "Week" FROM table ; ;',
        'SELECT "Week" FROM table; DROP',
        'SELECT "Week", "Date" FROM table',
        'SELECT "Week" FROM table' + " " * MOST_CHARACTERS,
        'SELECT "Week" FROM table WHERE ' + " AND ".join(['"Week" = 1'] * (MOST_CONDITIONS + 1)),
    ],
)
def test_what_is_no_such_query_counts_wrong_in_all(answer: str) -> None:
    assert parsed(answer, NAMES) is None
    assert right(parsed(answer, NAMES), GOLD) == (False,) * 7


@given(st.one_of(st.text(max_size=60), st.text("\"'()=<>;, SELECTCOUNTfromtablewhereandWeek0.5e-", max_size=120)))
def test_whatever_a_model_answers_is_read_or_refused(answer: str) -> None:
    query = parsed(answer, NAMES)
    if query is not None:
        assert parsed(text(query, NAMES), NAMES) == query


@given(st.integers(0, len(GOLD_TEXT)), st.integers(0, len(GOLD_TEXT)), st.text("\"' ()=5a;", max_size=3))
def test_a_changed_answer_is_read_or_refused(start: int, stop: int, piece: str) -> None:
    query = parsed(GOLD_TEXT[:start] + piece + GOLD_TEXT[stop:], NAMES)
    assert query is None or parsed(text(query, NAMES), NAMES) == query


def test_conditions_up_to_the_most_are_read() -> None:
    answer = 'SELECT "Week" FROM table WHERE ' + " AND ".join(['"Week" = 1'] * MOST_CONDITIONS)
    query = parsed(answer, NAMES)
    assert query is not None
    assert len(query.conditions) == MOST_CONDITIONS


def test_numbers_are_those_that_python_writes() -> None:
    assert all(map(is_number, ("5", "-5", "5.0", "1e-05", "1e+16", ".5")))
    assert not any(map(is_number, ("", "e", "5 5", "nan", "inf", "1_0", "٥", "-", "0x5")))  # noqa: RUF001


# --- what is right


def of(*changes: Any, **parts: Any) -> Query:
    return replace(GOLD, **parts)


WEEK, DATE = GOLD.conditions


@pytest.mark.parametrize(
    ("predicted", "wrong"),
    [
        (of(), set()),
        (of(conditions=(DATE, WEEK)), set()),
        (of(conditions=(WEEK, DATE, DATE)), set()),
        (of(conditions=(WEEK, replace(DATE, value="mar 28,  2004"))), set()),
        (of(conditions=(replace(WEEK, quoted=True), DATE)), set()),
        (of(aggregate=0), {"overall", "aggregate"}),
        (of(column=0), {"overall", "column"}),
        (of(conditions=(WEEK, replace(DATE, column=3))), {"overall", "condition_columns"}),
        (of(conditions=(WEEK, replace(DATE, operator=2))), {"overall", "operators"}),
        (of(conditions=(WEEK, replace(DATE, value="Mar 29, 2004"))), {"overall", "values"}),
        (of(conditions=(replace(WEEK, value="5.0"), DATE)), {"overall", "values"}),
        (of(conditions=(WEEK,)), {"overall", "conditions", "condition_columns", "operators", "values"}),
        (of(conditions=()), {"overall", "conditions", "condition_columns", "operators", "values"}),
    ],
)
def test_each_metric_by_hand(predicted: Query, wrong: set[str]) -> None:
    assert {name for name, truth in zip(METRICS, right(predicted, GOLD), strict=True) if not truth} == wrong


def official(query: Query) -> dict[str, Any]:
    """As WikiSQL's files and programs have it."""
    return {
        "agg": query.aggregate,
        "sel": query.column,
        "conds": [[c.column, c.operator, c.value] for c in query.conditions],
    }


def official_overall(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """`Query.__eq__` of WikiSQL's lib/query.py, without order."""

    def conditions(query: dict[str, Any]) -> set[Any]:
        return {(column, operator, str(value).lower()) for column, operator, value in query["conds"]}

    return one["sel"] == other["sel"] and one["agg"] == other["agg"] and conditions(one) == conditions(other)


def official_parts(one: dict[str, Any], other: dict[str, Any]) -> list[bool]:
    """Agg, Sel, Wn, Wc, Op and Val of HydraNet's evaluation."""

    def part(query: dict[str, Any], number: int) -> list[str]:
        return [str(it[number]).lower() for it in sorted(query["conds"], key=lambda it: it[0])]

    return [
        one["agg"] == other["agg"],
        one["sel"] == other["sel"],
        len(one["conds"]) == len(other["conds"]),
        *(part(one, number) == part(other, number) for number in range(3)),
    ]


@st.composite
def close_queries(draw: st.DrawFn, *, distinct: bool) -> list[Query]:
    """Two that often agree in something."""
    columns = st.integers(0, 2)
    condition = st.builds(Condition, columns, st.integers(0, 1), st.sampled_from(["a", "A", "b", "5"]))
    key = (lambda it: it.column) if distinct else (lambda it: (it.column, it.operator, it.value.lower()))
    conditions = st.lists(condition, max_size=3, unique_by=key).map(tuple)
    return [draw(st.builds(Query, st.integers(0, 1), st.integers(0, 1), conditions)) for _ in range(2)]


@given(close_queries(distinct=False))
def test_the_whole_is_right_as_wikisql_defines_it(pair: list[Query]) -> None:
    assert right(*pair)[0] == official_overall(*map(official, pair))


@given(close_queries(distinct=True))
def test_the_parts_are_right_as_hydranet_defines_them(pair: list[Query]) -> None:
    assert list(right(*pair)[1:]) == official_parts(*map(official, pair))


@given(close_queries(distinct=False), st.randoms(use_true_random=False))
def test_the_order_of_conditions_does_not_matter(pair: list[Query], order: Any) -> None:
    predicted, gold = pair
    mixed = list(predicted.conditions)
    order.shuffle(mixed)
    assert right(replace(predicted, conditions=tuple(mixed)), gold) == right(predicted, gold)
    assert right(replace(gold, conditions=gold.conditions[::-1]), gold) == (True,) * 7


@given(close_queries(distinct=False))
def test_what_is_right_as_a_whole_is_right_in_all(pair: list[Query]) -> None:
    whole, *parts = right(*pair)
    assert whole <= all(parts)


# --- lines


def names_of(schema: Schema) -> Sequence[str]:
    return [column.name for column in schema.tables[0].columns]


def table_of(data: SiloData, db_id: str) -> Schema:
    (schema,) = (schema for schema in data.schemas if schema.db_id == db_id)
    return schema


def test_lines_become_questions_with_tables_of_their_own(folder: Path) -> None:
    data = WIKISQL.data(folder)
    assert (len(data.train), len(data.dev), len(data.test), len(data.schemas)) == (10, 1, 0, 2)
    example = data.train[3]
    assert (example.id, example.question, example.query) == ("w-3", "question 3 ?", GOLD_TEXT)
    table = table_of(data, example.db_id)
    assert WIKISQL.shown(table) == '| Week : real | High "r" bounds : text | Date : text | Location Attendance : text'
    assert WIKISQL.right(GOLD_TEXT.lower(), example.query, table) == (True,) * 7
    assert data.dev[0].query == 'SELECT "B" FROM table'
    assert data.database is None
    assert data.task == "wikisql"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"header": None}, "key header is missing"),
        ({"header": "Week"}, f"header is not a list of 1 to {MOST_COLUMNS} texts"),
        ({"header": []}, f"header is not a list of 1 to {MOST_COLUMNS} texts"),
        ({"header": ["x"] * (MOST_COLUMNS + 1)}, f"header is not a list of 1 to {MOST_COLUMNS} texts"),
        ({"header": ["a", 1, "c", "d"]}, "header has a int, expected text"),
        ({"header": ["a", "\ud800", "c", "d"]}, "header holds half of a surrogate pair"),
        ({"header": ["a"]}, "header has 1 columns, types has 4"),
        ({"types": ["real", "text", "text", "blob"]}, "types has 'blob', which is not one of text, real"),
        ({"question": None}, "key question is missing"),
        ({"sql": None}, "sql is not an object of agg, sel and conds"),
        ({"sql": {"agg": 6, "sel": 0, "conds": []}}, "sql agg is not a number from 0 to 5"),
        ({"sql": {"agg": True, "sel": 0, "conds": []}}, "sql agg is not a number from 0 to 5"),
        ({"sql": {"agg": 0, "sel": 4, "conds": []}}, "sql sel is not a number from 0 to 3"),
        ({"sql": {"agg": 0, "sel": -1, "conds": []}}, "sql sel is not a number from 0 to 3"),
        ({"sql": {"agg": 0, "sel": 0}}, "sql conds is not a list of at most 16 conditions"),
        ({"sql": {"agg": 0, "sel": 0, "conds": [[0, 0, 1]] * 17}}, "sql conds is not a list of at most 16 conditions"),
        ({"sql": {"agg": 0, "sel": 0, "conds": [[0, 0]]}}, "conds has one that is not column, operator and value"),
        ({"sql": {"agg": 0, "sel": 0, "conds": [[0, 3, 1]]}}, "sql conds operator is not a number from 0 to 2"),
        ({"sql": {"agg": 0, "sel": 0, "conds": [[9, 0, 1]]}}, "sql conds column is not a number from 0 to 3"),
        ({"sql": {"agg": 0, "sel": 0, "conds": [[0, 0, None]]}}, "a value that is neither text nor a finite number"),
        ({"sql": {"agg": 0, "sel": 0, "conds": [[0, 0, True]]}}, "a value that is neither text nor a finite number"),
        ({"sql": {"agg": 0, "sel": 0, "conds": [[0, 0, float("nan")]]}}, "neither text nor a finite number"),
        ({"sql": {"agg": 0, "sel": 0, "conds": [[0, 0, "\udc00"]]}}, "sql conds value holds half of a surrogate pair"),
        ({"sql": {"agg": 0, "sel": 0, "conds": [[0, 0, "x" * MOST_CHARACTERS]]}}, "sql is too long to be asked for"),
    ],
)
def test_a_bad_line_is_left_out_and_named(folder: Path, changes: dict[str, Any], reason: str) -> None:
    with (folder / "train.jsonl").open("ab") as file:
        file.write(line(50, **changes))
    data = WIKISQL.data(folder, DataLimits(max_bad_fraction=0.5))
    assert len(data.train) == 10
    (bad,) = data.bad_lines
    assert bad.line == 11
    assert bad.reason.endswith(reason)


def test_lines_of_one_person_are_grouped(folder: Path) -> None:
    (folder / "train.jsonl").write_bytes(b"\n".join(line(n, person=n % 4) for n in range(8)))
    data = WIKISQL.data(folder, unit_field="person", private=True)
    assert [example.unit for example in data.train] == list("01230123")


def test_in_private_training_no_line_says_what_another_ones_table_is(folder: Path) -> None:
    """Whose header a table has is in the line itself: one more line changes no other."""
    before = WIKISQL.data(folder, private=True)
    train = folder / "train.jsonl"
    train.write_bytes(line(60, header=["other", "names", "of", "it"]) + b"\n" + train.read_bytes())
    after = WIKISQL.data(folder, private=True)
    assert after.train[1:] == before.train
    assert table_of(after, after.train[1].db_id) == table_of(before, before.train[0].db_id)


def test_a_folder_of_the_other_task_is_refused(folder: Path) -> None:
    (folder / "schema.json").write_bytes(b"{}")
    with pytest.raises(DataError, match=r"holds schema\.json, and a plan with \[task\] kind = 'wikisql'"):
        WIKISQL.data(folder)


# --- tasks and plans


def test_a_plan_may_name_every_task_and_no_other() -> None:
    assert [task.name for task in TASKS] == list(BUILT_IN)
    assert [task_named(task.name) for task in TASKS] == list(TASKS)
    assert all(task.metrics for task in TASKS)


def test_a_line_says_whose_it_is() -> None:
    assert task_marked_by({"id", "question", "query", "db_id"}).name == "sql"
    assert task_marked_by(json.loads(line(1)).keys()).name == "wikisql"
    assert task_marked_by(set()).name == "sql"


def test_plans_of_before_keep_their_digests() -> None:
    from unit.test_wire_plan import plan_value

    plan = Plan.model_validate(plan_value())
    written = json.loads(plan.to_json())
    assert "task" not in written
    other = Plan.model_validate({**plan_value(), "task": {"kind": "wikisql"}})
    assert json.loads(other.to_json())["task"] == {"kind": "wikisql"}
    assert Plan.from_json(other.to_json()) == other
    with pytest.raises(MalformedMessage, match="not in canonical form"):
        Plan.from_json(json.dumps({**written, "task": {"kind": "sql"}}, sort_keys=True, separators=(",", ":")).encode())


# --- the data themselves


def test_every_labelled_line_of_the_re_split_is_read_as_its_own_page_writes_it(
    shared_wikisql: Path, tmp_path: Path
) -> None:
    for split, source in (("train", "server_labelled"), ("dev", "dev"), ("test", "test")):
        (tmp_path / f"{split}.jsonl.gz").write_bytes((shared_wikisql / f"{source}.jsonl.gz").read_bytes())
    data = WIKISQL.data(tmp_path, DataLimits(max_bad_fraction=0))
    assert (len(data.train), len(data.dev), len(data.test)) == (1000, 500, 1000)
    tables = {schema.db_id: schema for schema in data.schemas}
    for split, examples in (("train", data.train), ("dev", data.dev), ("test", data.test)):
        lines = gzip.decompress((tmp_path / f"{split}.jsonl.gz").read_bytes()).decode().removesuffix("\n").split("\n")
        for raw, example in zip(map(json.loads, lines), examples, strict=True):
            assert example.query == raw["query"]
            query = parsed(raw["query"], names_of(tables[example.db_id]))
            assert query is not None
            assert (AGGREGATES[query.aggregate], query.column) == (AGGREGATES[raw["sql"]["agg"]], raw["sql"]["sel"])
            assert official_overall(official(query), raw["sql"])
            assert {c.operator for c in query.conditions} <= set(range(len(OPERATORS)))


# --- training and scores


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> tuple[SiloTrainer, Path, Manifest, SiloData]:
    """A model that has learnt four questions by heart, of which the last was learnt with another value."""
    folder = tmp_path_factory.mktemp("learnt")
    kinds = {"header": ["city", "people"], "types": ["text", "real"]}
    queries = [
        {"question": "how many in paris ?", "sql": {"agg": 0, "sel": 1, "conds": [[0, 0, "paris"]]}},
        {"question": "which are larger than 300 ?", "sql": {"agg": 3, "sel": 0, "conds": [[1, 1, 300]]}},
        {"question": "all cities", "sql": {"agg": 0, "sel": 0, "conds": []}},
        {"question": "how many in smith ?", "sql": {"agg": 0, "sel": 1, "conds": [[0, 0, "smith"]]}},
    ]
    (folder / "train.jsonl").write_bytes(b"\n".join(line(n, **kinds, **one) for n, one in enumerate(queries)))
    queries[3] = {**queries[3], "sql": {"agg": 0, "sel": 1, "conds": [[0, 0, "leeds"]]}}
    (folder / "dev.jsonl").write_bytes(b"\n".join(line(9 + n, **kinds, **one) for n, one in enumerate(queries)))
    data = WIKISQL.data(folder)
    model = random_model(1)
    bundle = bundle_of(
        model,
        task={"kind": "wikisql"},
        training={
            "learning_rate": 1e-2,
            "epochs": 70,
            "batch_size": 4,
            "dropout": 0.0,
            "max_output_tokens": 64,
            "learning_rate_schedule": "linear",
        },
    )
    trainer = SiloTrainer(bundle, data, "silo-1", DeviceSettings(device="cpu", threads=1))
    begin = write_model(model, folder / "model.bin")
    update = trainer.train(
        round_number=1, model_path=folder / "model.bin", model=begin, update_path=folder / "update.bin"
    )
    assert update.summary.examples == 4
    local = np.fromfile(folder / "model.bin", "<f4") + np.fromfile(folder / "update.bin", "<f4")
    (folder / "local.bin").write_bytes(local.tobytes())
    return trainer, folder / "local.bin", manifest_of(layout_of(model), [local.tobytes()]), data


def test_a_model_learns_the_form_and_is_scored_in_seven_parts(
    learnt: tuple[SiloTrainer, Path, Manifest, SiloData],
) -> None:
    trainer, path, model, _ = learnt
    counts: dict[str, int] = {}
    scored = trainer.evaluate(model_path=path, model=model, split="dev", on_parts=counts.update)
    assert counts == {**dict.fromkeys(METRICS, 4), "overall": 3, "values": 3}
    assert (scored.examples, scored.exact_matches, scored.executed) == (4, 3, 0)


def test_what_leaves_has_the_whole_answers_alone(learnt: tuple[SiloTrainer, Path, Manifest, SiloData]) -> None:
    """The six parts are the silo's own: what is reported of an evaluation has no field for them."""
    trainer, path, model, _ = learnt
    scored = trainer.evaluate(model_path=path, model=model, split="dev")
    assert {field.name for field in fields(scored)} == {
        "split",
        "examples",
        "exact_matches",
        "executed",
        "execution_matches",
        "loss_per_token",
        "seconds",
    }


def test_nothing_is_executed(learnt: tuple[SiloTrainer, Path, Manifest, SiloData]) -> None:
    trainer, path, model, _ = learnt
    ran: list[str] = []
    scored = trainer.evaluate(
        model_path=path, model=model, split="dev", same_result=lambda gold, predicted: bool(ran.append(predicted))
    )
    assert (ran, scored.executed) == ([], 0)


def test_data_of_another_task_are_refused(learnt: tuple[SiloTrainer, Path, Manifest, SiloData]) -> None:
    *_, data = learnt
    with pytest.raises(DataError, match="are of task wikisql, the plan's is sql"):
        SiloTrainer(bundle_of(random_model(1)), data, "silo-1", DeviceSettings(device="cpu", threads=1))


def test_a_question_is_asked_of_one_table(learnt: tuple[SiloTrainer, Path, Manifest, SiloData], folder: Path) -> None:
    trainer, path, model, _ = learnt
    assert trainer.answer("all cities", model_path=path, model=model) == 'SELECT "city" FROM table'
    several = SiloTrainer(
        bundle_of(random_model(1), task={"kind": "wikisql"}),
        WIKISQL.data(folder),
        "silo-1",
        DeviceSettings(device="cpu", threads=1),
    )
    with pytest.raises(DataError, match="asked of one table, and the data of silo silo-1 have 2"):
        several.answer("all cities", model_path=path, model=model)


def test_a_silos_folder_is_read_for_the_task_of_its_lines(folder: Path) -> None:
    sources = SiloSources(Settings.model_validate({"data": {"folder": str(folder)}}), scratch=folder / "scratch")
    assert (sources.summary().train_examples, sources.data().task, sources.database()) == (10, "wikisql", None)
    with pytest.raises(DataError, match=r"schema\.json is missing"):
        sources.data_for(Reading(task=TaskSection(kind="sql")))
    assert sources.data_for(Reading(private=True, task=TaskSection(kind="wikisql"))).task == "wikisql"
