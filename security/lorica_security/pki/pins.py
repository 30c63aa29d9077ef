"""SPKI pins (RFC 7469 2.1.1): base64 of SHA-256 over the DER SubjectPublicKeyInfo. A pin outlives the certificate, not
the key."""

import base64
import binascii
import hashlib
import hmac
from typing import NewType

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from lorica_security.errors import MalformedMessage

SpkiPin = NewType("SpkiPin", str)

DIGEST_BYTES = 32


def spki_pin(certificate: x509.Certificate) -> SpkiPin:
    """The pin of the certificate's public key, 44 characters."""
    spki = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pin_from_digest(hashlib.sha256(spki).digest())


def pin_from_digest(digest: bytes) -> SpkiPin:
    if len(digest) != DIGEST_BYTES:
        raise MalformedMessage(f"SPKI digest of {len(digest)} bytes: a SHA-256 digest has {DIGEST_BYTES}")
    return SpkiPin(base64.b64encode(digest).decode("ascii"))


def pin_digest(pin: SpkiPin) -> bytes:
    """The 32 bytes that `pin` encodes."""
    return base64.b64decode(pin)


def parse_pin(text: str) -> SpkiPin:
    """`text` as a pin, in its one canonical spelling; raises MalformedMessage."""
    try:
        pin = pin_from_digest(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, MalformedMessage):
        pin = None
    if pin != text:  # base64 leaves two spare bits at the end, which must be zero
        raise MalformedMessage(f"SPKI pin {text[:64]!r} is not base64 of 32 bytes: copy it again")
    return pin


def pins_equal(one: SpkiPin, other: SpkiPin) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(one.encode(), other.encode())
