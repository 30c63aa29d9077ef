"""What a study's start is practised on: questions over random schemas, WikiSQL's, and the model that comes of them."""

import gzip
import json
import sqlite3
from pathlib import Path

import pytest
from rich.console import Console

from lorica.experiments.definition import StartSection
from lorica.experiments.practice import random_schemas, random_tables, wikisql
from lorica.experiments.practice.random_schemas import Pair
from lorica.experiments.practice.warm_up import start
from lorica_coordinator.plans.model_source import FolderModel, SizedModel
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_security.console.strict_toml import parse_toml
from lorica_security.errors import ConfigurationError
from silo_agent.training.device import DeviceSettings
from silo_agent.training.tasks.wikisql_query import AGGREGATES, parsed
from silo_wire.canonical import canonical_json, digest_of

ONE_CORE = DeviceSettings(device="cpu", threads=1)
QUESTION = {
    "id": "dev-1",
    "question": "Who had high rebounds\u00a0over 3?",
    "sql": {"agg": 3, "sel": 1, "conds": [[0, 1, 3], [1, 0, 'the "b"']]},
    "header": ["High rebounds", "Name", "name"],
    "types": ["real", "text", "text"],
}


def test_every_query_runs_on_a_database_of_its_schema_and_every_value_is_in_the_question() -> None:
    for pair in random_schemas.pairs(600, seed=2):
        with sqlite3.connect(":memory:") as database:
            for table in pair.schema.tables:
                database.execute(f"CREATE TABLE {table.name} ({', '.join(column.name for column in table.columns)})")
            database.execute(pair.query)
        assert all(value in pair.question for value in pair.query.split('"')[1::2])


def test_the_same_seed_gives_the_same_pairs_and_another_seed_others() -> None:
    def drawn(seed: int) -> list[Pair]:
        return list(random_schemas.pairs(40, seed=seed))

    assert drawn(1) == drawn(1)
    assert not {pair.query for pair in drawn(1)} & {pair.query for pair in drawn(2)}


def test_no_two_schemas_are_alike() -> None:
    schemas = [pair.schema.tables for pair in random_schemas.pairs(200, seed=1)]
    assert len(set(schemas)) == len(schemas), "or one could be learnt instead of read"


def test_wikisql_is_read_into_the_silos_dialect(tmp_path: Path) -> None:
    file = written(tmp_path, QUESTION)
    (pair,) = wikisql.pairs(file)
    assert pair.query == (
        "SELECT COUNT( PAGEalias0.NAME ) FROM PAGE AS PAGEalias0 "
        "WHERE PAGEalias0.HIGH_REBOUNDS > 3 AND PAGEalias0.NAME = \"the 'b'\" ;"
    )
    assert [column.name for column in pair.schema.tables[0].columns] == ["high_rebounds", "name", "name_2"]
    assert pair.question == QUESTION["question"]


def test_what_is_no_question_of_wikisql_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"line 2 is no question of WikiSQL: KeyError\('header'\)"):
        list(wikisql.pairs(written(tmp_path, QUESTION, {"id": "x"})))
    with pytest.raises(ConfigurationError, match=r"none\.jsonl\.gz cannot be read"):
        list(wikisql.pairs(tmp_path / "none.jsonl.gz"))


def test_a_start_from_scratch_has_the_practices_words_and_a_warm_one_has_learnt(tmp_path: Path) -> None:
    scratch = start(section(), tmp_path, tmp_path / "out", ONE_CORE, Console(quiet=True))
    assert isinstance(scratch, SizedModel)
    warm_section = section(
        "[practice.training]\nepochs = 2\nlearning_rate = 1e-2\nmax_input_tokens = 32\nmax_output_tokens = 32"
    )
    warm = start(warm_section, tmp_path, tmp_path / "out", ONE_CORE, Console(quiet=True))
    assert isinstance(warm, FolderModel)
    again = start(warm_section, tmp_path, tmp_path / "out", ONE_CORE, Console(quiet=True))
    assert again == warm
    bundles = [
        create_plan(
            tmp_path / "plans", name=name, federation="f", source=source, preset="default", seed=7, overrides={}
        )
        for name, source in (("scratch", scratch), ("warm", warm))
    ]
    assert bundles[0].layout == bundles[1].layout
    assert bundles[0].files["tokenizer.json"] == bundles[1].files["tokenizer.json"]
    assert bundles[0].plan.model.initial != bundles[1].plan.model.initial


def test_practice_is_for_a_model_from_scratch() -> None:
    with pytest.raises(ConfigurationError, match="is for a model from scratch: remove it"):
        parse_toml(StartSection, 'folder = "t5"\n[practice]\npairs = 3', "study.toml")


def section(more: str = "") -> StartSection:
    return parse_toml(StartSection, f'size = "micro"\nvocabulary = 400\n[practice]\npairs = 64\n{more}', "study.toml")


def written(folder: Path, *lines: object) -> Path:
    file = folder / "questions.jsonl.gz"
    file.write_bytes(gzip.compress("".join(f"{json.dumps(line)}\n" for line in lines).encode()))
    return file


@pytest.mark.parametrize("strange", [False, True])
def test_every_query_over_a_random_table_is_one_and_copies_its_values_from_the_question(strange: bool) -> None:
    asked = set()
    for pair in random_tables.pairs(600, seed=2, strange=strange):
        names = [column.name for column in pair.schema.tables[0].columns]
        query = parsed(pair.query, names)
        assert query is not None
        assert query.conditions
        assert all(condition.value in pair.question for condition in query.conditions)
        assert len({query.column, *(condition.column for condition in query.conditions)}) == 1 + len(query.conditions)
        numbers = {index for index, one in enumerate(pair.schema.tables[0].columns) if one.sql_type == "real"}
        assert {condition.column for condition in query.conditions if not condition.quoted} <= numbers
        asked.add((AGGREGATES[query.aggregate], query.conditions[0].operator))
    assert {aggregate for aggregate, _ in asked} == set(AGGREGATES)
    assert {operator for _, operator in asked} == {0, 1, 2}


def test_random_tables_are_the_seeds_and_none_is_drawn_twice() -> None:
    drawn = list(random_tables.pairs(200, seed=1))
    assert drawn == list(random_tables.pairs(200, seed=1))
    assert not {pair.question for pair in drawn} & {pair.question for pair in random_tables.pairs(200, seed=2)}
    assert len({pair.schema.tables for pair in drawn}) == len(drawn), "or one could be learnt instead of read"


def test_strange_columns_are_most_of_their_tables_and_no_two_are_named_alike() -> None:
    common = {
        column.name.lower() for pair in random_tables.pairs(3000, seed=1) for column in pair.schema.tables[0].columns
    }
    strange = [
        column.name.lower()
        for pair in random_tables.pairs(300, seed=1, strange=True)
        for column in pair.schema.tables[0].columns
    ]
    unknown = [name for name in strange if name not in common]
    assert 0.6 < len(unknown) / len(strange) < 0.9
    assert len(set(unknown)) > 0.95 * len(unknown), "or one could be learnt instead of copied"


def test_a_start_of_another_task_is_practised_in_its_form(tmp_path: Path) -> None:
    practice = "[practice.training]\nepochs = 1\nlearning_rate = 1e-2\nmax_input_tokens = 32\nmax_output_tokens = 32"
    own = section(f'task = "wikisql"\nstrange = 32\n{practice}')
    last = start(own, tmp_path, tmp_path / "out", ONE_CORE, Console(quiet=True))
    (text,) = (tmp_path / "out").glob("practice-*.txt")
    assert text.read_text().splitlines()[1].startswith("SELECT ")
    assert " FROM table WHERE " in text.read_text()
    assert "alias0" not in text.read_text()
    first, second = sorted((tmp_path / "out").glob("start-*/model.safetensors"))
    assert first.read_bytes() != second.read_bytes(), "it goes on with the strange ones"
    assert last == FolderModel(second.parent)


def test_a_start_keeps_the_name_that_it_had_before_tasks_had_practices_of_their_own(tmp_path: Path) -> None:
    start(section(), tmp_path, tmp_path, ONE_CORE, Console(quiet=True))
    said = section().model_dump()
    del said["practice"]["task"], said["practice"]["strange"]
    assert (tmp_path / f"practice-{digest_of(canonical_json(said))[:12]}.txt").exists()


def test_practice_of_two_forms_at_once_is_refused() -> None:
    with pytest.raises(ConfigurationError, match='strange goes with task = "wikisql" and epochs: remove it'):
        section("strange = 9")
    with pytest.raises(ConfigurationError, match='task = "wikisql" another: remove one'):
        section('task = "wikisql"\nwikisql = "w.jsonl.gz"')
