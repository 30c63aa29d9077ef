"""A tokenizer.json tried before it is used: looked at part by part, built, and given a few texts.

In a process of its own (`confined`): the library ends a process where memory does not suffice, and panics on much that
it does not understand, which is no Exception.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from lorica_security.errors import MalformedMessage
from silo_wire.model_folders.confined import USUAL, Limits, confined
from silo_wire.model_folders.tokenizer_parts import foreign_parts
from silo_wire.plans.model_files import TOKENIZER_FILE

PANIC: Final = "PanicException"
"""What the tokenizers library raises where its own code panics; no Exception, and exported nowhere."""
_TEXTS: Final = (
    "",
    "a",
    "how many patients of dr. O'Neill were there in 1999 ?",
    'SELECT COUNT ( * ) FROM T WHERE A > 0.5 AND B = "x_y" ;\t\n',
    "a" * 2000,
    " " * 2000,
    "▁" * 200 + "<pad></s><unk><extra_id_0>",
    "e\N{COMBINING ACUTE ACCENT}\N{COMBINING DOT BELOW} ﬁ \N{FULLWIDTH LATIN CAPITAL LETTER A} ש ب \N{CYRILLIC SMALL LETTER IE} 東京 \U0001f600 \U0010fffd \0",  # noqa: E501
)
_MOST_TOKENS_PER_BYTE: Final = 4
_MOST_AROUND: Final = 16


def try_tokenizer(raw: bytes, limits: Limits = USUAL) -> None:
    """Raises MalformedMessage for a tokenizer.json that no tokenizer of T5's family is like, or that costs too much to
    use."""
    require_family(raw, TOKENIZER_FILE)
    confined("tokenizer", raw, f"{TOKENIZER_FILE} of the plan", limits)


def require_family(raw: bytes, shown: str) -> None:
    """Raises MalformedMessage naming the first part that no tokenizer of T5's family has."""
    if foreign := foreign_parts(raw):
        raise MalformedMessage(f"{shown} is none of T5's family: {foreign[0]}; take the model's own tokenizer")


def tried(raw: bytes) -> bytes:
    """Of the child: nothing, where the tokenizer can be built and makes no more tokens of a text than the text can
    have."""
    # Here, not above: what asks for a trial needs no library for it.
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(raw.decode())
    for text in _TEXTS:
        ids = tokenizer.encode(text).ids
        if len(ids) > _MOST_TOKENS_PER_BYTE * len(text.encode()) + _MOST_AROUND:
            raise MalformedMessage(f"makes {len(ids)} tokens of a text of {len(text.encode())} bytes")
        tokenizer.decode(ids)
    return b""


@contextmanager
def without_panics() -> Iterator[None]:
    """For what the library does in this very process: raises ValueError where it panics inside."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        raise ValueError(f"the tokenizers library panicked: {' '.join(str(error).split())[:200]}") from error
