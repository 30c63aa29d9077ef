"""`read_schema` on a real PostgreSQL server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from security.errors import DataError
from silo_agent.edges.database_schema import read_schema
from silo_agent.sql_sandbox import parse_database
from silo_agent.training.schema import Schema
from tests.support.postgresql import PostgresqlServer, running_postgresql

PASSWORD = "s3cr/et@?#"
SETUP = (
    f"CREATE ROLE reader LOGIN PASSWORD '{PASSWORD}'",
    "CREATE TABLE ward (id SERIAL PRIMARY KEY, name VARCHAR(40) NOT NULL, opened DATE)",
    """CREATE TABLE "Stay" (patient BIGINT, ward INTEGER REFERENCES ward, cost NUMERIC(8, 2), price MONEY, share DOUBLE PRECISION,
        urgent BOOLEAN, admitted TIMESTAMPTZ, hour TIME, length INTERVAL, tags TEXT[], doc JSONB, key UUID, PRIMARY KEY (patient, ward))""",
    "CREATE VIEW costly AS SELECT patient, cost FROM \"Stay\" WHERE cost > 1000",
    "CREATE DATABASE \"empty one\"",
    'GRANT SELECT ON ward, "Stay", costly TO reader',
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as server:
        server.execute(*SETUP)
        yield server


def test_tables_columns_types_and_keys(server: PostgresqlServer) -> None:
    entry = read_schema(parse_database(server.url(user="reader", password=PASSWORD)))
    schema = Schema.from_json(json.dumps(entry).encode(), Path("schema.json"))
    assert (schema.db_id, schema.source) == ("postgres", "postgresql:///postgres")
    assert [table.name for table in schema.tables] == ["Stay", "ward", "costly"]
    stay, ward, costly = schema.tables
    assert {column.name: column.type.value for column in stay.columns} == {
        "patient": "number", "ward": "number", "cost": "number", "price": "number", "share": "number", "urgent": "number",
        "admitted": "time", "hour": "time", "length": "time", "tags": "text", "doc": "text", "key": "text",
    }  # fmt: skip
    assert [column.name for column in stay.columns if column.primary_key] == ["patient", "ward"]
    assert [column.name for column in stay.columns if column.foreign_key] == ["ward"]
    assert [(column.name, column.sql_type) for column in ward.columns] == [
        ("id", "INTEGER"),
        ("name", "VARCHAR(40)"),
        ("opened", "DATE"),
    ]
    assert [column.name for column in costly.columns] == ["patient", "cost"]


def test_an_empty_database_is_named(server: PostgresqlServer) -> None:
    target = parse_database(server.url(user="reader", password=PASSWORD, database="empty%20one"))
    with pytest.raises(DataError, match="postgresql:///empty%20one has no table"):
        read_schema(target)


@pytest.mark.parametrize("user", ["reader", "nobody"])
def test_no_error_holds_the_password(server: PostgresqlServer, tmp_path: Path, user: str) -> None:
    for folder in (tmp_path, server.folder):
        target = parse_database(f"postgresql://{user}:s3cret@/missing?host={folder}")
        with pytest.raises(DataError, match="postgresql:///missing cannot be read") as caught:
            read_schema(target)
        assert "s3cret" not in f"{caught.value}{caught.value.__cause__}"
