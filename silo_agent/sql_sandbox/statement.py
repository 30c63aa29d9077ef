"""One SELECT or nothing: the first look at a statement that a model wrote.

It gives early, clear refusals. It is not the wall: SQL that sqlglot reads otherwise than the database does must still
meet the authorizer (SQLite) or the read-only transaction, the cursor's grammar and the role (PostgreSQL).
"""

import re
from dataclasses import dataclass

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

from lorica_security.errors import UnsafeSql

SQL_BYTES = 100_000

_TRAILING = re.compile(r"[\s;]+\Z")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f\ud800-\udfff]")
_FIRST = (TokenType.SELECT, TokenType.WITH, TokenType.L_PAREN)
_FORBIDDEN = (exp.DML, exp.DDL, exp.Command, exp.Into, exp.Lock)


@dataclass(frozen=True, slots=True)
class Statement:
    """The text that the database gets, and whether its result has an order."""

    text: str
    ordered: bool


def one_select(sql: str, *, dialect: str) -> Statement:
    """`sql` without trailing semicolons, if it is one SELECT (or WITH ... SELECT); raises UnsafeSql otherwise."""
    text = _TRAILING.sub("", sql).strip()
    if not text:
        raise UnsafeSql("SQL refused: it is empty")
    if _CONTROL.search(text):
        raise UnsafeSql("SQL refused: it holds control characters")
    if len(text.encode()) > SQL_BYTES:
        raise UnsafeSql(f"SQL refused: it is longer than {SQL_BYTES} bytes")
    try:
        tokens = sqlglot.tokenize(text, read=dialect)
    except SqlglotError as error:
        raise UnsafeSql("SQL refused: its quotes or comments do not end") from error
    if not tokens or tokens[0].token_type not in _FIRST:
        raise UnsafeSql(
            f"SQL refused: it begins with {tokens[0].text[:20] if tokens else ''!r}, only one SELECT is allowed"
        )
    if any(token.token_type is TokenType.SEMICOLON for token in tokens):
        raise UnsafeSql("SQL refused: it has more than one statement, only one SELECT is allowed")
    _check_tree(text, dialect)
    return Statement(text=text, ordered=_is_ordered(tokens))


def _check_tree(text: str, dialect: str) -> None:
    try:
        trees = sqlglot.parse(text, read=dialect)
    except ParseError:
        return  # sqlglot does not know every construct; the database decides
    except RecursionError as error:
        raise UnsafeSql("SQL refused: it is nested too deeply") from error
    if len(trees) != 1 or not isinstance(trees[0], exp.Query):
        raise UnsafeSql("SQL refused: it is not one SELECT")
    for node in trees[0].walk():
        if isinstance(node, _FORBIDDEN):
            raise UnsafeSql(f"SQL refused: it holds {node.key.upper()}, only reading is allowed")


def _is_ordered(tokens: list[Token]) -> bool:
    depth = 0
    for token in tokens:
        if token.token_type is TokenType.L_PAREN:
            depth += 1
        elif token.token_type is TokenType.R_PAREN:
            depth -= 1
        elif token.token_type is TokenType.ORDER_BY and depth == 0:
            return True
    return False
