import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorica.cli import app
from lorica.demo.silos.silos import SILOS, Record, Splits, fill_database, questions, schema, write_silo
from lorica.demo.silos.specification import Shape, SiloSpecification, Table, key, text
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import silo_name
from silo_agent.training.data.text_to_sql_data import load_silo_data
from tests.support.nearest_neighbour import nearest_neighbour_answers

SEEDS = (0, 1, 7)

every_silo = pytest.mark.parametrize("silo", SILOS, ids=lambda silo: silo.name)
every_seed = pytest.mark.parametrize("seed", SEEDS)


@cache
def splits_of(name: str, seed: int) -> Splits:
    return questions(next(silo for silo in SILOS if silo.name == name), seed=seed)


def nearest_neighbour_exact_match(train: Sequence[Record], held_out: Sequence[Record]) -> float:
    """The share of `held_out` that the baseline answers with the gold SQL, 0 to 1."""
    answers = nearest_neighbour_answers(train, [record.question for record in held_out])
    return sum(answer == record.query for answer, record in zip(answers, held_out, strict=True)) / len(held_out)


def test_four_silos_differ_tenfold_in_size_and_in_every_schema() -> None:
    sizes = [silo.train for silo in SILOS]
    assert len(SILOS) >= 4
    assert max(sizes) == 10 * min(sizes)
    assert len({tuple(table.name for table in silo.tables) for silo in SILOS}) == len(SILOS)
    assert all(3 <= len(silo.tables) <= 5 for silo in SILOS)
    assert [silo_name(silo.name) for silo in SILOS] == [silo.name for silo in SILOS]


@every_silo
def test_each_silo_asks_at_least_25_question_templates(silo: SiloSpecification) -> None:
    assert silo.templates >= 25
    assert all(shape.slots for shape in silo.shapes)
    kinds = [shape.sql for shape in silo.shapes]
    for part in ("COUNT(", "AVG(", "SUM(", "MAX(", " JOIN ", "ORDER BY", "LIMIT", "GROUP BY", "'", "> "):
        assert any(part in sql for sql in kinds), part


@every_silo
@every_seed
def test_splits_have_the_sizes_that_the_specification_names(silo: SiloSpecification, seed: int) -> None:
    splits = splits_of(silo.name, seed)
    assert [len(records) for _, records in splits] == [silo.train, silo.dev, silo.test]
    assert len({record.id for _, records in splits for record in records}) == silo.train + silo.dev + silo.test


@every_silo
@every_seed
def test_no_question_and_no_sql_of_one_split_is_in_another(silo: SiloSpecification, seed: int) -> None:
    train, dev, test = (
        ({record.question for record in records}, {record.query for record in records})
        for _, records in splits_of(silo.name, seed)
    )
    for one, other in ((train, dev), (train, test), (dev, test)):
        assert not one[0] & other[0]
        assert not one[1] & other[1]


@every_seed
def test_no_question_has_two_answers_in_any_silo(seed: int) -> None:
    asked: dict[str, Record] = {}
    for silo in SILOS:
        for _, records in splits_of(silo.name, seed):
            for record in records:
                first = asked.setdefault(record.question, record)
                assert first is record, f"{first} and {record}"


@every_silo
@every_seed
def test_held_out_templates_and_values_are_all_seen_in_training(silo: SiloSpecification, seed: int) -> None:
    def templates_and_values(records: tuple[Record, ...]) -> tuple[set[tuple[int, int]], set[tuple[int, str, object]]]:
        by_question = {
            question.format(**values): (index, way, values)
            for index, shape in enumerate(silo.shapes)
            for values in silo.fillings(shape)
            for way, question in enumerate(shape.questions)
        }
        found = [by_question[record.question] for record in records]
        return (
            {(index, way) for index, way, _ in found},
            {(index, slot, value) for index, _, values in found for slot, value in values.items()},
        )

    splits = splits_of(silo.name, seed)
    templates, values = templates_and_values(splits.train)
    assert len(templates) == silo.templates >= 25
    for held_out in (splits.dev, splits.test):
        held_out_templates, held_out_values = templates_and_values(held_out)
        assert held_out_templates <= templates
        assert held_out_values <= values


@every_silo
@every_seed
def test_copying_the_nearest_training_question_scores_at_most_20_percent(silo: SiloSpecification, seed: int) -> None:
    splits = splits_of(silo.name, seed)
    assert nearest_neighbour_exact_match(splits.train, splits.dev + splits.test) <= 0.2


@every_silo
def test_the_nearest_neighbours_sql_rarely_gives_the_right_rows_either(silo: SiloSpecification) -> None:
    splits = splits_of(silo.name, 0)
    answers = nearest_neighbour_answers(splits.train, [record.question for record in splits.test])
    with closing(sqlite3.connect(":memory:")) as database:
        fill_database(silo, database, seed=0)
        rows = [
            (database.execute(a).fetchall(), database.execute(r.query).fetchall())
            for a, r in zip(answers, splits.test, strict=True)
        ]
    assert sum(sorted(map(repr, a)) == sorted(map(repr, b)) for a, b in rows) / len(rows) <= 0.2


def test_the_nearest_neighbour_finds_what_is_there_to_copy() -> None:
    train = questions(SILOS[0], seed=0).train[:300]
    assert nearest_neighbour_exact_match(train, train) == 1.0
    reworded = [replace(record, question=f"please tell me {record.question} now") for record in train[::10]]
    assert nearest_neighbour_exact_match(train, reworded) > 0.9


@every_silo
@every_seed
def test_gold_queries_run_and_answer_with_rows(silo: SiloSpecification, seed: int) -> None:
    with closing(sqlite3.connect(":memory:")) as database:
        fill_database(silo, database, seed=seed)
        answers = [database.execute(r.query).fetchall() for _, records in splits_of(silo.name, seed) for r in records]
        assert database.execute("PRAGMA foreign_key_check").fetchall() == []
    empty = [rows for rows in answers if not any(cell not in (None, 0) for row in rows for cell in row)]
    assert len(empty) <= len(answers) // 50
    assert len({repr(rows) for rows in answers}) > len(answers) // 4


@every_silo
def test_a_written_silo_is_read_back_as_it_was_generated(silo: SiloSpecification, tmp_path: Path) -> None:
    write_silo(tmp_path / silo.name, silo, seed=3)
    folder = tmp_path / silo.name
    assert sorted(path.name for path in folder.iterdir()) == [
        "db.sqlite", "dev.jsonl", "schema.json", "test.jsonl", "train.jsonl",
    ]  # fmt: skip
    for name, records in questions(silo, seed=3):
        lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert [Record(**line) for line in lines] == list(records)
    written = json.loads((folder / "schema.json").read_text(encoding="utf-8"))
    assert written == schema(silo)
    with closing(sqlite3.connect(folder / "db.sqlite")) as database:
        for table in written["tables"]:
            columns = database.execute(f"PRAGMA table_info({table['name']})").fetchall()
            found = [(name, sql_type, bool(primary)) for _, name, sql_type, _, _, primary in columns]
            assert found == [(c["name"], c["sql_type"], c["primary_key"]) for c in table["columns"]]
            foreign = {row[3] for row in database.execute(f"PRAGMA foreign_key_list({table['name']})")}
            assert foreign == {c["name"] for c in table["columns"] if c["foreign_key"]}


def test_schema_has_the_fields_of_the_benchmark_silos() -> None:
    written = schema(SILOS[2])
    assert list(written) == ["db_id", "source", "tables"]
    account = next(table for table in written["tables"] if table["name"] == "account")
    assert account["columns"][1] == {
        "name": "customer_id", "sql_type": "INTEGER", "type": "number", "primary_key": False, "foreign_key": True,
    }  # fmt: skip
    assert account["columns"][5]["type"] == "time"


def test_the_seed_decides_everything() -> None:
    def dump(seed: int) -> str:
        with closing(sqlite3.connect(":memory:")) as database:
            fill_database(SILOS[1], database, seed=seed)
            return "\n".join(database.iterdump())

    assert questions(SILOS[1], seed=5) == questions(SILOS[1], seed=5)
    assert questions(SILOS[1], seed=5) != questions(SILOS[1], seed=6)
    assert dump(5) == dump(5)
    assert dump(5) != dump(6)


def test_a_silo_is_never_written_over_an_existing_one(tmp_path: Path) -> None:
    write_silo(tmp_path, SILOS[1], seed=0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigurationError, match="exists already"):
        write_silo(tmp_path, SILOS[1], seed=1)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_shapes_too_few_for_the_sizes_are_refused_with_the_numbers() -> None:
    shape = Shape("SELECT name FROM pet WHERE kind = '{kind}'", ("which pets are a {kind}",))
    pets = SiloSpecification(
        name="pets",
        tables=(Table(name="pet", rows=1, columns=(key(), text("name", ("rex",)), text("kind", ("dog",)))),),
        pools={"kind": ("dog", "cat")},
        shapes=(shape,),
        train=1,
        dev=1,
        test=0,
    )
    with pytest.raises(
        ConfigurationError, match="'pets': the shapes give 2 training and 0 held-out questions of 1 and 1"
    ):
        questions(pets, seed=0)


def test_the_command_writes_all_of_them_once(tmp_path: Path) -> None:
    runner = CliRunner()
    folder = tmp_path / "silos"
    result = runner.invoke(app, ["silos", str(folder)], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.split() == [str(folder / silo.name) for silo in SILOS]
    for silo in SILOS:
        assert len(load_silo_data(folder / silo.name).train) == silo.train
    with pytest.raises(ConfigurationError, match=r"hospital/db\.sqlite exists already"):
        runner.invoke(app, ["silos", str(folder)], catch_exceptions=False)
