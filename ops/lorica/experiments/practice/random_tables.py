"""Questions with SQL over single tables that nobody has: public practice for the task `wikisql` (warm_up.py).

What random_schemas.py is for the text-to-SQL silos, in the form of wikisql_query.py: a table's header is drawn from
common English words and from words that do not exist, and so are the values, so that the only way to answer is to find
a column by its words, and to copy. A value has the case that it has in the question, since case does not count. Where a
question leaves a column unsaid, the value tells which it is: a date is one of `Date`, and no other column is.
Everything is a function of the seed. No table, question or query is WikiSQL's; ways to ask and common names of columns
were written after a look at some forty of its labelled training questions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from lorica.experiments.practice.random_schemas import (
    FIRST,
    KINDS,
    LAST,
    NUMBERS,
    PLACES,
    TEXTS,
    THINGS,
    Draw,
    Pair,
    listed,
)
from silo_agent.training.data.schema import Column, ColumnType, Schema, Table
from silo_agent.training.tasks.wikisql_query import AGGREGATES, OPERATORS, Condition, Query, column_names, text

_MONTHS: Final = listed("january february march april may june july august september october november december")
_COUNTRIES: Final = listed(
    "argentina australia austria belgium brazil canada chile china colombia denmark egypt england fiji finland france "
    "germany greece india iran ireland israel italy japan kenya mexico morocco netherlands nigeria norway pakistan "
    "peru poland portugal romania russia scotland spain sweden switzerland turkey ukraine wales"
)
_BEGINS: Final = listed("b br c ch d dr f g gr h j k kr l m n p r s sh st t th tr v w z")
_VOWELS: Final = listed("a e i o u a e i o ai ee ou")
_LETTERS: Final = "eeeeeeaaaaaiiiiiooootttttnnnnnssssrrrrhhllldddcccuummmpppffggwwyybbvkxjqz"
_ENDS: Final = ("", "", "", "n", "r", "l", "s", "t", "ck", "nd", "rt", "m")
_DASH: Final = "\N{EN DASH}"
_EQUAL, _MORE, _LESS = (OPERATORS.index(it) for it in ("=", ">", "<"))


def pairs(count: int, *, seed: int, strange: bool = False) -> Iterator[Pair]:
    """`count` pairs, each over a table of its own. `strange`: three of four columns have names and values of letters
    that make no word, so that nothing but copying answers."""
    draw = Draw(seed)
    for number in range(count):
        yield _pair(draw, f"table{number}", strange=strange)


# --- values


def _invented(draw: Draw) -> str:
    return "".join(f"{draw.one(_BEGINS)}{draw.one(_VOWELS)}{draw.one(_ENDS)}" for _ in range(draw.one((1, 2, 2))))


def _no_word(draw: Draw) -> str:
    """Two to nine letters, in one of the forms that abbreviations, names and codes have."""
    letters = "".join(draw.one(_LETTERS) for _ in range(2 + draw.below(8)))
    forms: tuple[Callable[[], str], ...] = (
        lambda: letters,
        lambda: letters,
        lambda: _invented(draw),
        lambda: letters[:4].upper(),
        lambda: ".".join(letters[:3].upper()) + ".",
        lambda: f"{letters}{draw.one(('-', '/', '&', '.'))}{_invented(draw)}",
        lambda: f"{letters}{draw.below(100)}",
        lambda: f"({letters})",
        lambda: f"{letters}'s",
    )
    return draw.one(forms)()


def _no_words(draw: Draw) -> str:
    return " ".join(_no_word(draw) for _ in range(draw.one((1, 1, 1, 2, 2))))


def _person(draw: Draw) -> str:
    forms: tuple[Callable[[], str], ...] = (
        lambda: f"{draw.one(FIRST)} {draw.one(LAST)}",
        lambda: f"{draw.one(FIRST)} {_invented(draw)}",
        lambda: f"{_invented(draw)} {_invented(draw)}",
        lambda: f"{draw.one(FIRST)[0]}. {draw.one(LAST)}",
        lambda: f"{draw.one(LAST)} ({1 + draw.below(40)})",
        lambda: f"{draw.one(FIRST)} {draw.one(LAST)} ({draw.one(_COUNTRIES)[:3]})",
    )
    return draw.one(forms)()


def _place(draw: Draw) -> str:
    forms: tuple[Callable[[], str], ...] = (
        lambda: f"{draw.one(PLACES)} {draw.one(PLACES)}",
        lambda: f"{draw.one(PLACES)} {draw.one(('park', 'road', 'stadium', 'arena', 'oval', 'hall', 'center'))}",
        lambda: _invented(draw),
        lambda: draw.one(_COUNTRIES),
        lambda: draw.one(_COUNTRIES),
        lambda: f"{_invented(draw)}, {draw.one(_COUNTRIES)}",
    )
    return draw.one(forms)()


def _team(draw: Draw) -> str:
    forms: tuple[Callable[[], str], ...] = (
        lambda: f"{draw.one(PLACES)} {draw.one(THINGS)}s",
        lambda: f"{_invented(draw)} {draw.one(('city', 'united', 'rovers', 'town', 'fc', 'state'))}",
        lambda: f"{draw.one(PLACES)} {_invented(draw)}",
        lambda: f"at {draw.one(PLACES)} {draw.one(THINGS)}s",
        lambda: f"fc {_invented(draw)}",
        lambda: draw.one(PLACES),
    )
    return draw.one(forms)()


def _date(draw: Draw) -> str:
    month, day, year = draw.one(_MONTHS), 1 + draw.below(28), 1900 + draw.below(115)
    short = month[:3]
    return draw.one(
        (f"{month} {day}", f"{month} {day}, {year}", f"{day} {month} {year}", f"{day} {short} {year}", f"{short} {day}")
    )


def _score(draw: Draw) -> str:
    a, b, c = draw.below(40), draw.below(40), draw.below(9)
    return draw.one(
        (
            f"{a}-{b}",
            f"{a}{_DASH}{b}",
            f"w {a}-{b}",
            f"l {a}{_DASH}{b}",
            f"{a}.{b} ({a + b})",
            f"{a}-{b}-{c}",
            f"{c}:{10 + a}.{10 + b}",
            f"+{c}",
            f"{60 + c}-{60 + a}={120 + a + c}",
        )
    )


def _other(draw: Draw) -> str:
    forms: tuple[Callable[[], str], ...] = (
        lambda: draw.one(KINDS),
        lambda: draw.one(THINGS),
        lambda: f"{draw.one(KINDS)} {draw.one(THINGS)}",
        lambda: f"the {draw.one(THINGS)} of {_invented(draw)}",
        lambda: _invented(draw),
        lambda: f"{_invented(draw)}-{1 + draw.below(99)}",
        lambda: f"{draw.one(THINGS)} / {draw.one(THINGS)}",
        lambda: f"{1900 + draw.below(110)}-{10 + draw.below(90)}",
        lambda: f"{1 + draw.below(30)}{draw.one(('th', 'st', 'nd', 'rd'))}",
        lambda: f"{1 + draw.below(99)}%",
        lambda: f"{1 + draw.below(9)}.{draw.below(99)}{draw.one(('mm', 'm', 'km', 'kg', 'l'))}",
        lambda: f"${1 + draw.below(90)},{draw.below(10)}00",
        lambda: f"{_invented(draw)} {_invented(draw)} {draw.one(THINGS)}",
    )
    return draw.one(forms)()


def _number(draw: Draw) -> str:
    forms: tuple[Callable[[], str], ...] = (
        lambda: str(1 + draw.below(30)),
        lambda: str(1900 + draw.below(115)),
        lambda: str(draw.below(1000)),
        lambda: str(draw.below(40_000)),
        lambda: f"{draw.below(99)}.{1 + draw.below(9)}",
    )
    return draw.one(forms)()


def _cased(value: str, draw: Draw) -> str:
    return draw.one((value, value, value.title()))


# --- tables


@dataclass(frozen=True, slots=True)
class _Kind:
    """Columns that hold values of one kind, by what they are called."""

    names: tuple[str, ...]
    value: Callable[[Draw], str]
    asked: tuple[str, ...]  # before a value whose column is unsaid


def _named(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


_KINDS_OF_COLUMN: Final = (
    _Kind(
        _named(
            "player, driver, winner, artist, director, candidate, coach, name, incumbent, manager, writer, written by, "
            "directed by, runner-up, champion, rider, leading scorer, head coach, author, composer, captain, "
            "pole position"
        ),
        _person,
        ("by", "for", "with", "of"),
    ),
    _Kind(
        _named(
            "city, venue, location, country, ground, region, host city, nationality, site, state, circuit, hometown, "
            "stadium, county, capital, birthplace, city of license"
        ),
        _place,
        ("in", "at", "from"),
    ),
    _Kind(
        _named(
            "team, opponent, club, home team, away team, school, visitor, college, constructor, party, manufacturer, "
            "network, franchise, home, away, visiting team"
        ),
        _team,
        ("for", "of", "against", "with", "when playing"),
    ),
    _Kind(_named("date, air date, original air date, date of birth, release date"), _date, ("on", "dated", "from")),
    _Kind(
        _named("score, result, record, final score, home team score, away team score, time, to par"),
        _score,
        ("with", "that ended", "with a"),
    ),
)
_TEXT_NAMES: Final = _named(
    "title, type, position, status, class, language, format, label, role, series, surface, event, tournament, "
    "competition, division, conference, model, engine, chassis, notes, tyres, song, album, description, category, "
    "season, code, production code, decision, method, gender, call sign, branch, religion, genre, award, film, town, "
    "episode title, original title, high points, high rebounds, high assists, location attendance, save, loss, "
    "street, address, district, species, power, years, affiliation, kickoff, network, college, lyrics, owner, color"
)
_NUMBER_NAMES: Final = _named(
    "year, attendance, points, rank, round, pick, games, wins, losses, draws, goals, laps, grid, crowd, population, "
    "area, week, game, total, gold, silver, bronze, played, lost, drawn, age, height, weight, floors, seats, votes, "
    "caps, byes, against, position, no., #, pick #, overall, episode #, viewers (millions), money ($), series #, "
    "rebounds, assists, points for, goals against, enrollment, founded, length (km), speed (mph), starts, poles, "
    "earnings ($), yards, touchdowns, frequency, density, elevation (m), area (km 2 ), tries, entries, "
    "first elected, percent, % of vote, seasons, matches, innings, average"
)


@dataclass(frozen=True, slots=True)
class _Drawn:
    name: str
    number: bool
    value: Callable[[Draw], str]
    unsaid: tuple[str, ...] = ()  # words in its place; empty: it is always said


def _columns(draw: Draw, *, strange: bool) -> list[_Drawn]:
    found = [_Drawn(draw.one(kind.names), False, kind.value, kind.asked) for kind in _KINDS_OF_COLUMN if draw.below(2)]
    for _ in range(max(2, 4 + draw.below(4) - len(found))):
        number = bool(draw.below(2))
        found.append(_Drawn(_name(draw, number=number), number, _number if number else _other))
    found = [_made_strange(one, draw) if strange and draw.below(4) else one for one in found]
    return draw.some(found, len(found))


def _made_strange(column: "_Drawn", draw: Draw) -> "_Drawn":
    name = draw.one((_no_words(draw), _no_words(draw), f"{column.name} {_no_word(draw)}"))
    return _Drawn(name, column.number, column.value if column.number else _no_words)


def _name(draw: Draw, *, number: bool) -> str:
    common = draw.one(_NUMBER_NAMES if number else _TEXT_NAMES)
    if draw.below(5) < 3:
        return common
    word, thing = draw.one(NUMBERS if number else TEXTS).replace("_", " "), draw.one(THINGS)
    forms = [word, thing, f"{thing} {word}", f"{draw.one(KINDS)} {common}", f"{_invented(draw)} {common}"]
    forms += [
        f"{common} ({thing})",
        _invented(draw),
        f"{common} {1 + draw.below(9)}",
        f"{1950 + draw.below(70)} {word}",
    ]
    if number:
        forms += [
            f"{word} #",
            f"{thing}s {draw.one(('won', 'lost', 'for', 'against'))}",
            f"no. of {thing}s",
            f"% {word}",
        ]
    return draw.one(forms)


# --- questions


def _pair(draw: Draw, name: str, *, strange: bool) -> Pair:
    columns = _columns(draw, strange=strange)
    titles = [draw.one((it, it.title(), it.capitalize(), it.capitalize())) for it in (one.name for one in columns)]
    names = column_names(titles)
    shown, *others = draw.some(range(len(columns)), min(len(columns), 2 + _further(draw)))
    aggregate = draw.one(("MAX", "MIN", "COUNT", "SUM", "AVG")) if draw.below(10) < 3 else ""
    if aggregate != "COUNT" and aggregate and not columns[shown].number:
        aggregate = "COUNT"
    said: list[str] = []
    conditions: list[Condition] = []
    for index in others:
        words, condition = _condition(columns[index], index, _said(names[index], draw), draw)
        said.append(words)
        conditions.append(condition)
    asked = _asked(aggregate, _said(names[shown], draw), draw)
    joined = draw.one((" and ", ", and ", " and ", ", ")).join(said)
    question = draw.one((f"{asked} {joined}", f"{asked} {joined}", f"{asked} {joined}", f"{joined}, {_lowered(asked)}"))
    question = draw.one((question, f"{question}?", f"{question}?", f"{question} ?"))
    query = Query(AGGREGATES.index(aggregate), shown, tuple(conditions))
    schema = Schema(
        name,
        "drawn",
        (
            Table(
                "table",
                tuple(
                    Column(
                        name=title,
                        sql_type="real" if column.number else "text",
                        type=ColumnType.NUMBER if column.number else ColumnType.TEXT,
                        primary_key=False,
                        foreign_key=None,
                    )
                    for title, column in zip(names, columns, strict=True)
                ),
            ),
        ),
    )
    return Pair(question, text(query, names), schema)


def _further(draw: Draw) -> int:
    """Conditions beyond the first."""
    return draw.one((0, 0, 0, 0, 0, 0, 0, 1, 1, 1))


def _said(name: str, draw: Draw) -> str:
    return draw.one((name, name, name.lower(), name.lower(), name.title()))


def _lowered(words: str) -> str:
    return words[0].lower() + words[1:]


def _condition(column: _Drawn, index: int, said: str, draw: Draw) -> tuple[str, Condition]:
    """Words for it and what they ask."""
    operator = draw.one((_EQUAL, _MORE, _LESS)) if column.number else _EQUAL
    value = column.value(draw) if column.number else _cased(column.value(draw), draw)
    condition = Condition(index, operator, value, quoted=not column.number)
    if operator != _EQUAL:
        more = ("larger than", "greater than", "more than", "over", "higher than", "bigger than")
        less = ("smaller than", "less than", "under", "fewer than", "lower than", "below")
        than = draw.one(more if operator == _MORE else less)
        return draw.one(
            (
                f"with {said} {than} {value}",
                f"when {said} is {than} {value}",
                f"with a {said} {than} {value}",
                f"has a {said} {than} {value}",
                f"with {than} {value} {said}",
            )
        ), condition
    if column.unsaid and draw.below(5) < 2:
        return f"{draw.one(column.unsaid)} {value}", condition
    forms = (
        f"with {said} of {value}",
        f"with a {said} of {value}",
        f"when {said} is {value}",
        f"when the {said} was {value}",
        f"has a {said} of {value}",
        f"where {said} is {value}",
        f"for {said} {value}",
        f"has {value} as {said}",
        f"with {value} as the {said}",
        f"that has a {said} of {value}",
        f"for {said} of {value}",
        f"when {value} is the {said}",
        f"for the {value} {said}",
        f'when {said} is "{value}"',
        f"had a {said} of {value}",
        f"if the {said} is {value}",
    )
    return draw.one(forms), condition


_ASKED: Final[dict[str, tuple[str, ...]]] = {
    "": (
        "What is the {}",
        "What is the {}",
        "Which {}",
        "Which {}",
        "What {}",
        "What's the {}",
        "Name the {}",
        "what is the {}",
        "Who is the {}",
        "What was the {}",
        "which {}",
        "Tell me the {}",
        "What are the {}",
        "I want the {}",
        "what {}",
        "What is {}",
        "When is the {}",
        "Where is the {}",
        "what's the {}",
        "Give the {}",
    ),
    "COUNT": (
        "How many {}",
        "What is the total number of {}",
        "Name the number of {}",
        "how many {}",
        "what is the number of {}",
        "Total number of {}",
        "How many {} are there",
    ),
    "MAX": (
        "What is the highest {}",
        "What is the largest {}",
        "What is the most {}",
        "What is the maximum {}",
        "Name the most {}",
        "What was the biggest {}",
        "Which highest {}",
    ),
    "MIN": (
        "What is the lowest {}",
        "What is the smallest {}",
        "What is the least {}",
        "What is the minimum {}",
        "Name the least {}",
        "Which lowest {}",
        "What is the fewest {}",
    ),
    "SUM": (
        "What is the total {}",
        "What is the sum of {}",
        "How much {}",
        "What is the sum of the {}",
        "Name the sum of {}",
    ),
    "AVG": (
        "What is the average {}",
        "Name the average {}",
        "What is the mean {}",
        "Which average {}",
        "what's the average {}",
    ),
}


def _asked(aggregate: str, said: str, draw: Draw) -> str:
    return draw.one(_ASKED[aggregate]).format(said.replace("{", "").replace("}", ""))
