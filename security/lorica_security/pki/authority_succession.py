"""An authority names its successor, so that whoever pinned the one believes the other.

An enrolment token pins the authority of the day on which it was made. Certificates cannot say that a later one follows
it: an authority of Lorica signs leaves alone (path length 0). Its key therefore signs a statement, once, while it is at
hand: ECDSA with SHA-256 over b"lorica/v1/authority-succession\\0", and the SHA-256 of the two certificates.
"""

import hashlib
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from lorica_security.errors import MalformedMessage

CERTIFICATE_DIGEST_BYTES = 32
MAX_SIGNATURE_BYTES = 256
MOST_SUCCESSIONS = 16

_DOMAIN = b"lorica/v1/authority-succession\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthoritySuccession:
    """SHA-256 of either certificate, and the predecessor's signature. Raises MalformedMessage for sizes that are
    none."""

    predecessor: bytes
    successor: bytes
    signature: bytes

    def __post_init__(self) -> None:
        if not len(self.predecessor) == len(self.successor) == CERTIFICATE_DIGEST_BYTES:
            raise MalformedMessage(f"authority succession: a certificate's digest has {CERTIFICATE_DIGEST_BYTES} bytes")
        if not 0 < len(self.signature) <= MAX_SIGNATURE_BYTES:
            raise MalformedMessage(f"authority succession with a signature of {len(self.signature)} bytes")

    @classmethod
    def sign(
        cls, key: ec.EllipticCurvePrivateKey, *, predecessor: x509.Certificate, successor: x509.Certificate
    ) -> "AuthoritySuccession":
        """`key` is the predecessor's."""
        old, new = certificate_digest(predecessor), certificate_digest(successor)
        return cls(predecessor=old, successor=new, signature=key.sign(_payload(old, new), ec.ECDSA(hashes.SHA256())))

    def holds(self, *, predecessor: x509.Certificate, successor: x509.Certificate) -> bool:
        """Whether it is about these two, and the predecessor's key signed it."""
        old, new = certificate_digest(predecessor), certificate_digest(successor)
        key = predecessor.public_key()
        if (self.predecessor, self.successor) != (old, new) or not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        try:
            key.verify(self.signature, _payload(old, new), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True


def certificate_digest(certificate: x509.Certificate) -> bytes:
    """SHA-256 of the certificate, 32 bytes."""
    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest()


def _payload(predecessor: bytes, successor: bytes) -> bytes:
    return _DOMAIN + predecessor + successor
