"""The public text that the tokenizer of a model of a size is made from: no silo's data, by construction.

`public_text.txt` holds lists of words and patterns; the text is each pattern filled from its lists. A pattern yields as
many lines as its longest list has words, so that every word is met in every pattern that names its list.
"""

from collections.abc import Sequence
from importlib.resources import files
from string import Formatter

from lorica_security.errors import ConfigurationError


def public_text() -> list[str]:
    """The lines of the public text, always the same in the same order."""
    return expand(files(__name__).joinpath("public_text.txt").read_text(encoding="utf-8"))


def expand(source: str) -> list[str]:
    """The lines that `source` stands for; raises ConfigurationError where a pattern names a list that is not there."""
    lists: dict[str, list[str]] = {}
    patterns: list[tuple[int, str]] = []
    for number, line in enumerate(source.splitlines(), start=1):
        if line.startswith("@"):
            name, _, words = line[1:].partition(":")
            lists[name.strip()] = [word.strip() for word in words.split(",")]
        elif line and not line.startswith("#"):
            patterns.append((number, line))
    return [filled for number, pattern in patterns for filled in _fill(number, pattern, lists)]


def _fill(number: int, pattern: str, lists: dict[str, list[str]]) -> list[str]:
    parts = [
        (text, _words(number, field, lists) if field else [""]) for text, field, _, _ in Formatter().parse(pattern)
    ]
    lines = max(len(words) for _, words in parts)
    return [
        "".join(text + _turn(words, line, place, number) for place, (text, words) in enumerate(parts))
        for line in range(lines)
    ]


def _words(number: int, field: str, lists: dict[str, list[str]]) -> list[str]:
    words = lists.get(field.lower())
    if words is None:
        raise ConfigurationError(
            f"public text line {number}: no list {field.lower()!r}: add a line '@{field.lower()}: ...'"
        )
    return [word.upper() for word in words] if field.isupper() else words


def _turn(words: Sequence[str], line: int, place: int, number: int) -> str:
    """The word of `line`: lists are walked from different places, so that slots of one list differ within a line."""
    return words[(line + 7 * place + number) % len(words)]
