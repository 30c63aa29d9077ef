"""What the coordinator signs of a silo's privacy ledger: that this head is the newest that it was shown.

It binds the coordinator's memory and not the silo's spending: what a silo may still release, its own ledger alone says.
"""

import json
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.audit.chain import NO_ENTRY, Head
from lorica_security.errors import IntegrityError, MalformedMessage
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.identity_key import SIGNATURE_BYTES, verify
from silo_wire.canonical import DIGEST_BYTES, Digest, canonical_json, digest_from_wire, digest_to_wire
from silo_wire.codecs.common_codec import call_key
from silo_wire.v1 import federation_pb2

LEDGER_DOMAIN = "ledger-head"
_MOST_ENTRIES = 1 << 62


def ledger_statement(*, federation: str, silo: str, head: Head) -> bytes:
    """Signed by the coordinator: of the heads of this silo's privacy ledger that it was shown, this is the newest."""
    return canonical_json({"digest": head.digest, "federation": federation, "sequence": head.sequence, "silo": silo})


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReceipt:
    """`newest` is the newest head that the coordinator knows, whether or not it is the one that was sent."""

    newest: Head
    signature: bytes

    def __post_init__(self) -> None:
        if len(self.signature) != SIGNATURE_BYTES:
            raise MalformedMessage(
                f"ledger receipt has a signature of {len(self.signature)} bytes, not {SIGNATURE_BYTES}"
            )

    def check(self, coordinator: Ed25519PublicKey, *, federation: str, silo: str) -> None:
        """Raise IntegrityError unless the coordinator signed it, for this silo."""
        statement = ledger_statement(federation=federation, silo=silo, head=self.newest)
        verify(coordinator, domain=LEDGER_DOMAIN.encode(), payload=statement, signature=self.signature)

    def to_json(self) -> bytes:
        return canonical_json(
            {"digest": self.newest.digest, "sequence": self.newest.sequence, "signature": self.signature.hex()}
        )

    @classmethod
    def from_json(cls, raw: bytes, where: str) -> "LedgerReceipt":
        """Raises IntegrityError naming `where` for what `to_json` never wrote."""
        try:
            value: Any = json.loads(raw)
            receipt = cls(
                newest=_head(value["sequence"], value["digest"], where), signature=bytes.fromhex(value["signature"])
            )
        except (ValueError, KeyError, TypeError, RecursionError, MalformedMessage) as error:
            raise IntegrityError(
                f"{where} is no receipt of a privacy ledger: the file was edited or damaged"
            ) from error
        if receipt.to_json() != raw:
            raise IntegrityError(f"{where} is no receipt of a privacy ledger: the file was edited or damaged")
        return receipt


def report_to_wire(
    *, federation: FederationName, silo: SiloName, head: Head, after: Head
) -> federation_pb2.LedgerReport:
    key = call_key(federation=federation, silo=silo)
    return federation_pb2.LedgerReport(key=key, head=_head_to_wire(head), after=_head_to_wire(after))


def receipt_to_wire(receipt: LedgerReceipt) -> federation_pb2.LedgerReceipt:
    return federation_pb2.LedgerReceipt(newest=_head_to_wire(receipt.newest), signature=receipt.signature)


def receipt_from_wire(message: federation_pb2.LedgerReceipt) -> LedgerReceipt:
    return LedgerReceipt(newest=head_from_wire(message.newest, "newest"), signature=message.signature)


def head_from_wire(message: federation_pb2.LedgerHead, field: str) -> Head:
    """Raises MalformedMessage for what is no head of any ledger."""
    return _head(message.sequence, digest_from_wire(message.digest, f"ledger head {field}"), f"ledger head {field}")


def _head_to_wire(head: Head) -> federation_pb2.LedgerHead:
    return federation_pb2.LedgerHead(sequence=head.sequence, digest=digest_to_wire(Digest(head.digest)))


def _head(sequence: object, digest: object, where: str) -> Head:
    if type(sequence) is not int or not 0 <= sequence <= _MOST_ENTRIES or type(digest) is not str:
        raise MalformedMessage(f"{where} has sequence {sequence}: allowed are 0 to {_MOST_ENTRIES}")
    if (sequence == 0) != (digest == NO_ENTRY) or len(bytes.fromhex(digest)) != DIGEST_BYTES:
        raise MalformedMessage(f"{where} names digest {digest[:80]} as that of entry {sequence}")
    return Head(sequence, digest)
