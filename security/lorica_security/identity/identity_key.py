"""The long-lived Ed25519 identity key: what peers pin, apart from the short-lived TLS key.

Every signature names its domain, so that bytes signed for one purpose prove nothing for another:
Ed25519(b"lorica/v1/" + domain + b"\\0" + payload). A domain holds no zero byte, so the split is unique.
"""

import re

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64

_PREFIX = b"lorica/v1/"
_DOMAIN = re.compile(rb"[a-z0-9/-]{1,64}")

_FIELD_PRIME = 2**255 - 19
_ORDER_8_Y = 2707385501144840649318225287225658788936804267575313519463743609750303402022  # 8 points share y and -y
_SMALL_ORDER_Y = frozenset(
    {0, 1, _FIELD_PRIME - 1, _ORDER_8_Y, _FIELD_PRIME - _ORDER_8_Y, _FIELD_PRIME, _FIELD_PRIME + 1}
)
"""y coordinates of the points of order 1, 2, 4 and 8, with the two encodings above the prime that reduce to them."""


def new_identity_key() -> Ed25519PrivateKey:
    """A fresh key from the operating system's entropy."""
    return Ed25519PrivateKey.generate()


def sign(key: Ed25519PrivateKey, *, domain: bytes, payload: bytes) -> bytes:
    """The 64-byte signature of `payload` for one purpose, named by `domain` ([a-z0-9/-], 1 to 64 bytes)."""
    return key.sign(_message(domain, payload))


def verify(public_key: Ed25519PublicKey, *, domain: bytes, payload: bytes, signature: bytes) -> None:
    """Raises IntegrityError unless `signature` is `public_key`'s over this payload for this domain."""
    try:
        public_key.verify(signature, _message(domain, payload))
    except InvalidSignature:
        raise IntegrityError(
            f"signature for {domain.decode()} by identity key {public_key_bytes(public_key).hex()} does not match: "
            "refuse the bytes it came with"
        ) from None


def _message(domain: bytes, payload: bytes) -> bytes:
    if not _DOMAIN.fullmatch(domain):
        raise ValueError(f"signature domain {domain!r} is not 1 to 64 of a-z, 0-9, '/' and '-'")
    return _PREFIX + domain + b"\0" + payload


def public_key_bytes(public_key: Ed25519PublicKey) -> bytes:
    """The 32 raw bytes (RFC 8032 5.1.2)."""
    return public_key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def public_key_from_bytes(data: bytes) -> Ed25519PublicKey:
    """Parse 32 raw bytes; raises MalformedMessage.

    Points of small order are refused: for such a key there are signatures that fit many messages, so its owner could
    later deny having signed any of them.
    """
    if len(data) != PUBLIC_KEY_BYTES:
        raise MalformedMessage(f"identity key of {len(data)} bytes: an Ed25519 public key has {PUBLIC_KEY_BYTES}")
    y = int.from_bytes(data, "little") & (2**255 - 1)
    if y in _SMALL_ORDER_Y:
        raise MalformedMessage(f"identity key {data.hex()} is a point of small order: make a new identity key")
    return Ed25519PublicKey.from_public_bytes(data)


def identity_key_to_pem(key: Ed25519PrivateKey) -> bytes:
    """`key` as unencrypted PKCS#8 PEM: secret bytes, for a file of mode 0600."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def identity_key_from_pem(pem: bytes) -> Ed25519PrivateKey:
    """The private key in `pem`; raises ConfigurationError, which never shows the bytes."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigurationError(
            "identity key file holds no unencrypted PEM private key: restore it from backup"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(f"identity key file holds a {type(key).__name__}: restore the Ed25519 key from backup")
    return key
