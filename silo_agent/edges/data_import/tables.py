"""Rows of CSV, TSV, JSON lines and JSON files, by the standard library alone."""

import csv
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from silo_agent.edges.data_import.findings import Findings, shortened
from silo_agent.edges.data_import.text_files import TextSource, opened_text

DELIMITERS = (",", ";", "\t")


@dataclass(frozen=True, slots=True)
class Row:
    """`line` is where it begins in a text file, and its number in other files, from 1 on.

    `element` is its number in a list, of which several elements may be on one line; 0 where there is no list.
    """

    line: int
    values: Mapping[str, object]
    element: int = 0


@dataclass(frozen=True, slots=True)
class NoText:
    """A value that is neither text nor a whole number, as it is shown."""

    shown: str

    def __str__(self) -> str:
        return self.shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How files are read: `wanted` are the columns that count, those of `required` have to be there."""

    findings: Findings
    encoding: str = "utf-8"
    required: Mapping[str, str]
    wanted: Collection[str]

    def has_columns(self, shown: str, columns: Sequence[str]) -> bool:
        """Whether a file with these columns can be read; else that is a problem, with a proposal where one is
        missing."""
        twice = [name for name, count in Counter(columns).items() if name and count > 1]
        if twice:
            self.findings.problem(shown, 0, f"column {shortened(twice[0])} stands twice: rename one of them")
            return False
        missing = {key: column for key, column in self.required.items() if column not in columns}
        for key, column in missing.items():
            self.findings.problem(shown, 0, self.no_column(key, column, columns))
        return not missing

    def no_column(self, key: str, column: str, columns: Collection[str]) -> str:
        alike = [
            other
            for other in columns
            if other.casefold() in _USUAL.get(key, ()) or other.casefold() == column.casefold()
        ]
        proposal = alike[0] if len(alike) == 1 else "COLUMN"
        there = ", ".join(shortened(other, 30) for other in list(columns)[:20]) or "none"
        return f"column {shortened(column)} is missing, the columns are {there}: give --map {key}={proposal}"


_USUAL = {"question": ("nl", "utterance", "nl_question"), "query": ("sql", "sql_query", "gold_sql", "gold")}


def delimited(path: Path, shown: str, reading: Reading, *, delimiter: str = "") -> Iterator[Row]:
    """Of a file with a line of column names; without `delimiter`, whichever of DELIMITERS makes most columns of that
    line."""
    findings = reading.findings
    with opened_text(path, shown, reading.encoding, findings) as source:
        lines = source.lines()
        first = next(lines, "")
        table = csv.reader(chain([first], lines), delimiter=delimiter or _delimiter(first), strict=True)
        try:
            header = [name.strip() for name in next(table, [])]
        except csv.Error as error:
            findings.problem(shown, 1, "the line of column names is not one", str(error))
            return
        if not reading.has_columns(shown, header):
            return
        yield from _cells(table, header, shown, findings)


def _cells(table: Any, header: list[str], shown: str, findings: Findings) -> Iterator[Row]:
    """`table` is a csv.reader; after a line that is no row it goes on with the next."""
    while True:
        line = table.line_num + 1
        try:
            cells = next(table)
        except StopIteration:
            return
        except csv.Error as error:
            findings.problem(shown, line, "a quotation mark that is out of place, or never closed", str(error))
            continue
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            remedy = "put quotation marks around text with separators or line ends"
            findings.problem(
                shown, line, f"not {len(header)} cells as in the line of column names: {remedy}", f"{len(cells)} cells"
            )
            continue
        yield Row(line, dict(zip(header, cells, strict=True)))


def _delimiter(header: str) -> str:
    return max(DELIMITERS, key=lambda delimiter: len(next(csv.reader([header], delimiter=delimiter), [])))


def json_rows(path: Path, shown: str, reading: Reading) -> Iterator[Row]:
    """One object a line, or one list of objects."""
    with opened_text(path, shown, reading.encoding, reading.findings) as source:
        if source.beginning.lstrip().startswith("["):
            yield from _listed(source, reading)
        else:
            yield from _by_line(source, reading)


def _by_line(source: TextSource, reading: Reading) -> Iterator[Row]:
    for number, line in enumerate(source.lines(), 1):
        if line.strip():
            try:
                value = json.loads(line, object_pairs_hook=_object)
            except (ValueError, RecursionError) as error:
                reading.findings.problem(source.shown, number, "not JSON", _reason(error))
                continue
            yield from _row(number, value, source.shown, reading)


def _listed(source: TextSource, reading: Reading) -> Iterator[Row]:
    """Element by element, so that each has its line; behind what is not JSON nothing more is read."""
    text = source.whole()
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    at, line, counted = text.index("[") + 1, 1, 0
    for element in count(1):
        at = _behind_space(text, at)
        line, counted = line + text.count("\n", counted, at), at
        if text.startswith("]", at):
            if text[at + 1 :].strip():
                reading.findings.problem(source.shown, line, "something follows the list; it is not read")
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            where = line + text.count("\n", counted, error.pos) if isinstance(error, json.JSONDecodeError) else line
            reading.findings.problem(source.shown, where, "not JSON; the rest is not read", _reason(error))
            return
        yield from _row(line, value, source.shown, reading, element)
        at = _behind_space(text, at)
        if text.startswith(",", at):
            at += 1
        elif not text.startswith("]", at):
            where = line + text.count("\n", counted, at)
            reading.findings.problem(source.shown, where, "not JSON; the rest is not read", "expected , or ]")
            return


def _behind_space(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\n", "\r") and at < len(text):
        at += 1
    return at


class _Twice(dict[str, object]):
    """An object in which a key stands twice."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    return value if len(value) == len(pairs) else _Twice(value)


def _row(line: int, value: object, shown: str, reading: Reading, element: int = 0) -> Iterator[Row]:
    if not isinstance(value, dict):
        reading.findings.problem(shown, line, "not an object", f"{type(value).__name__}")
    elif isinstance(value, _Twice):
        reading.findings.problem(shown, line, "a key stands twice")
    else:
        yield Row(line, value, element)


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)
