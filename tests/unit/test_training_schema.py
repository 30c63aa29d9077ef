"""schema.json: read strictly, written back, and as the model sees it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import DataError
from silo_agent.training.data.schema import Column, ColumnType, Schema, Table, serialise

PATH = Path("silo/schema.json")
COLUMN = {"name": "ID", "sql_type": "int(11)", "type": "number", "primary_key": True, "foreign_key": False}
CITY = {"name": "CITY", "sql_type": "varchar(9)", "type": "text", "primary_key": False}
VALID = {
    "db_id": "geo",
    "source": "by hand",
    "tables": [{"name": "Town", "columns": [COLUMN, CITY]}, {"name": "ROAD", "columns": [COLUMN]}],
}


def parse(value: object) -> Schema:
    return Schema.from_json(json.dumps(value).encode(), PATH)


def test_a_valid_file_by_hand() -> None:
    number = Column(name="ID", sql_type="int(11)", type=ColumnType.NUMBER, primary_key=True, foreign_key=False)
    city = Column(name="CITY", sql_type="varchar(9)", type=ColumnType.TEXT, primary_key=False, foreign_key=None)
    assert parse(VALID) == Schema("geo", "by hand", (Table("Town", (number, city)), Table("ROAD", (number,))))


def test_the_models_view_is_lower_case_in_source_order() -> None:
    assert serialise(parse(VALID)) == "| town : id , city | road : id"


def with_column(**changes: object) -> dict[str, object]:
    return {**VALID, "tables": [{"name": "Town", "columns": [{**COLUMN, **changes}]}]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "silo/schema.json: expected an object"),
        ({**VALID, "extra": 1}, "silo/schema.json: key 'extra' is unknown"),
        ({"db_id": "x", "tables": []}, "silo/schema.json: key 'source' is missing"),
        ({**VALID, "db_id": 3}, "silo/schema.json: key 'db_id' is 3"),
        ({**VALID, "tables": []}, "silo/schema.json: key 'tables' must be a list that is not empty"),
        ({**VALID, "tables": {}}, "silo/schema.json: key 'tables' must be a list"),
        ({**VALID, "tables": [3]}, "silo/schema.json: table 0: expected an object"),
        ({**VALID, "tables": [{"name": "Town", "columns": []}]}, r"silo/schema.json: table 0 \(Town\): key 'columns'"),
        ({**VALID, "tables": VALID["tables"] * 2}, "silo/schema.json: table name 'Town' stands twice"),  # type: ignore[operator]
        (with_column(type="date"), r"table 0 \(Town\), column 0 \(ID\): type 'date' is not one of text, number, time"),
        (with_column(type=[]), r"column 0 \(ID\): type \[\] is not one of"),
        (
            with_column(primary_key="yes"),
            r"table 0 \(Town\), column 0 \(ID\): key 'primary_key' is 'yes', expected true or false",
        ),
        (with_column(foreign_key=None), r"column 0 \(ID\): key 'foreign_key' is None"),
        (with_column(name=" "), "column 0: key 'name' is ' ', expected printable text"),
        (with_column(name="a\nb"), "column 0: key 'name'"),
        (with_column(nullable=True), "column 0: key 'nullable' is unknown"),
        (
            {**VALID, "tables": [{"name": "T", "columns": [COLUMN, {**COLUMN, "name": "id"}]}]},
            r"table 0 \(T\), column name 'id' stands twice",
        ),
    ],
)
def test_what_is_wrong_is_named_by_file_table_and_key(value: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse(value)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b'{"db_id": "a", "db_id": "b"}', b"[" * 100_000])
def test_bytes_that_are_no_json_object(raw: bytes) -> None:
    with pytest.raises(DataError, match=r"silo/schema\.json"):
        Schema.from_json(raw, PATH)


names = st.text("aBcß_é 9\"'日", min_size=1, max_size=6).filter(str.strip)
columns = st.builds(
    Column,
    name=names,
    sql_type=names,
    type=st.sampled_from(ColumnType),
    primary_key=st.booleans(),
    foreign_key=st.none() | st.booleans(),
)


def distinct(things: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(things, min_size=1, max_size=4, unique_by=lambda t: t.name.lower()).map(tuple)  # type: ignore[attr-defined]


@given(st.builds(Schema, names, names, distinct(st.builds(Table, names, distinct(columns)))))
def test_written_and_read_back_is_equal(schema: Schema) -> None:
    assert Schema.from_json(schema.to_json(), PATH) == schema
