"""Identity keys as people pass them on: hexadecimal in groups of four, which can be read out by telephone, and a check.

Peers pin the key itself, not a digest of it, so it is the key that is compared. The last group is a check over
federation, silo and key: a typing error is noticed, and so is the key of one silo under the name of another. It is no
protection against anybody; that is what comparing by telephone is for.
"""

import hashlib
import re

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.errors import ConfigurationError, MalformedMessage
from lorica_security.identifiers import Identity
from lorica_security.identity.identity_key import PUBLIC_KEY_BYTES, public_key_bytes, public_key_from_bytes

CHECK_BYTES = 2
GROUP = 4
GROUPS = 2 * (PUBLIC_KEY_BYTES + CHECK_BYTES) // GROUP

_CHECK_DOMAIN = b"lorica/v1/identity-key-text\0"
_DIGITS = re.compile(rf"[0-9a-f]{{{GROUPS * GROUP}}}")
_SPACING = re.compile(r"[\s-]")


def key_text(identity: Identity, key: Ed25519PublicKey) -> str:
    """The key of `identity` as 17 groups of four hexadecimal digits, joined by '-'."""
    raw = public_key_bytes(key)
    digits = (raw + _check(identity, raw)).hex()
    return "-".join(digits[place : place + GROUP] for place in range(0, len(digits), GROUP))


def key_from_text(identity: Identity, text: str) -> Ed25519PublicKey:
    """The key that `key_text` wrote for `identity`, in capitals or not, grouped in any way; raises
    ConfigurationError."""
    digits = _SPACING.sub("", text).lower()
    again = f"copy what `silo-agent trust own` prints at {identity.name}"
    if not _DIGITS.fullmatch(digits):
        raise ConfigurationError(
            f"identity key {text[:120]!r} is not {GROUPS} groups of {GROUP} of the digits 0-9 and a-f: {again}"
        )
    raw = bytes.fromhex(digits)
    key, check = raw[:PUBLIC_KEY_BYTES], raw[PUBLIC_KEY_BYTES:]
    if check != _check(identity, key):
        raise ConfigurationError(
            f"identity key {text[:120]!r} does not fit silo {identity.name} of federation {identity.federation}: "
            f"it is mistyped, or another silo's; {again}"
        )
    try:
        return public_key_from_bytes(key)
    except MalformedMessage as error:
        raise ConfigurationError(str(error)) from error


def _check(identity: Identity, key: bytes) -> bytes:
    return hashlib.sha256(_CHECK_DOMAIN + key + identity.uri.encode("ascii")).digest()[:CHECK_BYTES]
