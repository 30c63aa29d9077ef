"""The template of a statement: what is left of it without values and names.

Two questions whose SQL has one template differ in names and values alone; a model that has seen one of them has seen the other's
structure. So a template belongs to one split.
"""

from collections.abc import Iterable

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

_DIALECTS = ("sqlite", "postgres")
_PLACE = "_"
_VALUES = (TokenType.STRING, TokenType.NUMBER, TokenType.NATIONAL_STRING, TokenType.HEX_STRING, TokenType.BIT_STRING)
_NAMES = (TokenType.VAR, TokenType.IDENTIFIER)
MAX_CHARACTERS = 20_000
"""Longer statements are compared word for word."""


class Templates:
    """Remembers what it has parsed: statements that differ in values alone are parsed once."""

    def __init__(self) -> None:
        self._parsed: dict[tuple[str, ...], str] = {}

    def of(self, sql: str) -> str:
        """Of whatever neither dialect parses, its words without values and names; at worst the statement itself."""
        if len(sql) > MAX_CHARACTERS:
            return " ".join(sql.split())
        tokens = _tokens(sql)
        key = tuple("_" if token.token_type in _VALUES else token.text for token in tokens)
        if not tokens:
            return " ".join(sql.split()).casefold()
        if key not in self._parsed:
            self._parsed[key] = _template(sql) or _words(tokens)
        return self._parsed[key]


def _tokens(sql: str) -> list[Token]:
    for dialect in _DIALECTS:
        try:
            return list(sqlglot.tokenize(sql, read=dialect))
        except SqlglotError:
            continue
    return []


def _words(tokens: Iterable[Token]) -> str:
    return " ".join(_PLACE if token.token_type in (*_VALUES, *_NAMES) else token.text.upper() for token in tokens)


def _template(sql: str) -> str:
    """The parsed statement as text, with one word for every name and value; "" where it does not parse."""
    for dialect in _DIALECTS:
        try:
            tree = sqlglot.parse_one(sql, read=dialect)
            return _stripped(tree).sql(dialect=dialect, comments=False)
        except (SqlglotError, RecursionError, ValueError):
            continue
    return ""


def _stripped(tree: "exp.Expr") -> "exp.Expr":
    place = exp.to_identifier(_PLACE)
    for node in list(tree.walk()):
        match node:
            case exp.Column(this=exp.Star()):
                node.replace(exp.Star())
            case exp.Column():  # with its table's name or without: that is style, as aliases are
                node.replace(exp.column(_PLACE))
            case exp.Alias():
                node.replace(node.this)
            case exp.Table() | exp.Subquery():
                for part in ("alias", "db", "catalog"):
                    node.set(part, None)
            case exp.Literal() | exp.Boolean() | exp.Neg(this=exp.Literal()):
                node.replace(exp.column(_PLACE))
            case _:
                pass
    for node in list(tree.find_all(exp.In)):
        node.set("expressions", node.expressions[:1])  # however many values
    for node in list(tree.find_all(exp.Identifier)):
        node.replace(place.copy())
    return tree
