"""Questions with SQL over schemas that nobody has: public practice for a model that is to be warmed up (warm_up.py).

A small model from scratch knows neither words nor what a schema is for, which T5's pre-training taught the paper's
model. Each schema here is drawn anew from common English words, and so are the values, so that the only way to answer
is to read the schema and to copy: what a warm start is to bring. The SQL is written as that of the text-to-SQL silos is
(Finegan-Dollak et al. 2018): upper case, every table under an alias, tables in order of their names, values in double
quotes. Everything is a function of the seed; no silo's schema or question is looked at.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from silo_agent.training.data.schema import Column, ColumnType, Schema, Table
from silo_agent.training.data.text_to_sql_data import Example

T = TypeVar("T")


def listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


THINGS = listed(
    "account actor address agency airline airport album animal area artist author award bank battle bird boat book "
    "branch bridge building bus business camera camp car category channel church city class client club coach college "
    "color company concert conference contest council country county course "
    "crew customer dealer department device director district doctor document domain dorm driver editor election "
    "employee engine event exhibition factory faculty farm festival film flight forest game gallery garden guest "
    "harbor hospital hotel house island item journal judge keyword "
    "lake language league library location machine magazine manager market match medicine meeting member message "
    "model mountain movie museum musician nation neighborhood network nurse office opera orchestra organization owner "
    "painting paper park party patient person pet phone plane planet "
    "platform player policy port president problem producer product professor program project property publication "
    "race railway ranch region relative report restaurant review river road room route school scientist season "
    "section semester series service ship shop singer song sponsor "
    "stadium staff state station stock store student studio subject supplier surgeon tag teacher team theme ticket "
    "topic tournament town track train trip truck university user vehicle venue village visit voter wine winner "
    "worker writer"
)
TEXTS = listed(
    "name title description type code status style gender address city country state street nationality language "
    "phone email homepage color category position department genre role note level region month day material comment "
    "reference county currency format brand word first_name last_name full_name birth_place location_name class_name "
    "home_city abstract subject"
)
NUMBERS = listed(
    "age year price cost rating population area size height weight length capacity budget salary points score rank "
    "number quantity amount distance duration speed density count elevation credits stars opening_year birth_year "
    "release_year number_of_seats citation_count review_count total_sales stops arrival_time departure_time"
)
FIRST = listed(
    "ada amy ben carl clara dan david edith ella emma eric eva frank grace hans harry helen hugo ida irene ivan "
    "jack jane john karl kate laura leo linda lisa lucy mark martin mary max nina noah nora olga oscar paul peter "
    "ralph rosa ruth sam sara simon sofia tom vera victor walter"
)
LAST = listed(
    "adams bauer becker black brown carter chen clark cohen cook davis diaz evans fischer ford fox garcia green "
    "hall harris hill hughes jones kelly king kim klein lee lewis lopez martin meyer miller moore morris murphy "
    "nelson novak olsen park patel perez price reed rossi santos silva singh smith "
    "stone tanaka taylor turner walker wang weber white wilson wood young"
)
PLACES = listed(
    "amber arden ashford bay beacon brook camden cedar clifton crystal dover eagle east elm fair forest glen golden "
    "grand green harbor high hill iron kings lake lincoln long maple mill north oak old park pine port queens red "
    "river rock royal salem silver "
    "south spring stone summer union "
    "valley west white wild willow winter wood york"
)
KINDS = listed(
    "active annual basic blue central classic closed daily digital double early final free full global heavy high "
    "indoor late light local main major "
    "medium minor modern monthly national new northern official open private public quick rural short single small "
    "special standard summer urban "
    "weekly young"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A question to a database of its own."""

    question: str
    query: str
    schema: Schema

    @property
    def example(self) -> Example:
        return Example(self.schema.db_id, self.question, self.query, self.schema.db_id)


class Draw:
    """Reproducible draws."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def below(self, end: int) -> int:
        return int(torch.randint(end, (1,), generator=self._generator))

    def one(self, of: Sequence[T]) -> T:
        return of[self.below(len(of))]

    def some(self, of: Sequence[T], count: int) -> list[T]:
        """`count` different ones."""
        order: list[int] = torch.randperm(len(of), generator=self._generator)[:count].tolist()
        return [of[index] for index in order]


def pairs(count: int, *, seed: int) -> Iterator[Pair]:
    """`count` pairs, each over a schema of its own."""
    draw = Draw(seed)
    for number in range(count):
        database = _Database.drawn(draw, f"random{number}")
        question, query = draw.one(_SHAPES)(database, draw)
        yield Pair(question, f"{query} ;", database.schema)


# --- databases


@dataclass(frozen=True, slots=True)
class _Thing:
    """A table: `links` are its columns with the key of another."""

    name: str
    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    links: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.name}_id"

    @property
    def columns(self) -> tuple[str, ...]:
        """That questions ask for."""
        return (*self.texts, *self.numbers)

    @property
    def said(self) -> str:
        return self.name.replace("_", " ")


@dataclass(frozen=True, slots=True)
class _Database:
    name: str
    things: tuple[_Thing, ...]

    @classmethod
    def drawn(cls, draw: Draw, name: str) -> "_Database":
        names = draw.some(THINGS, 2 + draw.below(4))
        things: list[_Thing] = []
        for index, thing in enumerate(names):
            links = (f"{draw.one(names[:index])}_id",) if index else ()
            texts = ["name", *(text for text in draw.some(TEXTS, 1 + draw.below(4)) if text != "name")]
            things.append(_Thing(thing, tuple(texts), tuple(draw.some(NUMBERS, 1 + draw.below(3))), links))
        return cls(name, tuple(draw.some(things, len(things))))

    @property
    def schema(self) -> Schema:
        def column(name: str, kind: ColumnType, key: bool = False, link: bool = False) -> Column:
            return Column(name=name, sql_type=kind.value, type=kind, primary_key=key, foreign_key=link)

        tables = tuple(
            Table(
                thing.name,
                (
                    column(thing.key, ColumnType.NUMBER, key=True),
                    *(column(name, ColumnType.TEXT) for name in thing.texts),
                    *(column(name, ColumnType.NUMBER) for name in thing.numbers),
                    *(column(name, ColumnType.NUMBER, link=True) for name in thing.links),
                ),
            )
            for thing in self.things
        )
        return Schema(self.name, "drawn", tables)

    def linked(self, draw: Draw) -> tuple[_Thing, _Thing]:
        """One that has the key of the other, and the other."""
        by_key = {thing.key: thing for thing in self.things}
        holder = draw.one([thing for thing in self.things if thing.links])
        return holder, by_key[holder.links[0]]


# --- SQL in the silos' dialect


def _of(thing: _Thing, column: str, number: int = 0) -> str:
    return f"{thing.name.upper()}alias{number}.{column.upper()}"


def _from(*things: _Thing) -> str:
    names = sorted(thing.name.upper() for thing in things)
    return "FROM " + " , ".join(f"{name} AS {name}alias0" for name in names)


def _where(*conditions: str) -> str:
    return f"WHERE {' AND '.join(sorted(conditions))}"


def _said(column: str) -> str:
    return column.replace("_", " ")


def _text(draw: Draw) -> str:
    forms: tuple[Callable[[], str], ...] = (
        lambda: f"{draw.one(FIRST)} {draw.one(LAST)}",
        lambda: f"{draw.one(FIRST).title()} {draw.one(LAST).title()}",
        lambda: f"{draw.one(PLACES)} {draw.one(PLACES)}",
        lambda: f"{draw.one(PLACES).title()}{draw.one(('ton', 'ville', ' City', 'burg', 'field'))}",
        lambda: draw.one(KINDS),
        lambda: draw.one(KINDS).title(),
        lambda: "".join(draw.one("ABCDEFGHIKLMNOPRSTUVW") for _ in range(2 + draw.below(3))),
        lambda: f"{draw.one(KINDS)} {draw.one(THINGS)}",
    )
    return draw.one(forms)()


def _number(draw: Draw) -> str:
    forms: tuple[Callable[[], str], ...] = (
        lambda: str(1 + draw.below(20)),
        lambda: str(100 * (1 + draw.below(90))),
        lambda: str(1950 + draw.below(75)),
        lambda: f"{draw.below(9)}.{1 + draw.below(9)}",
        lambda: str(draw.below(2400)),
    )
    return draw.one(forms)()


def _condition(thing: _Thing, draw: Draw) -> tuple[str, str]:
    """Words for "whose ..." and the SQL for them."""
    if draw.below(3):
        column, value = draw.one(thing.texts), _text(draw)
        shown = f'" {value} "' if draw.below(3) == 0 else value
        words = draw.one((f"with {_said(column)} {shown}", f"whose {_said(column)} is {shown}"))
        return words, f'{_of(thing, column)} = "{value}"'
    column, value = draw.one(thing.numbers), _number(draw)
    sign, words = draw.one(
        (
            (">", f"with {_said(column)} more than {value}"),
            (">", f"with {_said(column)} over {value}"),
            ("<", f"with {_said(column)} less than {value}"),
            ("<", f"with {_said(column)} under {value}"),
            ("=", f"with {_said(column)} {value}"),
        )
    )
    return words, f"{_of(thing, column)} {sign} {value}"


_ASK = (
    "return me the",
    "what is the",
    "what are the",
    "show me the",
    "list the",
    "give me the",
    "find the",
    "which is the",
)
_HOW_MANY = ("how many", "return me the number of", "count the", "what is the number of")
_Shape = Callable[[_Database, Draw], tuple[str, str]]


def _column(database: _Database, draw: Draw) -> tuple[str, str]:
    thing = draw.one(database.things)
    words, condition = _condition(thing, draw)
    column = draw.one(thing.columns)
    distinct = draw.one(("", "DISTINCT "))
    asked = draw.one(_ASK) if not distinct else draw.one(("list all different", "show the distinct"))
    return (
        f"{asked} {_said(column)} of the {thing.said} {words}",
        f"SELECT {distinct}{_of(thing, column)} {_from(thing)} {_where(condition)}",
    )


def _named(database: _Database, draw: Draw) -> tuple[str, str]:
    """The thing itself, asked for by its name in the plural."""
    thing = draw.one(database.things)
    words, condition = _condition(thing, draw)
    return (
        f"{draw.one(('list all', 'show me all', 'find all', 'give me', 'which are the'))} {thing.said}s {words}",
        f"SELECT {_of(thing, 'name')} {_from(thing)} {_where(condition)}",
    )


def _two_conditions(database: _Database, draw: Draw) -> tuple[str, str]:
    thing = draw.one(database.things)
    (words, condition), (more, further) = _condition(thing, draw), _condition(thing, draw)
    column = draw.one(thing.columns)
    return (
        f"{draw.one(_ASK)} {_said(column)} of the {thing.said} {words} and {more}",
        f"SELECT {_of(thing, column)} {_from(thing)} {_where(condition, further)}",
    )


def _counted(database: _Database, draw: Draw) -> tuple[str, str]:
    thing = draw.one(database.things)
    words, condition = _condition(thing, draw)
    what = draw.one(("*", f"DISTINCT {_of(thing, 'name')}"))
    return (
        f"{draw.one(_HOW_MANY)} {'' if what == '*' else 'different '}{thing.said}s {words}",
        f"SELECT COUNT( {what} ) {_from(thing)} {_where(condition)}",
    )


def _joined(database: _Database, draw: Draw) -> tuple[str, str]:
    holder, other = database.linked(draw)
    asked, given = draw.one(((holder, other), (other, holder)))
    words, condition = _condition(given, draw)
    link = f"{_of(other, other.key)} = {_of(holder, other.key)}"
    column = draw.one(asked.columns)
    return (
        f"{draw.one(_ASK)} {_said(column)} of the {asked.said} of the {given.said} {words}",
        f"SELECT {_of(asked, column)} {_from(asked, given)} {_where(condition, link)}",
    )


def _joined_count(database: _Database, draw: Draw) -> tuple[str, str]:
    holder, other = database.linked(draw)
    words, condition = _condition(other, draw)
    link = f"{_of(other, other.key)} = {_of(holder, other.key)}"
    return (
        f"{draw.one(_HOW_MANY)} {holder.said}s {draw.one(('of', 'in', 'by', 'for'))} the {other.said} {words}",
        f"SELECT COUNT( DISTINCT {_of(holder, 'name')} ) {_from(holder, other)} {_where(condition, link)}",
    )


def _largest(database: _Database, draw: Draw) -> tuple[str, str]:
    thing = draw.one(database.things)
    number = draw.one(thing.numbers)
    function, word = draw.one((("MAX", "largest"), ("MAX", "highest"), ("MIN", "smallest"), ("MIN", "lowest")))
    # Text for a model, which nothing runs.
    inner = f"SELECT {function}( {_of(thing, number, 1)} ) FROM {thing.name.upper()} AS {thing.name.upper()}alias1"  # noqa: S608  # nosec B608
    return (
        f"{draw.one(('what is the', 'which is the', 'return me the', 'show the'))} {thing.said} with the {word} "
        f"{_said(number)}",
        f"SELECT {_of(thing, 'name')} {_from(thing)} WHERE {_of(thing, number)} = ( {inner} )",
    )


def _computed(database: _Database, draw: Draw) -> tuple[str, str]:
    thing = draw.one(database.things)
    number = draw.one(thing.numbers)
    words, condition = _condition(thing, draw)
    function, word = draw.one((("SUM", "total"), ("AVG", "average"), ("MAX", "maximum"), ("MIN", "minimum")))
    return (
        f"{draw.one(_ASK)} {word} {_said(number)} of {thing.said}s {words}",
        f"SELECT {function}( {_of(thing, number)} ) {_from(thing)} {_where(condition)}",
    )


def _most(database: _Database, draw: Draw) -> tuple[str, str]:
    holder, other = database.linked(draw)
    direction, word = draw.one((("DESC", "most"), ("ASC", "fewest")))
    link = f"{_of(other, other.key)} = {_of(holder, other.key)}"
    count = f"COUNT( DISTINCT {_of(holder, 'name')} )"
    return (
        f"{draw.one(_ASK)} {other.said} with the {word} {holder.said}s",
        f"SELECT {_of(other, 'name')} {_from(holder, other)} {_where(link)} GROUP BY {_of(other, 'name')} "
        f"ORDER BY {count} {direction} LIMIT 1",
    )


_SHAPES: tuple[_Shape, ...] = (
    _column,
    _column,
    _named,
    _two_conditions,
    _counted,
    _joined,
    _joined,
    _joined_count,
    _largest,
    _computed,
    _most,
)
