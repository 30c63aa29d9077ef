"""What the coordinator signs of an update that it holds, and both sides' audit heads as they travel beside it.

A silo sends how far its own log is with each update; the receipt countersigns that, and says how far the coordinator's
is, in which the update stands already. So each side's log holds evidence of the other's: neither can be cut or written
anew unseen.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.audit.chain import Head
from lorica_security.audit.signed_head import SignedHead
from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity.identity_key import verify
from silo_wire.canonical import Digest, canonical_json, digest_from_wire, digest_to_wire
from silo_wire.messages import RoundKey
from silo_wire.v1 import common_pb2, federation_pb2

RECEIPT_DOMAIN = "update-receipt"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReceipt:
    """`shown` is the head of the silo's log that came with the update, `head` the coordinator's own, which covers the
    update."""

    key: RoundKey
    silo: SiloName
    update: Digest
    total_bytes: int
    shown: Head
    head: SignedHead
    signature: bytes

    @property
    def statement(self) -> bytes:
        return receipt_statement(
            key=self.key,
            silo=self.silo,
            update=self.update,
            total_bytes=self.total_bytes,
            shown=self.shown,
            head=self.head.head,
        )

    def check(self, coordinator: Ed25519PublicKey) -> None:
        """Raise IntegrityError unless the coordinator signed both the receipt and the head of its log in it."""
        verify(coordinator, domain=RECEIPT_DOMAIN.encode(), payload=self.statement, signature=self.signature)
        self.head.check(coordinator)

    def particulars(self) -> Mapping[str, str | int]:
        """As an entry of the silo's log holds it."""
        return {
            "plan": self.key.plan,
            "round": self.key.round,
            "attempt": self.key.attempt,
            "update": self.update,
            "bytes": self.total_bytes,
            "shown_sequence": self.shown.sequence,
            "shown_digest": self.shown.digest,
            "signature": self.signature.hex(),
            **self.head.particulars(),
        }

    @classmethod
    def from_particulars(
        cls, details: Mapping[str, object], *, federation: FederationName, silo: SiloName
    ) -> "UpdateReceipt":
        """What `particulars` gave; raises MalformedMessage."""
        head = SignedHead.from_particulars(details)
        try:
            if head is None:
                raise ValueError("it names no head of the coordinator's log")
            return cls(
                key=RoundKey(
                    federation=federation,
                    plan=Digest(str(details["plan"])),
                    round=int(str(details["round"])),
                    attempt=int(str(details["attempt"])),
                ),
                silo=silo,
                update=Digest(str(details["update"])),
                total_bytes=int(str(details["bytes"])),
                shown=Head(int(str(details["shown_sequence"])), str(details["shown_digest"])),
                head=head,
                signature=bytes.fromhex(str(details["signature"])),
            )
        except (ValueError, KeyError) as error:
            raise MalformedMessage(f"the receipt does not parse: {error}") from error


def receipt_statement(*, key: RoundKey, silo: str, update: Digest, total_bytes: int, shown: Head, head: Head) -> bytes:
    """Signed by the coordinator: it holds these bytes of this silo for this attempt, and its log says so up to
    `head`."""
    return canonical_json(
        {
            "attempt": key.attempt,
            "bytes": total_bytes,
            "federation": key.federation,
            "log": {"digest": head.digest, "sequence": head.sequence},
            "plan": key.plan,
            "round": key.round,
            "shown": {"digest": shown.digest, "sequence": shown.sequence},
            "silo": silo,
            "update": update,
        }
    )


def silo_uri(federation: FederationName, silo: SiloName) -> str:
    return Identity(federation, Role.SILO, silo).uri


def coordinator_uri(federation: FederationName) -> str:
    return Identity(federation, Role.COORDINATOR).uri


def head_to_wire(head: SignedHead) -> common_pb2.AuditHead:
    return common_pb2.AuditHead(
        sequence=head.head.sequence, digest=digest_to_wire(Digest(head.head.digest)), signature=head.signature
    )


def head_from_wire(message: common_pb2.AuditHead, *, writer: str) -> SignedHead:
    """The head that a message carries, of `writer`, whom the connection is with; raises MalformedMessage."""
    head = Head(message.sequence, digest_from_wire(message.digest, "audit head digest"))
    return SignedHead(writer=writer, head=head, signature=message.signature)


def receipt_to_wire(receipt: UpdateReceipt) -> federation_pb2.UpdateReceipt:
    return federation_pb2.UpdateReceipt(
        update_digest=digest_to_wire(receipt.update),
        total_bytes=receipt.total_bytes,
        shown_sequence=receipt.shown.sequence,
        shown_digest=digest_to_wire(Digest(receipt.shown.digest)),
        head=head_to_wire(receipt.head),
        signature=receipt.signature,
    )


def receipt_from_wire(message: federation_pb2.UpdateReceipt, *, key: RoundKey, silo: SiloName) -> UpdateReceipt:
    """For an update of `silo` in `key`, which the message does not repeat; raises MalformedMessage."""
    return UpdateReceipt(
        key=key,
        silo=silo,
        update=digest_from_wire(message.update_digest, "update receipt digest"),
        total_bytes=message.total_bytes,
        shown=Head(message.shown_sequence, digest_from_wire(message.shown_digest, "update receipt shown_digest")),
        head=head_from_wire(message.head, writer=coordinator_uri(FederationName(key.federation))),
        signature=message.signature,
    )
