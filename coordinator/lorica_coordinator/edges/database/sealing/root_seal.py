"""The root that noise is made from, sealed before it goes into a database: any coordinator with the same identity key
opens it, and nobody else (lorica_security/identity/derived_key.py).
"""

import secrets
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lorica_security.errors import IntegrityError
from lorica_security.identifiers import FederationName
from lorica_security.identity.derived_key import key_of_identity

DOMAIN: Final = b"release-root-seal"
_NONCE_BYTES: Final = 12


class RootSeal:
    """Of one coordinator. The identity key signs when something is first sealed or opened."""

    def __init__(self, key: Ed25519PrivateKey, federation: FederationName) -> None:
        self._identity, self._bound = key, federation.encode()

    def seal(self, root: bytes) -> bytes:
        """A fresh nonce of 96 bits, then AES-256-GCM. Raises ConfigurationError where it could not be opened again."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._key().encrypt(nonce, root, self._bound)

    def open(self, sealed: bytes, where: str) -> bytes:
        """Raises IntegrityError naming `where` for what this coordinator did not seal."""
        try:
            return self._key().decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], self._bound)
        except (InvalidTag, ValueError) as error:
            raise IntegrityError(
                f"{where} was not sealed by this coordinator's identity key, or was changed: noise that was made from "
                "it could not be made again; restore the database, or serve the folder with that key"
            ) from error

    def _key(self) -> AESGCM:
        return AESGCM(key_of_identity(self._identity, DOMAIN, self._bound))
