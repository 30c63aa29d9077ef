"""Keys that follow from an identity key: whoever has it comes to them, from a file and from a token, and nobody else.

A key is expanded from a signature over a statement that is signed for this purpose alone and never shown. Ed25519 signs
the same bytes the same way each time (RFC 8032).
"""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lorica_security.errors import ConfigurationError
from lorica_security.identity.identity_key import sign


def key_of_identity(identity: Ed25519PrivateKey, purpose: bytes, bound: bytes) -> bytes:
    """32 bytes for `purpose`, a domain of its own among signatures, and bound to `bound`.

    Raises ConfigurationError for a key that signs in another way each time: nothing could be read again.
    """
    signature = sign(identity, domain=purpose, payload=bound)
    if signature != sign(identity, domain=purpose, payload=bound):
        raise ConfigurationError(
            "the coordinator's identity key signs the same bytes in another way each time: what is encrypted under a "
            "key of it could not be read again; use a token that signs Ed25519 as RFC 8032 has it"
        )
    return HKDF(SHA256(), 32, salt=None, info=b"lorica/v1/" + purpose).derive(signature)
