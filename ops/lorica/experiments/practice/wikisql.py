"""WikiSQL's questions (Zhong, Xiong, Socher 2017), with SQL as the text-to-SQL silos have it instead of WikiSQL's own.

A WikiSQL table has a header and no name: here it is called `page`, and `High rebounds` of its columns is
`high_rebounds`.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lorica.experiments.practice.random_schemas import Pair
from lorica_security.errors import ConfigurationError
from silo_agent.training.data.schema import Column, ColumnType, Schema, Table

_AGGREGATES = ("", "MAX", "MIN", "COUNT", "SUM", "AVG")
_OPERATORS = ("=", ">", "<")
_TABLE = "page"


def pairs(file: Path) -> Iterator[Pair]:
    """Of a gzipped file of lines with question, header, types and sql; raises ConfigurationError for one that is not
    so."""
    try:
        lines = (
            gzip.decompress(file.read_bytes()).decode().removesuffix("\n").split("\n")
        )  # not splitlines: a question may hold U+2028
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{file} cannot be read: {error}; give WikiSQL's labelled questions as .jsonl.gz"
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            yield _pair(json.loads(line))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigurationError(f"{file}, line {number} is no question of WikiSQL: {error!r}") from error


def _pair(line: dict[str, Any]) -> Pair:
    names = _names(line["header"])
    columns = tuple(
        Column(name=name, sql_type=kind, type=_kind(kind), primary_key=False, foreign_key=False)
        for name, kind in zip(names, line["types"], strict=True)
    )
    schema = Schema(line["id"], "WikiSQL", (Table(_TABLE, columns),))
    alias = f"{_TABLE.upper()}alias0"
    sql = line["sql"]
    shown = f"{alias}.{names[sql['sel']].upper()}"
    if aggregate := _AGGREGATES[sql["agg"]]:
        shown = f"{aggregate}( {shown} )"
    conditions = [
        f"{alias}.{names[column].upper()} {_OPERATORS[operator]} {_value(value)}"
        for column, operator, value in sql["conds"]
    ]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    # Text for a model, which nothing runs.
    query = f"SELECT {shown} FROM {_TABLE.upper()} AS {alias}{where} ;"  # noqa: S608  # nosec B608
    return Pair(line["question"], query, schema)


def _names(header: list[str]) -> list[str]:
    names: list[str] = []
    for title in header:
        name = re.sub(r"\W+", "_", title.lower()).strip("_") or "column"
        names.append(name if name not in names else f"{name}_{len(names)}")
    return names


def _kind(kind: str) -> ColumnType:
    return ColumnType.NUMBER if kind == "real" else ColumnType.TEXT


def _value(value: str | float) -> str:
    return '"{}"'.format(value.replace('"', "'")) if isinstance(value, str) else str(value)
