"""The identity key endorses each certificate request: one owner holds both keys, and means this name in this
federation.

At enrolment the key that endorses is the one that is pinned from then on; a renewal is endorsed by the pinned one, so
that a stolen TLS key renews nothing.
"""

import hashlib

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lorica_security.identifiers import Identity
from lorica_security.identity.identity_key import public_key_bytes, public_key_from_bytes, sign, verify

DOMAIN = b"enrolment/endorse-request"
RENEWAL_DOMAIN = b"renewal/endorse-request"


def endorse_request(key: Ed25519PrivateKey, *, request: bytes, identity: Identity) -> bytes:
    """The identity key's signature over its own public key, the request's exact bytes and the name."""
    return sign(key, domain=DOMAIN, payload=_payload(key.public_key(), request, identity))


def check_endorsement(public_key: bytes, *, request: bytes, identity: Identity, signature: bytes) -> Ed25519PublicKey:
    """The identity key to pin for `identity`.

    Raises MalformedMessage for a key that is none, IntegrityError when it did not endorse this request for this name.
    """
    key = public_key_from_bytes(public_key)
    verify(key, domain=DOMAIN, payload=_payload(key, request, identity), signature=signature)
    return key


def endorse_renewal(key: Ed25519PrivateKey, *, request: bytes, identity: Identity) -> bytes:
    """The same for a request that renews a certificate."""
    return sign(key, domain=RENEWAL_DOMAIN, payload=_payload(key.public_key(), request, identity))


def check_renewal(key: Ed25519PublicKey, *, request: bytes, identity: Identity, signature: bytes) -> None:
    """Raises IntegrityError unless `key`, the pinned one, endorsed this request for this name."""
    verify(key, domain=RENEWAL_DOMAIN, payload=_payload(key, request, identity), signature=signature)


def _payload(key: Ed25519PublicKey, request: bytes, identity: Identity) -> bytes:
    # Two fields of fixed length before the one that varies: no other triple gives these bytes.
    return public_key_bytes(key) + hashlib.sha256(request).digest() + identity.uri.encode("ascii")
