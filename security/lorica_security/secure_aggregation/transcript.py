"""One spelling for what is hashed, signed or bound to a key: typed, length-prefixed parts, and a purpose before them.

Two different lists of parts never give the same bytes: each part begins with a letter for its type and its length or
count.
"""

import struct
from collections.abc import Sequence

from blake3 import blake3

from lorica_security.errors import MalformedMessage

DIGEST_BYTES = 32
PREFIX = "lorica/v1/secure-aggregation/"

Part = bytes | bytearray | str | int | float | Sequence["Part"]


def framed(*parts: Part) -> bytes:
    """The parts as bytes; integers are signed 64-bit, floats IEEE 754 double, both big-endian."""
    return b"".join(_framed(part) for part in parts)


def _framed(part: Part) -> bytes:
    match part:
        case bytes() | bytearray():
            return b"b" + len(part).to_bytes(8, "big") + part
        case str():
            raw = part.encode()
            return b"s" + len(raw).to_bytes(8, "big") + raw
        case float():
            return b"f" + struct.pack(">d", part)
        case int():
            return b"i" + part.to_bytes(8, "big", signed=True)
        case _:
            return b"l" + len(part).to_bytes(8, "big") + framed(*part)


def digest(purpose: str, *parts: Part) -> bytes:
    """The 32-byte BLAKE3 digest of `parts` for one purpose."""
    return blake3(framed(PREFIX + purpose, *parts)).digest()


def check_bytes(owner: str, expected: int, **fields: bytes) -> None:
    """Raise MalformedMessage unless every field has the expected length."""
    for name, value in fields.items():
        if len(value) != expected:
            raise MalformedMessage(f"{owner} {name} has {len(value)} bytes: expected {expected}")
