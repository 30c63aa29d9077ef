"""The template of a statement: what is left of it without values and names.

Two questions whose SQL has one template differ in names and values alone; a model that has seen one of them has seen
the other's structure. So a template belongs to one split.
"""

import logging
from collections.abc import Iterable

import sqlglot
from sqlglot import ErrorLevel, exp
from sqlglot.errors import SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

_DIALECTS = ("sqlite", "postgres")
_PLACE = "_"
_TEXT, _NUMBER = "'_'", "1"
_VALUES = {
    TokenType.NUMBER: _NUMBER,
    **dict.fromkeys(
        (
            TokenType.STRING,
            TokenType.NATIONAL_STRING,
            TokenType.HEX_STRING,
            TokenType.BIT_STRING,
            TokenType.BYTE_STRING,
            TokenType.RAW_STRING,
            TokenType.HEREDOC_STRING,
            TokenType.UNICODE_STRING,
        ),
        _TEXT,
    ),
}
_NAMES = (TokenType.VAR, TokenType.IDENTIFIER)
MAX_CHARACTERS = 20_000
"""Longer statements are compared word for word."""

# It warns of what a dialect has no word for, which changes no template and is nothing that the user can mend.
logging.getLogger("sqlglot").setLevel(logging.ERROR)


class Templates:
    """Remembers what it has parsed: statements that differ in values alone are parsed once.

    Values are gone before a statement is parsed. So a template is that of the statement alone, whatever was parsed
    before it: a parser looks into some values, such as the unit of an interval or the path into a document.
    """

    def __init__(self) -> None:
        self._parsed: dict[tuple[str, str], str] = {}

    def of(self, sql: str) -> str:
        """Of whatever neither dialect parses, its words without values and names; at worst the statement itself."""
        if len(sql) > MAX_CHARACTERS:
            return " ".join(sql.split())
        words = ""
        for dialect in _DIALECTS:
            if not (tokens := _tokens(sql, dialect)):
                continue
            key = dialect, _without_values(sql, tokens)
            if key not in self._parsed:
                self._parsed[key] = _template(key[1], dialect)
            if found := self._parsed[key]:
                return found
            words = words or _words(tokens)
        return words or " ".join(sql.split()).casefold()


def _tokens(sql: str, dialect: str) -> list[Token]:
    try:
        return list(sqlglot.tokenize(sql, read=dialect))
    except SqlglotError:
        return []


def _without_values(sql: str, tokens: Iterable[Token]) -> str:
    parts, at = [], 0
    for token in tokens:
        if value := _VALUES.get(token.token_type):
            parts += [sql[at : token.start], value]
            at = token.end + 1
    return "".join([*parts, sql[at:]])


def _words(tokens: Iterable[Token]) -> str:
    return " ".join(
        _PLACE if token.token_type in _VALUES or token.token_type in _NAMES else token.text.upper() for token in tokens
    )


def _template(sql: str, dialect: str) -> str:
    """The parsed statement as text, with one word for every name and value; "" where it does not parse."""
    try:
        tree = sqlglot.parse_one(sql, read=dialect)
        return _stripped(tree).sql(dialect=dialect, comments=False, unsupported_level=ErrorLevel.IGNORE)
    except (SqlglotError, RecursionError, ValueError):
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
