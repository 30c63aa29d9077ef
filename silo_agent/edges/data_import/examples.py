"""Rows become the lines of a data folder: each key from the column that it is mapped to, checked as the agent will
check it."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from lorica_security.errors import ConfigurationError, DataError
from lorica_security.visible_text import visible
from silo_agent.edges.data_import.findings import Findings, shortened
from silo_agent.edges.data_import.schemas import Schemas
from silo_agent.edges.data_import.sources import Source, SourceFile
from silo_agent.edges.data_import.tables import Reading, Row
from silo_agent.training.data.schema import Schema
from silo_agent.training.data.text_to_sql_data import DataLimits, Split

MOST_LINES = 2_000_000
"""Of one import, which has all of them in memory."""
_KEY = re.compile(r"[^\W\d][\w.-]{0,99}")
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]+")
_SUFFIX = re.compile(r"\.[^./]+(\.gz)?$")
_TWICE = "id stands twice: correct it, or give --new-ids"
_LINE_END = re.compile("\r\n?")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Form:
    """What a task's lines call what is asked and what is answered, and whether each is to a database."""

    question: str
    answer: str
    databases: bool

    @property
    def texts(self) -> tuple[str, str]:
        return self.question, self.answer

    @property
    def keys(self) -> tuple[str, ...]:
        return ("id", *self.texts, *(["db_id"] if self.databases else []))


SQL, TEXT = Form("question", "query", databases=True), Form("input", "target", databases=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """One line to be. `more` are keys beside the agent's own that were asked for, such as a patient's number. `db_id`
    is empty where the form has none."""

    form: Form = SQL
    id: str
    question: str
    query: str
    db_id: str
    more: Mapping[str, str]
    split: Split | None
    place: str

    def line(self) -> bytes:
        return (json.dumps(self.values, ensure_ascii=False) + "\n").encode()

    @property
    def values(self) -> dict[str, str]:
        own = zip(self.form.keys, (self.id, self.question, self.query, self.db_id), strict=False)
        return {**dict(own), **self.more}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the command line says of lines. `columns` are those of `--map`, by key; `only` are databases, none meaning
    all.

    With `new_ids`, ids are made although there is a column of that name.
    """

    form: Form = SQL
    columns: Mapping[str, str]
    encoding: str = "utf-8"
    db_id: str | None = None
    only: tuple[str, ...] = ()
    new_ids: bool = False


def mapping(pairs: Iterable[str]) -> dict[str, str]:
    """Of KEY=COLUMN; raises ConfigurationError naming the pair that is none."""
    columns: dict[str, str] = {}
    for pair in pairs:
        key, equals, column = pair.partition("=")
        if not equals or not column or not _KEY.fullmatch(key):
            raise ConfigurationError(f"--map {shortened(pair)} is not KEY=COLUMN, as question=Frage is: correct it")
        if key in columns:
            raise ConfigurationError(f"--map gives key {key} two columns, {columns[key]} and {column}: give it one")
        columns[key] = column
    return columns


class Importer:
    """Reads the files of a source one after the other; what is wrong goes to `findings`."""

    def __init__(self, source: Source, choices: Choices, schemas: Schemas, findings: Findings) -> None:
        self._findings = findings
        self._choices = choices
        self._schemas = schemas
        self._form = form = choices.form
        of_layout = {key: column for key, column in source.columns.items() if key in form.keys}
        self._columns = {**dict.fromkeys(form.keys, ""), **of_layout, **choices.columns}
        self._columns = {key: column or key for key, column in self._columns.items()}
        self._required = {*form.texts, *choices.columns}
        self._seen: dict[str, str] = {}
        self._stems: dict[str, str] = {}
        self.examples: list[Imported] = []
        unknown = [name for name in (*choices.only, *filter(None, [choices.db_id])) if name not in schemas]
        if unknown:
            known = shortened(", ".join(schemas.names), 200)
            raise ConfigurationError(
                f"database {shortened(unknown[0])} has no schema, there are {known}: correct --db-id or --only"
            )

    @property
    def reading(self) -> Reading:
        return Reading(
            findings=self._findings,
            encoding=self._choices.encoding,
            required={key: column for key, column in self._columns.items() if key in self._required},
            wanted=frozenset(self._columns.values()),
        )

    def read(self, file: SourceFile) -> None:
        """One that cannot be read is a problem, as what is wrong in it is: others are read all the same."""
        before = len(self.examples), self._findings.of_file(file.shown)
        try:
            for row in file.rows(self.reading):
                self._take(row, file)
                if len(self.examples) > MOST_LINES:
                    raise DataError(f"{file.shown} makes more than {MOST_LINES:,} lines: divide the data set")
        except DataError as error:
            self._findings.problem(file.shown, 0, str(error).removeprefix(f"{file.shown} "))
        if before == (len(self.examples), self._findings.of_file(file.shown)) and not self._choices.only:
            self._findings.problem(file.shown, 0, "holds no row")

    def schemas(self) -> list[Schema]:
        """Of the databases that examples are to; one that cannot be used is a problem."""
        asked = {example.db_id for example in self.examples}
        schemas = []
        for name in self._schemas.names:
            if name in asked:
                try:
                    schemas.append(self._schemas.of(name))
                except DataError as error:
                    self._findings.problem("schema", 0, str(error))
        return schemas

    def _take(self, row: Row, file: SourceFile) -> None:
        """Every problem of the row is told; a row without any becomes an example."""
        problems = self._findings.problems
        db_id = self._database(row, file)
        if self._choices.only and db_id not in self._choices.only:
            return
        texts = {key: self._text(key, row, file) for key in self._columns if key not in ("id", "db_id")}
        place = f"{file.shown}:{row.line}"
        id_ = self._id(row, file, place)
        if self._findings.problems > problems:
            return
        example = Imported(
            form=self._form,
            id=id_,
            question=texts.pop(self._form.question),
            query=texts.pop(self._form.answer),
            db_id=db_id,
            more=texts,
            split=file.split,
            place=place,
        )
        if len(example.line()) > (most := DataLimits().max_line_bytes):
            self._problem(row, file, f"makes a line of more than {most:,} bytes")
            return
        self.examples.append(example)

    def _problem(self, row: Row, file: SourceFile, what: str, detail: str = "") -> None:
        element = f"element {row.element}" if row.element else ""
        self._findings.problem(file.shown, row.line, what, ", ".join(filter(None, (element, detail))))

    def _database(self, row: Row, file: SourceFile) -> str:
        """That of the row, else of --db-id, else the only one that there is; none where lines have none."""
        if not self._form.databases:
            return ""
        if self._columns["db_id"] in row.values or "db_id" in self._required:
            db_id = self._text("db_id", row, file)
            chosen = not self._choices.only or db_id in self._choices.only
            if db_id and chosen and db_id not in self._schemas:
                known = ", ".join(self._schemas.names)
                self._problem(
                    row,
                    file,
                    "db_id is that of no schema",
                    f"{shortened(db_id)}, there are {shortened(known)}",
                )
            return db_id
        names = self._schemas.names
        if self._choices.db_id is None and len(names) > 1:
            self._problem(row, file, "db_id is missing, and there are several schemas: give --db-id")
        return self._choices.db_id or names[0]

    def _id(self, row: Row, file: SourceFile, place: str) -> str:
        """That of the row; else one that leads back to where the row stood."""
        has_id = self._columns["id"] in row.values or "id" in self._required
        if has_id and not self._choices.new_ids:
            id_ = self._text("id", row, file)
        else:
            id_ = f"{self._stem(file)}-{row.element or row.line}"
        if id_ and id_ in self._seen:
            self._problem(row, file, _TWICE, f"{shortened(id_)}, first at {self._seen[id_]}")
        elif id_:
            self._seen[id_] = place
        return id_

    def _stem(self, file: SourceFile) -> str:
        """What ids made of this file begin with, and of no other: names may differ in what no id holds."""
        if file.shown not in self._stems:
            stem = _NOT_IN_IDS.sub("-", _SUFFIX.sub("", file.shown))
            others = set(self._stems.values())
            more = (f"{stem}.{number}" for number in count(2))
            self._stems[file.shown] = stem if stem not in others else next(name for name in more if name not in others)
        return self._stems[file.shown]

    def _text(self, key: str, row: Row, file: SourceFile) -> str:
        """The text of a key without spaces around it; "" where it has none, which is a problem."""
        column = self._columns[key]
        value = row.values.get(column)
        if type(value) is int and not (self._form.databases and key in self._form.texts):
            return str(value)
        text = _LINE_END.sub("\n", value.strip()) if isinstance(value, str) else ""
        wrong, detail = "", ""
        if column not in row.values:
            wrong, detail = f"key {key} is missing: give --map {key}=KEY", f"there are {_named(row.values)}"
        elif value is None:
            wrong = f"{key} is missing"
        elif not isinstance(value, str):
            wrong, detail = f"{key} is no text", shortened(str(value))
        elif not text:
            wrong = f"{key} is empty"
        elif "\0" in text:
            wrong = f"{key} holds a NUL character"
        elif _SURROGATE.search(text):
            wrong = f"{key} holds half of a surrogate pair"
        if wrong:
            self._problem(row, file, wrong, detail)
            return ""
        return text


def _named(names: Collection[str]) -> str:
    return visible(", ".join(list(names)[:20]))[:200] or "none"
