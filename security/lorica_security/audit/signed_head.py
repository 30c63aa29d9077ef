"""What the writer of a log signs: that this is how far its log is, and what it holds up to there.

The same statement seals a log from within and is evidence in the hands of the other side: whoever holds one finds out
when the log was cut, or written anew, afterwards. Two of them that differ at one number prove that the writer keeps two
histories.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lorica_security.audit.chain import NO_ENTRY, Head, canonical, text, whole_number
from lorica_security.errors import IntegrityError, LoricaError, MalformedMessage
from lorica_security.identifiers import Identity
from lorica_security.identity.identity_key import SIGNATURE_BYTES, sign, verify

DOMAIN: Final = b"audit-head"
_DIGEST_BYTES: Final = 32
_MOST_ENTRIES: Final = 1 << 62


def head_statement(writer: str, head: Head) -> bytes:
    """`writer` is an identity's URI, which names federation and role."""
    return canonical({"digest": head.digest, "sequence": head.sequence, "writer": writer})


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedHead:
    """Sequence 0: the log has no entry yet. Raises MalformedMessage for what is no head of any log."""

    writer: str
    head: Head
    signature: bytes

    def __post_init__(self) -> None:
        Identity.from_uri(self.writer)
        sequence, digest = self.head.sequence, self.head.digest
        if not 0 <= sequence <= _MOST_ENTRIES or (sequence == 0) != (digest == NO_ENTRY):
            raise MalformedMessage(
                f"audit head of {self.writer} names digest {digest[:80]} as that of entry {sequence}"
            )
        if len(digest) != 2 * _DIGEST_BYTES or digest != digest.lower() or not _is_hex(digest):
            raise MalformedMessage(f"audit head of {self.writer} has {digest[:80]!r}, which is no digest")
        if len(self.signature) != SIGNATURE_BYTES:
            raise MalformedMessage(
                f"audit head of {self.writer} has a signature of {len(self.signature)} bytes, not {SIGNATURE_BYTES}"
            )

    @classmethod
    def sign(cls, key: Ed25519PrivateKey, *, writer: str, head: Head) -> "SignedHead":
        signature = sign(key, domain=DOMAIN, payload=head_statement(writer, head))
        return cls(writer=writer, head=head, signature=signature)

    def check(self, *keys: Ed25519PublicKey) -> None:
        """Raise IntegrityError unless one of `keys`, which the writer has or had, signed it."""
        for key in keys:
            try:
                verify(key, domain=DOMAIN, payload=head_statement(self.writer, self.head), signature=self.signature)
            except IntegrityError:
                continue
            return
        raise IntegrityError(f"audit head {self.head.sequence} of {self.writer} is not signed by its identity key")

    def particulars(self) -> Mapping[str, str | int]:
        """As an entry of the other side's log holds it, beside other particulars."""
        return {
            "head_writer": self.writer,
            "head_sequence": self.head.sequence,
            "head_digest": self.head.digest,
            "head_signature": self.signature.hex(),
        }

    @classmethod
    def from_particulars(cls, details: Mapping[str, object]) -> "SignedHead | None":
        """None of an entry that holds none. Raises MalformedMessage."""
        if "head_signature" not in details:
            return None
        return _from_fields({name: details.get(f"head_{name}") for name in _FIELDS}, "the head in an audit entry")

    def line(self) -> bytes:
        """As it is exported."""
        return canonical({name.removeprefix("head_"): value for name, value in self.particulars().items()}) + b"\n"


_FIELDS: Final = ("writer", "sequence", "digest", "signature")


def heads_from_lines(raw: bytes, where: str) -> tuple[SignedHead, ...]:
    """What `line` wrote, one after the other. Raises IntegrityError naming the line."""
    heads = []
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            heads.append(_from_fields(json.loads(line), f"{where} line {number}"))
        except (ValueError, RecursionError, LoricaError) as error:
            raise IntegrityError(f"{where} line {number} is no signed head of an audit log ({error})") from error
    return tuple(heads)


def check_one_history(heads: Iterable[SignedHead], where: str) -> None:
    """`heads` are one writer's, in the order in which they were given. Raises IntegrityError for a log that went back
    or forked."""
    newest: SignedHead | None = None
    for one in heads:
        if newest is not None and one.head.sequence < newest.head.sequence:
            raise IntegrityError(
                f"{where}: {one.writer} showed entry {one.head.sequence} of its log after entry "
                f"{newest.head.sequence}: its log was cut, or put back from a backup"
            )
        if newest is not None and one.head.sequence == newest.head.sequence and one.head != newest.head:
            raise IntegrityError(
                f"{where}: {one.writer} signed two entries {one.head.sequence} of its log, {newest.head.digest} and "
                f"{one.head.digest}: it keeps two histories"
            )
        newest = one


def _from_fields(value: Any, where: str) -> SignedHead:
    if not isinstance(value, dict) or set(value) != set(_FIELDS):
        raise MalformedMessage(f"{where} has not the fields {', '.join(_FIELDS)}")
    try:
        return SignedHead(
            writer=text(value["writer"]),
            head=Head(whole_number(value["sequence"]), text(value["digest"])),
            signature=bytes.fromhex(text(value["signature"])),
        )
    except ValueError as error:
        raise MalformedMessage(f"{where} does not parse: {error}") from error


def _is_hex(digits: str) -> bool:
    try:
        bytes.fromhex(digits)
    except ValueError:
        return False
    return True
