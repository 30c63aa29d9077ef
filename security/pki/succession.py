"""A new identity key is believed when the one before signed for it: only its owner can hand its place on."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from security.identifiers import Identity
from security.pki.identity_key import public_key_bytes, sign, verify

DOMAIN = b"identity/succession"


def succession_statement(old_key: Ed25519PrivateKey, *, identity: Identity, new_key: Ed25519PublicKey) -> bytes:
    """The 64-byte signature by which `old_key` names its successor for `identity`, a silo of one federation."""
    return sign(old_key, domain=DOMAIN, payload=_payload(identity, old_key.public_key(), new_key))


def check_succession(
    statement: bytes, *, identity: Identity, old_key: Ed25519PublicKey, new_key: Ed25519PublicKey
) -> None:
    """Raises IntegrityError unless `old_key` named `new_key` as its successor for `identity`."""
    verify(old_key, domain=DOMAIN, payload=_payload(identity, old_key, new_key), signature=statement)


def _payload(identity: Identity, old_key: Ed25519PublicKey, new_key: Ed25519PublicKey) -> bytes:
    # Two fields of fixed length before the one that varies: no other triple gives these bytes.
    return public_key_bytes(old_key) + public_key_bytes(new_key) + identity.uri.encode("ascii")
