"""The CA certificates that are accepted: one, or two and more while an old CA and its successor overlap."""

from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding

from security.errors import AuthenticationError, MalformedMessage
from security.pki.parsing import parse_certificates
from security.pki.pins import SpkiPin, pins_equal, spki_pin

MAX_AUTHORITIES = 16


@dataclass(frozen=True, slots=True)
class TrustBundle:
    """One to `MAX_AUTHORITIES` CA certificates. Raises MalformedMessage for a certificate that may not issue others."""

    authorities: tuple[x509.Certificate, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.authorities) <= MAX_AUTHORITIES:
            raise MalformedMessage(
                f"trust bundle with {len(self.authorities)} certificates: send 1 to {MAX_AUTHORITIES} CA certificates"
            )
        for certificate in self.authorities:
            if not is_authority(certificate):
                raise MalformedMessage(
                    f"certificate {name_of(certificate)} in the trust bundle is not a CA certificate: remove it"
                )

    @classmethod
    def from_pem(cls, pem: bytes) -> "TrustBundle":
        """Parse concatenated PEM; raises MalformedMessage."""
        return cls(parse_certificates(pem))

    def to_pem(self) -> bytes:
        return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in self.authorities)

    def pinned(self, pin: SpkiPin) -> "TrustBundle":
        """Only the self-signed CA with this pin; raises AuthenticationError without one.

        A pin fixes the key alone. The self-signature fixes the rest: without it, whoever relays the bundle could
        rewrite the dates and constraints around the pinned key.
        """
        for certificate in self.authorities:
            if pins_equal(spki_pin(certificate), pin):
                if not directly_issued(certificate, by=certificate):
                    raise AuthenticationError(
                        f"CA certificate {name_of(certificate)} has the pinned key and no valid signature of it: "
                        "somebody altered it on the way, do not enrol over this connection"
                    )
                return TrustBundle((certificate,))
        raise AuthenticationError(
            f"no CA certificate in the trust bundle has the pin {pin}: something stands between you and the coordinator, "
            "or the token is of another federation"
        )

    def issuers_of(self, certificate: x509.Certificate) -> tuple[x509.Certificate, ...]:
        """The CAs in this bundle whose signature `certificate` carries; several when a CA was renewed with its key."""
        return tuple(ca for ca in self.authorities if directly_issued(certificate, by=ca))


def is_authority(certificate: x509.Certificate) -> bool:
    """Whether basic constraints and key usage both allow it to sign certificates (RFC 5280 6.1.4)."""
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        return False
    return constraints.ca and usage.key_cert_sign


def directly_issued(certificate: x509.Certificate, *, by: x509.Certificate) -> bool:
    """Whether `by`'s name is the issuer and `by`'s key made the signature."""
    try:
        certificate.verify_directly_issued_by(by)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def name_of(certificate: x509.Certificate) -> str:
    """The subject, shortened and quoted: it may be hostile."""
    return repr(certificate.subject.rfc4514_string()[:120])
