"""Rows become lines of a data folder: keys, ids, databases, and a division in which no template or group is in two
splits."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_security.errors import ConfigurationError, DataError
from lorica_security.visible_text import visible
from silo_agent.edges.data_import.examples import Choices, Imported, Importer, mapping
from silo_agent.edges.data_import.findings import Findings
from silo_agent.edges.data_import.schemas import Schemas, schemas_of
from silo_agent.edges.data_import.sources import Source, find_source
from silo_agent.edges.data_import.splits import Division, divide
from silo_agent.edges.data_import.templates import Templates
from silo_agent.edges.data_import.written import write_folder
from silo_agent.training.data.schema import Column, ColumnType, Schema, Table
from silo_agent.training.data.text_to_sql_data import Split, load_silo_data

NAME = Column(name="name", sql_type="TEXT", type=ColumnType.TEXT, primary_key=True, foreign_key=False)
SCHEMA = Schema("hospital", "sqlite:///hospital.sqlite", (Table("patient", (NAME,)),))
SHARES: dict[Split, float] = {"dev": 0.1, "test": 0.1}


def template(sql: str) -> str:
    return Templates().of(sql)


# --- templates


@pytest.mark.parametrize(
    "others",
    [
        ["SELECT name FROM patient WHERE city = "
         "'leeds'", 'select t1.ward from "Stay" as T1 where t1.date = "a b" ;', "SELECT year FROM x WHERE y = -3.5"],
        ["SELECT a FROM t WHERE b IN (1, 2, 3)", "SELECT a FROM t WHERE b IN ('x')"],
        ["SELECT count(*) FROM s.t", "SELECT COUNT ( * ) FROM t AS u -- all of them"],
        ["SELECT `a b` FROM [c d] ORDER BY e DESC LIMIT 1", "SELECT x FROM y ORDER BY z DESC LIMIT 10"],
        ["SELECT a::text FROM t WHERE b ILIKE 'x%'", "SELECT c::text FROM u WHERE d ILIKE 'y'"],
        ["SELECT a AS total FROM t", "SELECT b FROM t"],
    ],
)  # fmt: skip
def test_statements_that_differ_in_names_and_values_have_one_template(others: Sequence[str]) -> None:
    assert len({template(sql) for sql in others}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("SELECT a FROM t", "SELECT a, b FROM t"),
        ("SELECT max(a) FROM t", "SELECT min(a) FROM t"),
        ("SELECT a FROM t WHERE b = 1", "SELECT a FROM t WHERE b > 1"),
        ("SELECT a FROM t WHERE b IN (1)", "SELECT a FROM t WHERE b IN (SELECT b FROM u)"),
        ("SELECT a FROM t", "SELECT DISTINCT a FROM t"),
    ],
)
def test_statements_of_another_structure_have_another_template(one: str, other: str) -> None:
    assert template(one) != template(other)


@pytest.mark.parametrize(
    "sql", ["SELECT 'abc", "no sql at all ;", "(" * 5000, "SELECT " + "(" * 3000, "", "--", "x" * 50_000]
)
def test_what_is_no_sql_has_a_template_of_its_own(sql: str) -> None:
    assert template(sql) != template("SELECT a FROM t")
    assert len(template(sql)) <= 2 * len(sql)


VALUES_THAT_A_PARSER_LOOKS_INTO = [
    "SELECT a + INTERVAL '{}' FROM t WHERE b = '{}'",
    "SELECT json_extract(d, '{}') FROM t",
    "SELECT d -> '{}' FROM t",
    "SELECT d #>> '{}' FROM t WHERE ä = '😀 {}'",
    "SELECT to_char(a, '{}'), N'{}', E'{}' FROM t",
    "SELECT a FROM t WHERE b = '{}' -- {}",
]
WORDS = ["1 day", "2 weeks", "$.a", "$.a.b[1]", "{a,b}", "YYYY", "no path ] [", "x", "$", ""]


@pytest.mark.parametrize("form", VALUES_THAT_A_PARSER_LOOKS_INTO)
def test_no_value_is_in_a_template_and_none_is_warned_of(form: str, caplog: pytest.LogCaptureFixture) -> None:
    assert len({template(form.replace("{}", word)) for word in WORDS}) == 1
    assert caplog.messages == []


ALONE = {
    sql: template(sql) for form in VALUES_THAT_A_PARSER_LOOKS_INTO for sql in (form.replace("{}", w) for w in WORDS)
}


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.permutations(sorted(ALONE)))
def test_a_template_is_that_of_the_statement_whatever_came_before(queries: list[str]) -> None:
    templates = Templates()
    assert {sql: templates.of(sql) for sql in queries} == ALONE


# --- rows to examples


def read(
    tmp_path: Path, *lines: dict[str, Any], schemas: Iterable[str] = ("hospital",), **choices: Any
) -> tuple[Importer, list[str]]:
    """What came of the lines, and the problems that were told."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = {name: replace(SCHEMA, db_id=name) for name in schemas}
    source = find_source(path, None)
    findings = Findings()
    importer = Importer(source, Choices(**{"columns": {}, **choices}), Schemas(known, {}), findings)
    for file in source.files:
        importer.read(file)
    return importer, list(findings.shown())


def examples_of(tmp_path: Path, *lines: dict[str, Any], **more: Any) -> list[Imported]:
    return read(tmp_path, *lines, **more)[0].examples


def test_keys_come_from_the_columns_that_they_are_mapped_to(tmp_path: Path) -> None:
    row = {
        "nl": " who\r\nis ? ",
        "sql": "SELECT 1\n",
        "key": 7,
        "patient": 12,
        "db_id": "bank",
        "id": "unused",
        "else": [1],
    }
    columns = mapping(["question=nl", "query=sql", "id=key", "person=patient"])
    importer, _ = read(tmp_path, row, schemas=("hospital", "bank"), columns=columns)
    (example,) = importer.examples
    assert json.loads(example.line()) == {
        "id": "7", "question": "who\nis ?", "query": "SELECT 1", "db_id": "bank", "person": "12",
    }  # fmt: skip
    assert [schema.db_id for schema in importer.schemas()] == ["bank"]


@pytest.mark.parametrize("pairs", [["question"], ["question="], ["=nl"], ["a b=c"], ["\x1b=c"], ["id=a", "id=b"]])
def test_what_is_no_mapping_is_refused(pairs: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="--map "):
        mapping(pairs)


def test_every_problem_of_every_row_is_told_with_its_line(tmp_path: Path) -> None:
    good = {"id": "a", "question": "q", "query": "s"}
    rows: list[dict[str, Any]] = [
        good,
        {"id": "a", "question": "", "query": None, "db_id": "bank"},
        {"id": " ", "question": 3, "sql": "s"},
        {"id": "b", "question": "a\0b", "query": "\ud800"},
        {"id": "c", "question": "q", "query": "s" * (1 << 18)},
    ]
    importer, told = read(tmp_path, *rows)
    assert [example.id for example in importer.examples] == ["a"]
    assert told == [
        "rows.jsonl:2: db_id is that of no schema ('bank', there are 'hospital')",
        "rows.jsonl:2: question is empty",
        "rows.jsonl:2: query is missing",
        "rows.jsonl:2: id stands twice: correct it, or give --new-ids ('a', first at rows.jsonl:1)",
        "rows.jsonl:3: question is no text ('3')",
        "rows.jsonl:3: key query is missing: give --map query=KEY (there are id, question, sql)",
        "rows.jsonl:3: id is empty",
        "rows.jsonl:4: question holds a NUL character",
        "rows.jsonl:4: query holds half of a surrogate pair",
        "rows.jsonl:5: makes a line of more than 262,144 bytes",
    ]


def test_ids_are_made_where_there_are_none_and_lead_back_to_the_line(tmp_path: Path) -> None:
    rows = [{"id": "x", "question": "q", "query": "s"}, {"question": "q", "query": "s"}]
    assert [example.id for example in examples_of(tmp_path, *rows)] == ["x", "rows-2"]
    assert [example.id for example in examples_of(tmp_path, *rows, new_ids=True)] == ["rows-1", "rows-2"]


def test_ids_that_are_made_differ_between_files_of_like_names(tmp_path: Path) -> None:
    names = (
        "v1.0/train.jsonl",
        "v1.0/dev.jsonl",
        "v1/0/test.jsonl",
        "v1-0/test.jsonl",
        "ä/train.part1.jsonl",
        "ö/train.part1.jsonl",
    )
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"question": "q", "query": "s"}\n')

    findings = Findings()
    source = find_source(tmp_path, None)
    importer = Importer(source, Choices(columns={}, new_ids=True), Schemas({"hospital": SCHEMA}, {}), findings)
    for file in source.files:
        importer.read(file)

    assert list(findings.shown()) == []
    assert len({example.id for example in importer.examples}) == len(names)


def test_lines_without_a_database_are_to_the_one_that_is_named(tmp_path: Path) -> None:
    rows = [{"question": "q", "query": "s"}, {"question": "q", "query": "s", "db_id": "bank"}]
    two = ("hospital", "bank")
    _, told = read(tmp_path, *rows, schemas=two)
    assert told == ["rows.jsonl:1: db_id is missing, and there are several schemas: give --db-id"]
    named = examples_of(tmp_path, *rows, schemas=two, db_id="hospital")
    assert [example.db_id for example in named] == ["hospital", "bank"]
    chosen = examples_of(tmp_path, *rows, schemas=two, db_id="hospital", only=("bank",))
    assert [example.place for example in chosen] == ["rows.jsonl:2"]
    others = [{**rows[0], "db_id": "of nobody here"}, rows[1]]
    assert read(tmp_path, *others, schemas=two, only=("bank",))[1] == []  # what is not taken has no problems
    with pytest.raises(ConfigurationError, match="database 'banc' has no schema, there are 'hospital, bank'"):
        read(tmp_path, *rows, schemas=two, only=("banc",))


def test_control_characters_are_made_visible() -> None:
    assert visible("a\tb\r\n\x1b[31m\u202eü\ud800") == r"a\tb\r\n\x1b[31m\u202eü\ud800"


# --- schemas of Spider and BIRD


TABLES = {
    "db_id": "concerts",
    "table_names_original": ["singer", "Song"],
    "table_names": ["singer", "song"],
    "column_names_original": [[-1, "*"], [0, "Singer_ID"], [0, "Born"], [1, "Title"], [1, "Singer_ID"]],
    "column_types": ["text", "number", "time", "others", "integer"],
    "primary_keys": [1, [3, 4]],
    "foreign_keys": [[4, 1]],
}


def spider(folder: Path, *tables: object) -> Source:
    (folder / "tables.json").write_text(json.dumps(tables))
    for name in ("train_spider", "train_others", "dev"):
        rows = [{"db_id": "concerts", "question": f"{name} {n}", "query": f"SELECT {n}"} for n in range(3)]
        (folder / f"{name}.json").write_text(json.dumps(rows, indent=1))
    return find_source(folder, None)


def none_given(source: Source) -> Schemas:
    return schemas_of(source, file=None, database=None, db_id=None, findings=Findings())


def test_spider_is_read_with_its_schemas(tmp_path: Path) -> None:
    broken = {"db_id": "broken", "table_names_original": 3}
    source = spider(tmp_path, TABLES, broken)  # nobody asks for the other one
    assert [(file.shown, file.split) for file in source.files] == [
        ("train_spider.json", "train"),
        ("train_others.json", "train"),
        ("dev.json", "dev"),
    ]
    schemas = none_given(source)
    singer, song = schemas.of("concerts").tables
    assert [(c.name, c.type.value, c.primary_key, c.foreign_key) for c in (*singer.columns, *song.columns)] == [
        ("Singer_ID", "number", True, False),
        ("Born", "time", False, False),
        ("Title", "text", True, False),
        ("Singer_ID", "number", True, True),
    ]
    with pytest.raises(
        DataError, match=r"tables\.json: db_id 'broken' is not as in the tables\.json of Spider or BIRD"
    ):
        schemas.of("broken")


@pytest.mark.parametrize(
    "changes",
    [
        {"column_types": ["text"]},
        {"column_types": [1, 2, 3, 4, 5]},
        {"column_names_original": [[0]]},
        {"column_names_original": [[0, ["x"]]] * 5},
        {"table_names_original": ["singer", "SINGER"]},
        {"table_names_original": ["singer", "\x1b[2J"]},
        {"table_names_original": [["singer"], "x"]},
        {"primary_keys": [[[1]]]},
        {"foreign_keys": [[]]},
        {"foreign_keys": [7]},
    ],
)
def test_tables_that_are_none_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    schemas = none_given(spider(tmp_path, {**TABLES, **changes}))
    with pytest.raises(DataError, match=r"tables\.json"):
        schemas.of("concerts")


@pytest.mark.parametrize("content", ["", "{}", "[]", "[" * 9999])
def test_a_file_of_tables_that_is_no_list_is_refused(tmp_path: Path, content: str) -> None:
    source = spider(tmp_path, TABLES)
    (tmp_path / "tables.json").write_text(content)
    with pytest.raises(DataError, match=r"tables\.json"):
        none_given(source)


def test_bird_is_read_with_its_own_name_for_sql(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        folder = tmp_path / f"{split}_2024"
        folder.mkdir()
        (folder / f"{split}_tables.json").write_text(json.dumps([TABLES]))
        row = {"question_id": 0, "db_id": "concerts", "question": "q", "evidence": "e", "SQL": f"SELECT {split}"}
        (folder / f"{split}.json").write_text(json.dumps([row, row, {**row, "SQL": ""}]))  # all on one line
    source = find_source(tmp_path, None)
    findings = Findings()
    importer = Importer(source, Choices(columns={"evidence": "evidence"}), none_given(source), findings)
    for file in source.files:
        importer.read(file)
    assert [(e.id, e.query, e.split, e.more) for e in importer.examples] == [
        (f"{split}_2024-{split}-{n}", f"SELECT {split}", split, {"evidence": "e"})
        for split in ("train", "dev")
        for n in (1, 2)
    ]
    assert list(findings.shown()) == [
        f"{split}_2024/{split}.json:1: query is empty (element 3)" for split in ("train", "dev")
    ]


def test_a_schema_comes_from_one_place(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("question,query\n")
    source = find_source(tmp_path / "x.csv", None)
    with pytest.raises(ConfigurationError, match="nothing says what the tables are: give --schema FILE"):
        none_given(source)
    with pytest.raises(ConfigurationError, match="--schema and --database both"):
        schemas_of(source, file=tmp_path, database="sqlite:///x", db_id=None, findings=Findings())
    (tmp_path / "schema.json").write_bytes(SCHEMA.to_json())
    (tmp_path / "tables.json").write_text(json.dumps([TABLES]))
    for name, db_id in (("schema.json", SCHEMA.db_id), ("tables.json", "concerts")):
        schemas = schemas_of(source, file=tmp_path / name, database=None, db_id=None, findings=Findings())
        assert schemas.names == (db_id,)
    assert none_given(Source(files=(), schema=tmp_path / "schema.json")).names == (SCHEMA.db_id,)


# --- division


def example(number: int, query: str, *, split: Split | None = None, question: str = "", **more: str) -> Imported:
    return Imported(
        id=f"e-{number}", question=question or f"question {number}", query=query, db_id="hospital", more=more, split=split, place=f"x:{number}"
    )  # fmt: skip


def of_templates(*sizes: int) -> list[Imported]:
    queries = [f"SELECT {', '.join('a' * (n + 1))} FROM t WHERE b = " for n in range(len(sizes))]
    pairs = [(query, value) for query, size in zip(queries, sizes, strict=True) for value in range(size)]
    return [example(number, f"{query}{value}", unit=f"{value % 7}") for number, (query, value) in enumerate(pairs)]


def sizes(division: Division) -> dict[str, int]:
    return {name: len(lines) for name, lines in division.splits.items()}


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 8), min_size=3, max_size=8), st.booleans())
def test_no_template_and_no_group_is_in_two_splits_and_every_line_in_one(counts: list[int], by_unit: bool) -> None:
    examples = of_templates(*counts)
    if by_unit and len({e.more["unit"] for e in examples}) < 3:
        return
    division = divide(examples, by="unit" if by_unit else None, shares=SHARES)
    groups = [{e.more["unit"] if by_unit else template(e.query) for e in lines} for lines in division.splits.values()]
    assert all(groups)
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert sorted(e.id for lines in division.splits.values() for e in lines) == sorted(e.id for e in examples)


def test_the_shares_are_kept_where_groups_allow_it_and_the_order_of_rows_changes_nothing() -> None:
    examples = of_templates(*[5] * 40)
    division = divide(examples, by=None, shares=SHARES)
    assert sizes(division) == {"train": 160, "dev": 20, "test": 20}
    assert division.how == "by template of the SQL (40 templates)"
    assert division.leaks == (
        "values of unit that are in dev and in train: 5",
        "values of unit that are in test and in train: 5",
    )
    turned = divide(examples[::-1], by=None, shares=SHARES)
    assert {n: {e.id for e in lines} for n, lines in turned.splits.items()} == {
        n: {e.id for e in lines} for n, lines in division.splits.items()
    }
    assert sizes(divide(examples, by=None, shares={"dev": 0.2, "test": 0.0})) == {"train": 160, "dev": 40}


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(st.permutations([example(number, sql) for number, sql in enumerate(ALONE)]))
def test_the_same_lines_are_divided_alike_in_any_order(examples: list[Imported]) -> None:
    def divided(lines: list[Imported]) -> dict[Split, set[str]]:
        splits = divide(lines, by=None, shares={"dev": 0.3, "test": 0.3}).splits
        return {name: {e.id for e in of_split} for name, of_split in splits.items()}

    assert divided(examples) == divided(sorted(examples, key=lambda e: e.id))


def test_lines_that_are_all_alike_are_not_divided() -> None:
    with pytest.raises(
        DataError, match="20 lines cannot be divided by template: all have one template; give --split-by id"
    ):
        divide(of_templates(20), by=None, shares=SHARES)
    assert sizes(divide(of_templates(1, 1), by=None, shares=SHARES)) == {"train": 1, "dev": 1, "test": 0}
    with pytest.raises(DataError, match="1 lines cannot be divided"):
        divide(of_templates(1), by=None, shares=SHARES)
    division = divide(of_templates(20), by="id", shares=SHARES)
    assert sizes(division) == {"train": 16, "dev": 2, "test": 2}
    assert "2 of 2 questions of dev have SQL of a template that train has too" in division.leaks
    with pytest.raises(
        ConfigurationError, match="--split-by 'ward' is none of source, template, id, question, query, db_id, unit"
    ):
        divide(of_templates(20), by="ward", shares=SHARES)


def test_the_splits_of_the_source_stay_and_what_they_share_is_told() -> None:
    examples = [
        example(1, "SELECT a FROM t WHERE b = 1", split="train", question="Who  is it?", patient="7"),
        example(2, "SELECT max(a) FROM t", split="train", patient="8"),
        example(3, "SELECT x FROM y WHERE z = 'q'", split="dev", question="who is it?", patient="7"),
        example(4, "SELECT min(a) FROM t", split="dev", patient="9"),
        example(5, "SELECT a, b FROM t", split="test", patient="1"),
    ]
    division = divide(examples, by=None, shares=SHARES)
    assert sizes(division) == {"train": 2, "dev": 2, "test": 1}
    assert division.leaks == (
        "1 of 2 questions of dev stand in train too",
        "1 of 2 questions of dev have SQL of a template that train has too",
        "values of patient that are in dev and in train: 1",
    )
    without_dev = divide([e for e in examples if e.split != "dev"], by=None, shares=SHARES)
    assert sizes(without_dev) == {"train": 1, "dev": 1, "test": 1}
    assert "it has no dev" in without_dev.how
    anew = divide(examples, by="template", shares=SHARES)
    assert not [leak for leak in anew.leaks if "template" in leak]
    with pytest.raises(DataError, match="the source has no train split: give --split-by template"):
        divide(examples[2:], by=None, shares=SHARES)
    with pytest.raises(ConfigurationError, match="no name of a file says"):
        divide(of_templates(2, 2), by="source", shares=SHARES)


# --- the folder


def test_the_folder_is_made_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    division = divide(of_templates(4, 4, 4, 4), by=None, shares=SHARES)
    write_folder(tmp_path / "out", division, [SCHEMA, replace(SCHEMA, db_id="bank")])
    data = load_silo_data(tmp_path / "out")
    assert [schema.db_id for schema in data.schemas] == [SCHEMA.db_id, "bank"]
    assert sum(len(data.split(name)) for name in division.splits) == 16
    assert (tmp_path / "out").stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigurationError, match="is not an empty folder"):
        write_folder(tmp_path / "out", division, [SCHEMA])
    with pytest.raises(DataError, match="db_id"):  # what the agent would not read never gets its name
        write_folder(tmp_path / "other", division, [replace(SCHEMA, db_id="bank")])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
