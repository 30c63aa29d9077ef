"""A database's tables and columns as the model is told of them: schema.json, parsed once and strictly.

The form is that of the text2sql data: db_id, source, tables of name and columns of name, sql_type, type (text, number
or time), primary_key and foreign_key; the last may be absent, where the source does not say.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lorica_security.errors import DataError


class ColumnType(Enum):
    TEXT = "text"
    NUMBER = "number"
    TIME = "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column; `foreign_key` is None where the source does not say."""

    name: str
    sql_type: str
    type: ColumnType
    primary_key: bool
    foreign_key: bool | None


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one database in source order."""

    db_id: str
    source: str
    tables: tuple[Table, ...]

    @classmethod
    def from_json(cls, raw: bytes, path: Path) -> "Schema":
        """The schema that `raw` (the bytes of `path`) holds; raises DataError naming file, table and key."""
        return cls._of(_parsed(raw, path), f"{path}")

    @classmethod
    def all_from_json(cls, raw: bytes, path: Path) -> "tuple[Schema, ...]":
        """The same where `raw` may also be a list, of a silo that has questions to several databases; at least one."""
        value = _parsed(raw, path)
        if not isinstance(value, list):
            return (cls._of(value, f"{path}"),)
        schemas = tuple(cls._of(entry, f"{path}: schema {index}") for index, entry in enumerate(value))
        if not schemas:
            raise DataError(f"{path} is an empty list: make a schema with 'silo-agent schema URL'")
        _require_distinct((schema.db_id for schema in schemas), f"{path}: db_id")
        return schemas

    @classmethod
    def _of(cls, value: object, where: str) -> "Schema":
        top = _object(value, {"db_id", "source", "tables"}, where)
        tables = tuple(
            _table(entry, f"{where}: table {index}") for index, entry in enumerate(_list(top, "tables", where))
        )
        _require_distinct((table.name for table in tables), f"{where}: table")
        return cls(_text(top, "db_id", where), _text(top, "source", where), tables)

    def to_json(self) -> bytes:
        """The bytes of a schema.json, one key a line; from_json gives an equal schema back."""
        tables = [
            {"name": table.name, "columns": [_column_entry(column) for column in table.columns]}
            for table in self.tables
        ]
        value = {"db_id": self.db_id, "source": self.source, "tables": tables}
        return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def serialise(schema: Schema) -> str:
    """The model's view: `| table : column , column | table : column`, lower-cased, in source order (DESIGN section
    3)."""
    return " ".join(
        f"| {table.name} : {' , '.join(column.name for column in table.columns)}" for table in schema.tables
    ).lower()


def _parsed(raw: bytes, path: Path) -> object:
    try:
        value: object = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a JSON schema ({error}): make it with 'silo-agent schema URL'") from error
    return value


def _table(value: object, where: str) -> Table:
    entry = _object(value, {"name", "columns"}, where)
    name = _text(entry, "name", where)
    where = f"{where} ({name})"
    columns = tuple(
        _column(column, f"{where}, column {index}") for index, column in enumerate(_list(entry, "columns", where))
    )
    _require_distinct((column.name for column in columns), f"{where}, column")
    return Table(name, columns)


def _column(value: object, where: str) -> Column:
    entry = _object(value, {"name", "sql_type", "type", "primary_key"}, where, optional={"foreign_key"})
    name = _text(entry, "name", where)
    where = f"{where} ({name})"
    try:
        kind = ColumnType(entry["type"])
    except ValueError as error:
        raise DataError(f"{where}: type {entry['type']!r} is not one of text, number, time") from error
    return Column(
        name=name,
        sql_type=_text(entry, "sql_type", where),
        type=kind,
        primary_key=_flag(entry, "primary_key", where),
        foreign_key=_flag(entry, "foreign_key", where) if "foreign_key" in entry else None,
    )


def _column_entry(column: Column) -> dict[str, object]:
    entry: dict[str, object] = {
        "name": column.name,
        "sql_type": column.sql_type,
        "type": column.type.value,
        "primary_key": column.primary_key,
    }
    return entry if column.foreign_key is None else {**entry, "foreign_key": column.foreign_key}


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entry = dict(pairs)
    if len(entry) != len(pairs):
        raise ValueError(f"a key stands twice among {[key for key, _ in pairs]}")
    return entry


def _object(
    value: object, required: set[str], where: str, *, optional: frozenset[str] | set[str] = frozenset()
) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object with keys {sorted(required)}")
    if missing := sorted(required - value.keys()):
        raise DataError(f"{where}: key {missing[0]!r} is missing")
    if unknown := sorted(value.keys() - required - optional):
        raise DataError(f"{where}: key {unknown[0]!r} is unknown: allowed are {sorted(required | optional)}")
    return value


def _list(entry: Mapping[str, object], key: str, where: str) -> list[object]:
    value = entry[key]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: key {key!r} must be a list that is not empty")
    return value


def _text(entry: Mapping[str, object], key: str, where: str) -> str:
    value = entry[key]
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise DataError(f"{where}: key {key!r} is {value!r}, expected printable text")
    return value


def _flag(entry: Mapping[str, object], key: str, where: str) -> bool:
    value = entry[key]
    if not isinstance(value, bool):
        raise DataError(f"{where}: key {key!r} is {value!r}, expected true or false")
    return value


def _require_distinct(names: Iterable[str], where: str) -> None:
    """SQL names do not tell case apart, and the model sees them lower-cased."""
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise DataError(f"{where} name {name!r} stands twice")
        seen.add(name.lower())
