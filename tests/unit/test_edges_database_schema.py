"""`read_schema` on SQLite: the same form that the training data has, and nothing written."""

import json
import sqlite3
from pathlib import Path

import pytest

from lorica_security.errors import ConfigurationError, DataError
from silo_agent.edges.workshop.database_schema import read_schema
from silo_agent.sql_sandbox import SqliteTarget
from silo_agent.training.data.schema import ColumnType, Schema, serialise

TABLES = """
CREATE TABLE ward (id INTEGER PRIMARY KEY, name VARCHAR(40), opened DATE);
CREATE TABLE "Patient Stay" (
    patient INT(11), ward INTEGER REFERENCES ward (id), cost DECIMAL(8, 2), share DOUBLE, rate FLOAT, weight REAL, urgent BOOLEAN,
    admitted DATETIME, stamp TIMESTAMP, hour TIME, note LONGTEXT, photo BLOB, anything,
    PRIMARY KEY (patient, ward)
);
CREATE VIEW costly AS SELECT patient, cost FROM "Patient Stay" WHERE cost > 1000;
"""


def make(path: Path, script: str) -> SqliteTarget:
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()
    return SqliteTarget(path)


def test_tables_columns_types_and_keys(tmp_path: Path) -> None:
    target = make(tmp_path / "hos#pital?.db", TABLES)
    before = target.path.read_bytes()
    entry = read_schema(target).entry
    assert target.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["hos#pital?.db"]

    schema = Schema.from_json(json.dumps(entry).encode(), Path("schema.json"))
    assert (schema.db_id, schema.source) == ("hos#pital?", f"sqlite:///{target.path}")
    assert serialise(schema) == (
        "| patient stay : patient , ward , cost , share , rate , weight , urgent , admitted , stamp , hour , note , "
        "photo , anything | ward : id , name , opened | costly : patient , cost"
    )
    stay, ward, _ = schema.tables
    kinds = {column.name: column.type for column in (*stay.columns, *ward.columns)}
    number, text, time = ColumnType.NUMBER, ColumnType.TEXT, ColumnType.TIME
    assert kinds == {
        "patient": number, "ward": number, "cost": number, "share": number, "rate": number, "weight": number, "urgent": number,
        "admitted": time, "stamp": time, "hour": time, "note": text, "photo": text, "anything": text,
        "id": number, "name": text, "opened": time,
    }  # fmt: skip
    assert {column.name for column in stay.columns if column.primary_key} == {"patient", "ward"}
    assert {column.name for column in stay.columns if column.foreign_key} == {"ward"}
    assert [column.primary_key for column in ward.columns] == [True, False, False]


def test_the_name_may_be_chosen(tmp_path: Path) -> None:
    assert read_schema(make(tmp_path / "x.db", TABLES), db_id="clinic-1").entry["db_id"] == "clinic-1"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is not a file"), (b"dear sir or madam" * 100, "cannot be read"), (b"", "has no table")],
)
def test_a_database_that_has_no_schema_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "none.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rf"none\.db.*{message}"):
        read_schema(SqliteTarget(path))
    assert path.exists() is (content is not None)


def test_sqlite_has_no_schemas_to_choose_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is SQLite, which has no schemas: leave --only out"):
        read_schema(make(tmp_path / "x.db", TABLES), only=["main"])


def test_a_database_with_a_write_ahead_log_is_read_without_a_file_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make(tmp_path / "hospital.db", f"PRAGMA journal_mode = WAL; {TABLES}")
    beside: list[list[str]] = []
    connect = sqlite3.connect

    def watched(*arguments: str, **options: bool) -> sqlite3.Connection:
        connection = connect(*arguments, **options)  # type: ignore[call-overload]
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        beside.append([path.name for path in tmp_path.iterdir()])
        return connection  # type: ignore[no-any-return]

    monkeypatch.setattr("silo_agent.edges.workshop.database_schema.sqlite3.connect", watched)

    assert len(read_schema(target).entry["tables"]) == 3
    assert beside
    assert all(names == ["hospital.db"] for names in beside)
