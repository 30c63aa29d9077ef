"""The words in which a demo silo is described: tables, pools of values, question shapes.

A *shape* is one SQL statement with slots and several ways to ask for it; a (question, SQL) pair of a shape is a
question template. Slots name a pool: `{city}` stands for a value of the pool `city`, the same in the question and in
the SQL.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from string import Formatter

Value = str | int

SQL_TYPE_KINDS = {"TEXT": "text", "INTEGER": "number", "DATE": "time"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column and where its cells come from.

    `values` are drawn independently; with `each=True` row i takes `values[i]`, so that the table has one row per value.
    A primary key counts from 1. `references` names a table, whose `id` is drawn.
    """

    name: str
    sql_type: str
    values: tuple[Value, ...] | range = ()
    each: bool = False
    primary_key: bool = False
    references: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    name: str
    columns: tuple[Column, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Shape:
    """`sql` with slots, and `questions` with the same slots."""

    sql: str
    questions: tuple[str, ...]

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(field for _, field, _, _ in Formatter().parse(self.sql) if field is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloSpecification:
    """A silo to generate. `train`, `dev` and `test` are numbers of questions."""

    name: str
    tables: tuple[Table, ...]
    pools: Mapping[str, tuple[Value, ...]]
    shapes: tuple[Shape, ...]
    train: int
    dev: int
    test: int

    @property
    def templates(self) -> int:
        return sum(len(shape.questions) for shape in self.shapes)

    def fillings(self, shape: Shape) -> list[dict[str, Value]]:
        """Every assignment of pool values to the slots of `shape`."""
        return [
            dict(zip(shape.slots, values, strict=True)) for values in product(*(self.pools[s] for s in shape.slots))
        ]


def key() -> Column:
    return Column(name="id", sql_type="INTEGER", primary_key=True)


def link(table: str) -> Column:
    return Column(name=f"{table}_id", sql_type="INTEGER", references=table)


def text(name: str, values: tuple[Value, ...]) -> Column:
    return Column(name=name, sql_type="TEXT", values=values)


def each_text(name: str, values: tuple[Value, ...]) -> Column:
    """A column that takes each value once, in order."""
    return Column(name=name, sql_type="TEXT", values=values, each=True)


def number(name: str, values: tuple[Value, ...] | range) -> Column:
    return Column(name=name, sql_type="INTEGER", values=values)


def date(name: str, values: tuple[Value, ...]) -> Column:
    return Column(name=name, sql_type="DATE", values=values)


_FIRST_NAMES = ("anna", "ben", "clara", "david", "emma", "frank", "grace", "henry", "iris", "jack")
_LAST_NAMES = ("allen", "bell", "cook", "diaz", "ellis", "fisher", "grant", "hill", "irwin", "jones", "king", "lewis")
PEOPLE: tuple[Value, ...] = tuple(f"{first} {last}" for last in _LAST_NAMES for first in _FIRST_NAMES)
