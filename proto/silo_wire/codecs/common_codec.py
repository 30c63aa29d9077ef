"""What messages of all services have in common <-> `common.proto`: call keys, manifests, details, times.

`..._from_wire` raises MalformedMessage for a missing, oversized or out-of-range field and returns values that need no
second check; `..._to_wire` is its inverse. So it is in every module of this room.
"""

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import FederationName, SiloName
from silo_wire.canonical import Digest, digest_from_wire, digest_to_wire
from silo_wire.manifest import Manifest
from silo_wire.messages import (
    MAX_DETAIL_CHARACTERS,
    RoundKey,
)
from silo_wire.v1 import common_pb2

NO_DIGEST = Digest("")


def detail_from_wire(text: str) -> str:
    """A peer's free text, bounded and in one line, fit for a log or a terminal."""
    if len(text) > MAX_DETAIL_CHARACTERS:
        raise MalformedMessage(f"detail has {len(text)} characters, allowed are {MAX_DETAIL_CHARACTERS}")
    return "".join(character if character.isprintable() else " " for character in text)


def detail_to_wire(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)[:MAX_DETAIL_CHARACTERS]


def call_key(
    *, federation: FederationName, silo: SiloName, plan: Digest = NO_DIGEST, round_number: int = 0, attempt: int = 0
) -> common_pb2.CallKey:
    return common_pb2.CallKey(
        federation=federation, plan_digest=digest_to_wire(plan), round=round_number, attempt=attempt, silo=silo
    )


def round_call_key(key: RoundKey, silo: SiloName) -> common_pb2.CallKey:
    return common_pb2.CallKey(
        federation=key.federation, plan_digest=digest_to_wire(key.plan), round=key.round, attempt=key.attempt, silo=silo
    )


def round_key_from_wire(key: common_pb2.CallKey) -> RoundKey:
    return RoundKey(
        federation=key.federation,
        plan=digest_from_wire(key.plan_digest, "call key plan_digest"),
        round=key.round,
        attempt=key.attempt,
    )


def manifest_to_wire(manifest: Manifest) -> common_pb2.Manifest:
    return common_pb2.Manifest(
        layout_digest=digest_to_wire(manifest.layout_digest),
        total_bytes=manifest.total_bytes,
        chunk_bytes=manifest.chunk_bytes,
        chunk_digests=manifest.chunk_digests,
    )


def manifest_from_wire(message: common_pb2.Manifest) -> Manifest:
    return Manifest(
        digest_from_wire(message.layout_digest, "manifest layout_digest"),
        message.total_bytes,
        message.chunk_bytes,
        tuple(message.chunk_digests),
    )


def seconds_from_wire(value: float) -> float:
    """How long an order still stands; raises MalformedMessage for what is no duration."""
    if not 0 <= value < float("inf"):  # also catches NaN
        raise MalformedMessage(f"seconds_left is {value}: it must be finite and not negative")
    return value
