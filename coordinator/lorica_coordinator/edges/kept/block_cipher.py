"""Blocks of kept files are encrypted before they leave: the server, its people and its versions see ciphertext.

Evidence of masked rounds has what silos revealed for a sum, and whoever reads it counts as one that colludes. The key
is in neither bucket nor database: it follows from the coordinator's identity key
(lorica_security/identity/derived_key.py).
"""

import secrets
from typing import Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lorica_security.errors import IntegrityError
from lorica_security.identity.derived_key import key_of_identity

DOMAIN: Final = b"kept-block-key"
NONCE_BYTES: Final = 12
MORE_BYTES: Final = NONCE_BYTES + 16
"""By which an object is longer than its block: nonce, tag."""


class BlockCipher:
    """AES-256-GCM with a fresh nonce for each block, bound to the name of its object."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    @classmethod
    def of(cls, identity: Ed25519PrivateKey, federation: str) -> Self:
        """Raises ConfigurationError for a key that cannot be used so."""
        return cls(key_of_identity(identity, DOMAIN, federation.encode()))

    def seal(self, name: str, content: bytes | memoryview, memory: memoryview) -> memoryview:
        """`content` encrypted for the object of this name, at the begin of `memory`."""
        sealed = memory[: len(content) + MORE_BYTES]
        sealed[:NONCE_BYTES] = nonce = secrets.token_bytes(NONCE_BYTES)
        self._cipher.encrypt_into(nonce, content, name.encode(), sealed[NONCE_BYTES:])
        return sealed

    def open(self, name: str, sealed: bytes | memoryview, where: str) -> bytes:
        """Raises IntegrityError naming `where` for what was not sealed under this name, by this coordinator."""
        try:
            return self._cipher.decrypt(bytes(sealed[:NONCE_BYTES]), sealed[NONCE_BYTES:], name.encode())
        except (InvalidTag, ValueError):
            raise IntegrityError(
                f"{where} is not what was kept: it was not encrypted by this coordinator for this place; restore that "
                "object from the bucket's versions, or delete what is below its path to go on without it"
            ) from None
