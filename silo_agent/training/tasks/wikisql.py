"""Questions of WikiSQL, each to a table of its own whose header stands in its line (Zhong, Xiong and Socher 2017).

A line has `id`, `question`, `header`, `types` (text or real) and `sql`, as WikiSQL's own files have it: `agg`, `sel`
and `conds`. What is asked for is that query in one form (wikisql_query.py). Keys beyond these are not read. There are
no rows, so nothing is executed.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from silo_agent.training.data.schema import Column, ColumnType, Schema, Table
from silo_agent.training.data.text_to_sql_data import (
    DataLimits,
    Example,
    LineFault,
    SiloData,
    read_splits,
    require_characters,
    require_no_schema,
    text_of,
    unit_of,
)
from silo_agent.training.tasks.wikisql_query import (
    AGGREGATES,
    METRICS,
    MOST_CONDITIONS,
    OPERATORS,
    Condition,
    Query,
    column_names,
    parsed,
    right,
    text,
)
from silo_wire.canonical import canonical_json, digest_of

MOST_COLUMNS: Final = 256
_TYPES: Final = {"text": ColumnType.TEXT, "real": ColumnType.NUMBER}


@dataclass(frozen=True, slots=True)
class WikiSql:
    """Single-table questions, judged as a whole and in six parts."""

    name: str = "wikisql"
    metrics: tuple[str, ...] = METRICS
    shows_schema: bool = True
    masks_loss: bool = False
    label: str = "sql"

    def marked_by(self, keys: Set[str]) -> bool:
        return {"header", "types"} <= keys

    def data(
        self,
        folder: Path,
        limits: DataLimits | None = None,
        *,
        unit_field: str = "",
        private: bool = False,
        labelled: bool = True,
    ) -> SiloData:
        require_no_schema(folder, self.name, lines="tables of their own")
        schemas: dict[str, Schema] = {}

        def example(value: Mapping[str, object], grouped_by: str) -> Example:
            schema = _table(value)
            id_, question = text_of(value, "id"), text_of(value, "question")
            query = _query_text(value, schema) if labelled else ""
            unit = unit_of(value, grouped_by)
            schemas.setdefault(schema.db_id, schema)
            return Example(id_, question, query, schema.db_id, unit)

        splits = read_splits(
            folder, limits or DataLimits(), example, unit_field=unit_field, private=private, labelled=labelled
        )
        return splits.data(*schemas.values(), task=self.name, labelled=labelled)

    def shown(self, schema: Schema) -> str:
        """`| name : text | name : real`, as queries have the names."""
        return " ".join(f"| {column.name} : {column.sql_type}" for column in schema.tables[0].columns)

    def right(self, predicted: str, gold: str, schema: Schema) -> tuple[bool, ...]:
        names = [column.name for column in schema.tables[0].columns]
        asked = parsed(gold, names)
        assert asked is not None, "reading the data has tried it"
        return right(parsed(predicted, names), asked)


WIKISQL: Final = WikiSql()


def _table(value: Mapping[str, object]) -> Schema:
    """Its name follows from its header alone: whatever lines say of a table, none contradicts another."""
    header, types = (_texts(value, key) for key in ("header", "types"))
    if len(header) != len(types):
        raise LineFault(f"header has {len(header)} columns, types has {len(types)}")
    for kind in types:
        if kind not in _TYPES:
            raise LineFault(f"types has {kind[:20]!r}, which is not one of {', '.join(_TYPES)}")
    columns = tuple(
        Column(name=name, sql_type=kind, type=_TYPES[kind], primary_key=False, foreign_key=None)
        for name, kind in zip(column_names(header), types, strict=True)
    )
    return Schema(digest_of(canonical_json([header, types])), "WikiSQL", (Table("table", columns),))


def _texts(value: Mapping[str, object], key: str) -> list[str]:
    if key not in value:
        raise LineFault(f"key {key} is missing")
    texts = value[key]
    if not isinstance(texts, list) or not 1 <= len(texts) <= MOST_COLUMNS:
        raise LineFault(f"{key} is not a list of 1 to {MOST_COLUMNS} texts")
    for one in texts:
        if not isinstance(one, str):
            raise LineFault(f"{key} has a {type(one).__name__}, expected text")
        require_characters(one, key)
    return texts


def _query_text(value: Mapping[str, object], schema: Schema) -> str:
    names = [column.name for column in schema.tables[0].columns]
    query = _query(value.get("sql"), len(names))
    written = text(query, names)
    if parsed(written, names) != query:
        raise LineFault("sql is too long to be asked for")
    return written


def _query(sql: object, columns: int) -> Query:
    if not isinstance(sql, dict):
        raise LineFault("sql is not an object of agg, sel and conds")
    conditions = sql.get("conds")
    if not isinstance(conditions, list) or len(conditions) > MOST_CONDITIONS:
        raise LineFault(f"sql conds is not a list of at most {MOST_CONDITIONS} conditions")
    return Query(
        _index(sql.get("agg"), len(AGGREGATES), "agg"),
        _index(sql.get("sel"), columns, "sel"),
        tuple(_condition(it, columns) for it in conditions),
    )


def _condition(value: object, columns: int) -> Condition:
    if not isinstance(value, list) or len(value) != 3:
        raise LineFault("sql conds has one that is not column, operator and value")
    column = _index(value[0], columns, "conds column")
    operator = _index(value[1], len(OPERATORS), "conds operator")
    match value[2]:
        case str() as words:
            require_characters(words, "sql conds value")
            return Condition(column, operator, " ".join(words.split()))
        case bool():
            pass
        case int() as number:
            return Condition(column, operator, str(number), quoted=False)
        case float() as number if math.isfinite(number):
            return Condition(column, operator, repr(number), quoted=False)
    raise LineFault("sql conds has a value that is neither text nor a finite number")


def _index(value: object, below: int, what: str) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise LineFault(f"sql {what} is not a number from 0 to {below - 1}")
    return value
