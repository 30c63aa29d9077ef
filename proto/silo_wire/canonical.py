"""One spelling for everything that is hashed or signed: canonical JSON, BLAKE3 digests, domain-separated statements.

Canonical JSON is UTF-8, keys sorted, no spaces, finite numbers only; floats are Python's shortest round-trip form.
A digest is the lower-case hexadecimal BLAKE3 of the bytes, 64 characters; on the wire it is the 32 bytes.
"""

import json
from typing import NewType

from blake3 import blake3

from lorica_security.errors import MalformedMessage

Digest = NewType("Digest", str)
DIGEST_BYTES = 32


def canonical_json(value: object) -> bytes:
    """`value` (dicts, lists, strings, numbers, booleans, None) as canonical JSON; raises ValueError for NaN and
    infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_of(data: bytes | bytearray | memoryview) -> Digest:
    return Digest(blake3(data).hexdigest())


def digest_from_wire(raw: bytes, field: str) -> Digest:
    """The digest that a message field carries; raises MalformedMessage unless it is 32 bytes."""
    if len(raw) != DIGEST_BYTES:
        raise MalformedMessage(f"{field} has {len(raw)} bytes, a digest has {DIGEST_BYTES}")
    return Digest(raw.hex())


def digest_to_wire(digest: Digest) -> bytes:
    return bytes.fromhex(digest)
