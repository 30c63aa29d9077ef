"""`read_schema` on a real PostgreSQL server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorica_security.errors import ConfigurationError, DataError
from silo_agent.cli import main
from silo_agent.edges.workshop.database_schema import read_schema
from silo_agent.sql_sandbox import Limits, Sandbox, parse_database
from silo_agent.training.data.schema import Schema
from tests.support.command_line import run_command
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
    "CREATE DATABASE several",
)  # fmt: skip


SEVERAL = (
    "CREATE TABLE ward (id INT)",
    "CREATE SCHEMA billing",
    "CREATE TABLE billing.invoice (id INT PRIMARY KEY, total NUMERIC, salary NUMERIC)",
    "CREATE TABLE billing.line (invoice INT REFERENCES billing.invoice, price MONEY)",
    "CREATE MATERIALIZED VIEW billing.totals AS SELECT id, total FROM billing.invoice",
    "CREATE TABLE billing.salary (person TEXT)",
    "CREATE SCHEMA archive",
    "CREATE TABLE archive.old (id INT)",
    "CREATE SCHEMA closed",
    "CREATE TABLE closed.secret (id INT)",
    "CREATE SCHEMA bare",
    "GRANT USAGE ON SCHEMA billing, archive, bare TO reader",
    "GRANT SELECT ON ward, billing.line, billing.totals, closed.secret TO reader",
    "GRANT SELECT (id, total) ON billing.invoice TO reader",
    "ALTER TABLE billing.invoice ADD COLUMN gone INT",
    "ALTER TABLE billing.invoice DROP COLUMN gone",
)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as server:
        server.execute(*SETUP)
        server.execute(*SEVERAL, database="several")
        yield server


def test_tables_columns_types_and_keys(server: PostgresqlServer) -> None:
    entry = read_schema(parse_database(server.url(user="reader", password=PASSWORD))).entry
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


def test_every_schema_that_the_role_sees_is_taken_and_the_others_are_named(server: PostgresqlServer) -> None:
    target = parse_database(server.url(user="reader", password=PASSWORD, database="several"))
    live = read_schema(target)
    schema = Schema.from_json(json.dumps(live.entry).encode(), Path("schema.json"))
    assert [table.name for table in schema.tables] == ["ward", "billing.invoice", "billing.line", "billing.totals"]
    invoice, line = schema.tables[1:3]
    assert [(column.name, column.primary_key) for column in invoice.columns] == [("id", True), ("total", False)]
    assert [column.name for column in line.columns if column.foreign_key] == ["invoice"]
    assert live.left_out == (
        "schema archive: this role has no SELECT on any of its 1 tables",
        "schema bare: it holds no table",
        "table billing.salary: this role has no SELECT on it",
        "column billing.invoice.salary: this role has no SELECT on it",
        "schema closed: this role has no USAGE on it",
    )
    with Sandbox(target, Limits()) as box:  # a name of the schema is one that the database knows
        assert box.run("SELECT id, total FROM billing.invoice").rows == ()


def test_schemas_may_be_chosen(server: PostgresqlServer) -> None:
    target = parse_database(server.url(user="reader", password=PASSWORD, database="several"))
    live = read_schema(target, only=["billing"])
    assert [table["name"] for table in live.entry["tables"]] == ["billing.invoice", "billing.line", "billing.totals"]
    assert "schema public: --only does not name it" in live.left_out
    with pytest.raises(
        ConfigurationError, match="has no schema 'biling': --only may name public, archive, bare, billing, closed"
    ):
        read_schema(target, only=["biling"])


def test_the_command_prints_the_schema_and_says_on_stderr_what_it_left_out(server: PostgresqlServer) -> None:
    done = run_command(main, "schema", server.url(user="reader", password=PASSWORD, database="several"))
    assert json.loads(done.out)["tables"][1]["name"] == "billing.invoice"
    assert "left out: schema closed: this role has no USAGE on it\n" in done.err
    assert PASSWORD not in done.err + done.out


def test_an_import_says_what_its_schema_leaves_out(server: PostgresqlServer, tmp_path: Path) -> None:
    rows = "".join(f"question {n},SELECT {'a, ' * n}b FROM ward\n" for n in range(3))
    (tmp_path / "rows.csv").write_text(
        f"question,query\n{rows}".replace("SELECT", '"SELECT').replace("ward\n", 'ward"\n')
    )
    url = server.url(user="reader", password=PASSWORD, database="several")
    done = run_command(main, "import", tmp_path / "rows.csv", "--database", url, "--out", tmp_path / "out", "--yes")
    assert done.code == 0, done.err
    assert "schema.json leaves out schema closed: this role has no USAGE on it\n" in done.out
    assert PASSWORD not in done.out + (tmp_path / "out" / "schema.json").read_text()


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
