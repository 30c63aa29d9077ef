"""A new identity key is believed when the one before signed for it: only its owner can hand its place on.

The successor signs as well, for whoever keeps the records: nobody can name a key that is not theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lorica_security.errors import IntegrityError, MalformedMessage
from lorica_security.identifiers import Identity
from lorica_security.identity.identity_key import SIGNATURE_BYTES, public_key_bytes, public_key_from_bytes, sign, verify

DOMAIN = b"identity/succession"
POSSESSION_DOMAIN = b"identity/successor"
MOST_SUCCESSIONS = 16
"""That are told of one silo, the newest: whoever pinned an older key compares by telephone again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """`statement` is the predecessor's signature by which it names its successor. Raises MalformedMessage."""

    predecessor: Ed25519PublicKey
    successor: Ed25519PublicKey
    statement: bytes

    def __post_init__(self) -> None:
        if len(self.statement) != SIGNATURE_BYTES:
            raise MalformedMessage(
                f"succession statement of {len(self.statement)} bytes: a signature has {SIGNATURE_BYTES}"
            )
        if self.predecessor == self.successor:
            raise MalformedMessage("an identity key is named its own successor: make a new key")

    @classmethod
    def of_bytes(cls, *, predecessor: bytes, successor: bytes, statement: bytes) -> "Succession":
        """From raw keys of 32 bytes; raises MalformedMessage."""
        return cls(
            predecessor=public_key_from_bytes(predecessor),
            successor=public_key_from_bytes(successor),
            statement=statement,
        )

    def check(self, identity: Identity) -> None:
        """Raises IntegrityError unless the predecessor signed for the successor, for `identity`."""
        check_succession(self.statement, identity=identity, old_key=self.predecessor, new_key=self.successor)


def succession_statement(old_key: Ed25519PrivateKey, *, identity: Identity, new_key: Ed25519PublicKey) -> bytes:
    """The 64-byte signature by which `old_key` names its successor for `identity`, a silo of one federation."""
    return sign(old_key, domain=DOMAIN, payload=_payload(identity, old_key.public_key(), new_key))


def check_succession(
    statement: bytes, *, identity: Identity, old_key: Ed25519PublicKey, new_key: Ed25519PublicKey
) -> None:
    """Raises IntegrityError unless `old_key` named `new_key` as its successor for `identity`."""
    verify(old_key, domain=DOMAIN, payload=_payload(identity, old_key, new_key), signature=statement)


def possession_statement(new_key: Ed25519PrivateKey, *, identity: Identity, old_key: Ed25519PublicKey) -> bytes:
    """The signature by which a successor shows that it is at hand where it is named."""
    return sign(new_key, domain=POSSESSION_DOMAIN, payload=_payload(identity, old_key, new_key.public_key()))


def check_possession(
    statement: bytes, *, identity: Identity, old_key: Ed25519PublicKey, new_key: Ed25519PublicKey
) -> None:
    """Raises IntegrityError unless `new_key` signed that it succeeds `old_key` for `identity`."""
    verify(new_key, domain=POSSESSION_DOMAIN, payload=_payload(identity, old_key, new_key), signature=statement)


def steps_between(
    successions: Sequence[Succession], *, identity: Identity, pinned: Ed25519PublicKey, present: Ed25519PublicKey
) -> tuple[Succession, ...]:
    """The signed steps that lead from the `pinned` key to the `present` one, in order; empty where they are the same.

    Raises IntegrityError where the steps given do not lead there, or one of them is not signed.
    """
    by_predecessor = {public_key_bytes(step.predecessor): step for step in successions}
    steps: list[Succession] = []
    at = pinned
    while at != present:
        step = by_predecessor.pop(public_key_bytes(at), None)
        if step is None:
            raise IntegrityError(
                f"no succession leads from the pinned identity key {public_key_bytes(pinned).hex()} of "
                f"{identity.uri} to {public_key_bytes(present).hex()}: ask that silo's people"
            )
        step.check(identity)
        steps.append(step)
        at = step.successor
    return tuple(steps)


def _payload(identity: Identity, old_key: Ed25519PublicKey, new_key: Ed25519PublicKey) -> bytes:
    # Two fields of fixed length before the one that varies: no other triple gives these bytes.
    return public_key_bytes(old_key) + public_key_bytes(new_key) + identity.uri.encode("ascii")
