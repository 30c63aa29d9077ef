"""WikiSQL's queries: one column, maybe an aggregate of it, and conditions on columns of one table (Zhong, Xiong and
Socher 2017).

`text` writes a query in one form, `parsed` reads what a model answers back. An answer is hostile text: it is read once,
from left to right, without regular expressions, within MOST_CHARACTERS and MOST_CONDITIONS. Keywords and column names
are read in any case, with any white space.

What counts as right: the whole as WikiSQL's own `Query.__eq__` has it, without order; the six parts as the evaluation
of HydraNet (Lyu et al. 2020) has them, whose inputs FedParsing takes over. Conditions are a set: that evaluation sorts
them by column alone, and where a column has two, goes by the order in which they were written; here operator and value
decide as well. Values compare in lower case with single spaces.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

AGGREGATES: Final = ("", "MAX", "MIN", "COUNT", "SUM", "AVG")
OPERATORS: Final = ("=", ">", "<")
METRICS: Final = ("overall", "aggregate", "column", "conditions", "condition_columns", "operators", "values")
"""Overall, Agg, Sel, Wn, Wc, Op and Val."""
MOST_CHARACTERS: Final = 8192
MOST_CONDITIONS: Final = 16
"""Of an answer; WikiSQL has four."""

_NAME: Final = '"'
_TEXT: Final = "'"
_NUMERALS: Final = frozenset("+-.0123456789eE")
_WRONG: Final = (False,) * len(METRICS)


@dataclass(frozen=True, slots=True)
class Condition:
    """`column` is an index into the header, `operator` one into OPERATORS. `quoted` is whether the value is written as
    text; it makes no other condition."""

    column: int
    operator: int
    value: str
    quoted: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class Query:
    """`aggregate` is an index into AGGREGATES, `column` one into the header."""

    aggregate: int
    column: int
    conditions: tuple[Condition, ...] = ()


def folded(text: str) -> str:
    """As names and values compare."""
    return " ".join(text.lower().split())


def column_names(header: Sequence[str]) -> tuple[str, ...]:
    """What the columns of a header are called in queries: each differs from all others, and none is empty."""
    names: list[str] = []
    taken: set[str] = set()
    for place, title in enumerate(header, start=1):
        name = plain = " ".join(title.split()) or f"column {place}"
        again = 1
        while folded(name) in taken:
            again += 1
            name = f"{plain} ({again})"
        names.append(name)
        taken.add(folded(name))
    return tuple(names)


def is_number(text: str) -> bool:
    """Whether a value may stand without quotation marks."""
    if not text or not _NUMERALS.issuperset(text):
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


def text(query: Query, names: Sequence[str]) -> str:
    """`SELECT COUNT("a") FROM table WHERE "b" = 'text' AND "c" > 5`; a quotation mark in a name or text is doubled."""
    column = _within(_NAME, names[query.column])
    aggregate = AGGREGATES[query.aggregate]
    shown = f"{aggregate}({column})" if aggregate else column
    conditions = " AND ".join(_condition_text(it, names) for it in query.conditions)
    where = f" WHERE {conditions}" if conditions else ""
    # Text for a model, which nothing runs.
    return f"SELECT {shown} FROM table{where}"  # noqa: S608  # nosec B608


def _condition_text(condition: Condition, names: Sequence[str]) -> str:
    value = _within(_TEXT, condition.value) if condition.quoted else condition.value
    return f"{_within(_NAME, names[condition.column])} {OPERATORS[condition.operator]} {value}"


def _within(mark: str, content: str) -> str:
    return f"{mark}{content.replace(mark, mark + mark)}{mark}"


def parsed(answer: str, names: Iterable[str]) -> Query | None:
    """What `answer` asks of a table whose columns have these names; None where it is no such query."""
    if len(answer) > MOST_CHARACTERS:
        return None
    try:
        return _query(_Reader(answer), {folded(name): index for index, name in enumerate(names)})
    except _NoQuery:
        return None


def right(predicted: Query | None, gold: Query) -> tuple[bool, ...]:
    """One truth for each of METRICS; what did not parse is wrong in all."""
    if predicted is None:
        return _WRONG
    ours, theirs = (
        sorted({(it.column, it.operator, folded(it.value)) for it in query.conditions}) for query in (predicted, gold)
    )
    aggregate, column = predicted.aggregate == gold.aggregate, predicted.column == gold.column
    return (
        aggregate and column and ours == theirs,
        aggregate,
        column,
        len(ours) == len(theirs),
        *([condition[part] for condition in ours] == [condition[part] for condition in theirs] for part in range(3)),
    )


class _NoQuery(Exception):
    pass


class _Reader:
    """Reads a text once, from left to right."""

    def __init__(self, answer: str) -> None:
        self._text = answer
        self._place = 0

    def next(self) -> str:
        """The next character that is no white space, which stays to be read; empty at the end."""
        while self._place < len(self._text) and self._text[self._place].isspace():
            self._place += 1
        return self._text[self._place : self._place + 1]

    def word(self) -> str:
        """In upper case; empty where none begins here."""
        self.next()
        start = self._place
        while self._place < len(self._text) and self._text[self._place].isalpha():
            self._place += 1
        return self._text[start : self._place].upper()

    def take(self, characters: str) -> str:
        """One of `characters`."""
        found = self.next()
        if not found or found not in characters:
            raise _NoQuery
        self._place += 1
        return found

    def quoted(self, mark: str) -> str:
        """What stands between two marks, of which two in a row are one that is meant."""
        self.take(mark)
        pieces: list[str] = []
        while True:
            end = self._text.find(mark, self._place)
            if end < 0:
                raise _NoQuery
            pieces.append(self._text[self._place : end])
            self._place = end + 1
            if self._text[self._place : self._place + 1] != mark:
                return mark.join(pieces)
            self._place += 1

    def number(self) -> str:
        self.next()
        start = self._place
        while self._place < len(self._text) and self._text[self._place] in _NUMERALS:
            self._place += 1
        numeral = self._text[start : self._place]
        if not is_number(numeral):
            raise _NoQuery
        return numeral


def _query(reader: _Reader, columns: Mapping[str, int]) -> Query:
    _keyword(reader, "SELECT")
    aggregate = 0
    if reader.next() != _NAME:
        word = reader.word()
        if not word or word not in AGGREGATES:
            raise _NoQuery
        aggregate = AGGREGATES.index(word)
        reader.take("(")
    column = _column(reader, columns)
    if aggregate:
        reader.take(")")
    _keyword(reader, "FROM")
    _keyword(reader, "TABLE")
    conditions: list[Condition] = []
    if (word := reader.word()) == "WHERE":
        conditions.append(_condition(reader, columns))
        while (word := reader.word()) == "AND":
            if len(conditions) == MOST_CONDITIONS:
                raise _NoQuery
            conditions.append(_condition(reader, columns))
    if word:
        raise _NoQuery
    if reader.next() == ";":
        reader.take(";")
    if reader.next():
        raise _NoQuery
    return Query(aggregate, column, tuple(conditions))


def _keyword(reader: _Reader, word: str) -> None:
    if reader.word() != word:
        raise _NoQuery


def _column(reader: _Reader, columns: Mapping[str, int]) -> int:
    index = columns.get(folded(reader.quoted(_NAME)))
    if index is None:
        raise _NoQuery
    return index


def _condition(reader: _Reader, columns: Mapping[str, int]) -> Condition:
    column = _column(reader, columns)
    operator = OPERATORS.index(reader.take("=><"))
    if reader.next() == _TEXT:
        return Condition(column, operator, reader.quoted(_TEXT))
    return Condition(column, operator, reader.number(), quoted=False)
