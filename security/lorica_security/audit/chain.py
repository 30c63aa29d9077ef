"""Lines that name each other: a file of JSON lines, only ever appended to, in which none can be changed, left out or
put in unseen.

Each line holds its number, counted from 1, the digest of the line before and its own; the first follows NO_ENTRY. The
newest line's number and digest, the head, stand for all of them. The privacy ledger and the audit log are such files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

NO_ENTRY: Final = "0" * 64


@dataclass(frozen=True, slots=True)
class Head:
    """The newest entry's number, 0 for none, and its digest."""

    sequence: int = 0
    digest: str = NO_ENTRY


def digest_of_entry(domain: str, fields: Mapping[str, object]) -> str:
    """64 lower-case hexadecimal digits over all that an entry says; `domain` keeps entries of different files apart."""
    return blake3(domain.encode() + b"\n" + canonical(fields)).hexdigest()


def line_of_entry(domain: str, fields: Mapping[str, object]) -> bytes:
    return canonical({**fields, "digest": digest_of_entry(domain, fields)}) + b"\n"


def canonical(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def whole_number(value: object) -> int:
    """`value` if it is one that an entry may hold; raises ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("no whole number")
    return value


def text(value: object) -> str:
    """`value` if it is text; raises ValueError."""
    if type(value) is not str:
        raise ValueError("no text")
    return value
