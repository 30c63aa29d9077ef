"""The CA certificates that are accepted: one, or two and more while an old CA and its successor overlap.

What TLS is given as its roots, and what a certificate is held against behind TLS, are `of_federation` alone: an
institution's own root may stand above an authority of a federation (and be what a token pins) without being believed
itself.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding

from lorica_security.errors import AuthenticationError, MalformedMessage
from lorica_security.identifiers import FederationName
from lorica_security.pki.authority_succession import AuthoritySuccession, certificate_digest
from lorica_security.pki.parsing import parse_certificates
from lorica_security.pki.pins import SpkiPin, pins_equal, spki_pin
from lorica_security.pki.profile import alternative_names, federation_uri

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

    @property
    def digest(self) -> bytes:
        """32 bytes that stand for what is accepted, in whatever order."""
        return hashlib.sha256(b"".join(sorted(map(certificate_digest, self.authorities)))).digest()

    def of_federation(self, federation: FederationName) -> "TrustBundle":
        """The CAs that carry this federation's name; raises MalformedMessage without one."""
        return TrustBundle(tuple(ca for ca in self.authorities if is_of_federation(ca, federation)))

    def pinned(self, pin: SpkiPin, successions: Sequence[AuthoritySuccession] = ()) -> "TrustBundle":
        """The self-signed CA with this pin, and those that it leads to: by its signature on them, or as its successors.

        Raises AuthenticationError without one. A pin fixes the key alone. The self-signature fixes the rest: without
        it, whoever relays the bundle could rewrite the dates and constraints around the pinned key.
        """
        for certificate in self.authorities:
            if pins_equal(spki_pin(certificate), pin):
                if not directly_issued(certificate, by=certificate):
                    raise AuthenticationError(
                        f"CA certificate {name_of(certificate)} has the pinned key and no valid signature of it: "
                        "somebody altered it on the way, do not enrol over this connection"
                    )
                return self._led_to_by(certificate, successions)
        raise AuthenticationError(
            f"no CA certificate in the trust bundle has the pin {pin}: something stands between you and the "
            "coordinator, or the token is of another federation, or of an authority that was retired since: ask for a "
            "new invitation"
        )

    def _led_to_by(self, pinned: x509.Certificate, successions: Sequence[AuthoritySuccession]) -> "TrustBundle":
        found = [pinned]
        for by in found:  # grows as it goes
            found += [ca for ca in self.authorities if ca not in found and _leads(by, ca, successions)]
        return TrustBundle(tuple(ca for ca in self.authorities if ca in found))

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


def is_of_federation(certificate: x509.Certificate, federation: FederationName) -> bool:
    """Whether its one URI is that of the federation."""
    try:
        names = alternative_names(certificate.extensions)
    except ValueError:
        return False
    return names.get_values_for_type(x509.UniformResourceIdentifier) == [federation_uri(federation)]


def path_length(certificate: x509.Certificate) -> int | None:
    """How many CAs may stand below this one before a leaf; None: any number."""
    return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length


def _leads(by: x509.Certificate, to: x509.Certificate, successions: Sequence[AuthoritySuccession]) -> bool:
    if path_length(by) != 0 and directly_issued(to, by=by):
        return True
    return any(one.holds(predecessor=by, successor=to) for one in successions)


@lru_cache(maxsize=1024)  # of the same bytes the same answer; dates and what is trusted are asked anew each time
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
