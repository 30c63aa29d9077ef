"""The schemas of an import: of a live database, of a schema.json, or of the tables.json that Spider and BIRD have."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lorica_security.errors import ConfigurationError, DataError
from silo_agent.edges.data_import.findings import Findings, shortened
from silo_agent.edges.data_import.sources import Source
from silo_agent.edges.workshop.database_schema import read_schema
from silo_agent.sql_sandbox import parse_database
from silo_agent.training.data.schema import Schema
from silo_agent.training.data.text_to_sql_data import DataLimits

_NUMBERS: Final = ("number", "integer", "real", "boolean", "float", "double", "decimal", "numeric")
_TIMES: Final = ("time", "date", "datetime", "timestamp")


class Schemas:
    """By db_id. Those of a tables.json are parsed when a question is asked of them: some data sets have hundreds."""

    def __init__(self, whole: Mapping[str, Schema], raw: Mapping[str, tuple[Path, object]]) -> None:
        self._whole = dict(whole)
        self._raw = raw

    def __contains__(self, db_id: str) -> bool:
        return db_id in self._whole or db_id in self._raw

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._whole, *self._raw)

    def of(self, db_id: str) -> Schema:
        """Raises DataError naming the file and what is wrong in it."""
        if db_id not in self._whole:
            path, entry = self._raw[db_id]
            self._whole[db_id] = _of_tables(entry, path)
        return self._whole[db_id]


NO_SCHEMAS: Final = Schemas({}, {})
"""Of lines that are to no database."""


def schemas_of(
    source: Source, *, file: Path | None, database: str | None, db_id: str | None, findings: Findings
) -> Schemas:
    """From `--schema`, `--database`, or what lies in the source; raises ConfigurationError where that is none, or
    two."""
    if file and database:
        raise ConfigurationError("--schema and --database both say what the tables are: give one of them")
    if database:
        live = read_schema(parse_database(database), db_id=db_id)
        for each in live.left_out:
            findings.remark(f"schema.json leaves out {each}")
        schema = Schema.from_json(json.dumps(live.entry).encode(), Path(live.entry["source"]))
        return Schemas({schema.db_id: schema}, {})
    if chosen := file or source.schema:
        return _of_file(chosen)
    found: dict[str, tuple[Path, object]] = {}
    for path in source.tables:
        found = {**_entries(path, _parsed(path)), **found}  # test_tables.json has those of tables.json too
    if not found:
        raise ConfigurationError(
            "nothing says what the tables are: give --schema FILE (a schema.json, or a tables.json as Spider has "
            "it) or --database URL"
        )
    return Schemas({}, found)


def _of_file(path: Path) -> Schemas:
    value = _parsed(path)
    if isinstance(value, list) and value and isinstance(value[0], dict) and "table_names_original" in value[0]:
        return Schemas({}, _entries(path, value))
    return Schemas({schema.db_id: schema for schema in Schema.all_from_json(_read(path), path)}, {})


def _read(path: Path) -> bytes:
    most = DataLimits().max_schema_bytes
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(raw) > most:
        raise DataError(f"{path} has more than {most} bytes: it is not a schema")
    return raw


def _parsed(path: Path) -> object:
    try:
        value: object = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}): replace it") from error
    return value


def _entries(path: Path, value: object) -> dict[str, tuple[Path, object]]:
    """By db_id; raises DataError where there is none."""
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    found: dict[str, tuple[Path, object]] = {
        entry["db_id"]: (path, entry) for entry in entries if isinstance(entry.get("db_id"), str)
    }
    if not found:
        raise DataError(f"{path} is no list of schemas: take the tables.json of the data set")
    return found


def _of_tables(entry: object, path: Path) -> Schema:
    """One element of a tables.json: names of tables, and columns as pairs of a table's number and a name."""
    assert isinstance(entry, dict)
    where = f"{path}: db_id {shortened(str(entry['db_id']))}"
    try:
        names: list[str] = list(entry["table_names_original"])
        columns = list(zip(entry["column_names_original"], entry["column_types"], strict=True))
        primary = {number for each in entry["primary_keys"] for number in (each if isinstance(each, list) else [each])}
        foreign = {pair[0] for pair in entry["foreign_keys"]}
        tables: list[dict[str, object]] = [
            {
                "name": name,
                "columns": [
                    {
                        "name": column,
                        "sql_type": kind,
                        "type": _type(kind),
                        "primary_key": at in primary,
                        "foreign_key": at in foreign,
                    }
                    for at, ((of, column), kind) in enumerate(columns)
                    if of == number  # the first column is * and of no table
                ],
            }
            for number, name in enumerate(names)
        ]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(
            f"{where} is not as in the tables.json of Spider or BIRD ({error!r}): replace the file"
        ) from error
    value = {"db_id": entry["db_id"], "source": path.name, "tables": tables}
    return Schema.from_json(json.dumps(value).encode(), Path(where))


def _type(kind: str) -> str:
    word = kind.lower()
    return "number" if word in _NUMBERS else "time" if word in _TIMES else "text"
