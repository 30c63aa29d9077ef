"""Who the peer is, from the certificate that TLS has verified and from nothing else.

TLS checks the chain and that the peer holds the key; gRPC does not look at the rest. In this order, each step raising
AuthenticationError, of the dates OutsideValidity: parse; signed by a CA of the federation in the bundle that is itself
valid; a leaf with no critical extension that we do not know; one identity URI of the expected federation; a role that
may stand on that side of the connection; the key usage of that role; validity now. The coordinator's certificate must
also carry its DNS name.
"""

from datetime import datetime

from cryptography import x509

from lorica_security.errors import AuthenticationError, MalformedMessage, OutsideValidity
from lorica_security.identifiers import FederationName, Identity, Role, coordinator_dns_name
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.profile import UNDERSTOOD_EXTENSIONS, alternative_names, key_purpose, sole_identity
from lorica_security.pki.trust_bundle import TrustBundle, is_of_federation, name_of
from lorica_security.pki.validity import Window


def identify_client(certificate: bytes, *, trust: TrustBundle, now: datetime, federation: FederationName) -> Identity:
    """The silo, operator or viewer that `certificate` (PEM or DER) names; raises AuthenticationError."""
    identity, _ = _identify(certificate, trust=trust, now=now, federation=federation)
    if identity.role is Role.COORDINATOR:
        raise AuthenticationError(f"{identity.uri} connected as a client: use a silo, operator or viewer certificate")
    return identity


def check_coordinator(certificate: bytes, *, trust: TrustBundle, now: datetime, federation: FederationName) -> Identity:
    """The coordinator's identity, if `certificate` (PEM or DER) is its own; raises AuthenticationError."""
    identity, names = _identify(certificate, trust=trust, now=now, federation=federation)
    if identity.role is not Role.COORDINATOR:
        raise AuthenticationError(f"{identity.uri} answers as the coordinator: this is an impostor, do not connect")
    dns_name = coordinator_dns_name(federation)
    if dns_name not in names.get_values_for_type(x509.DNSName):
        raise AuthenticationError(f"certificate of {identity.uri} lacks the DNS name {dns_name}: have it issued again")
    return identity


def _identify(
    certificate_bytes: bytes, *, trust: TrustBundle, now: datetime, federation: FederationName
) -> tuple[Identity, x509.SubjectAlternativeName]:
    try:
        certificate = parse_certificate(certificate_bytes)
    except MalformedMessage as error:
        raise AuthenticationError(str(error)) from error
    issuers = tuple(ca for ca in trust.issuers_of(certificate) if is_of_federation(ca, federation))
    if not issuers:
        raise AuthenticationError(
            f"certificate {name_of(certificate)} is not issued by a CA of federation {federation}: enrol with this "
            "federation"
        )
    problems = [Window.of(issuer).problem_at(now) for issuer in issuers]
    if all(problems):
        raise OutsideValidity(f"CA certificate {name_of(issuers[0])} {problems[0]}")
    extensions = certificate.extensions
    names = alternative_names(extensions)
    try:
        identity = sole_identity(names)
    except MalformedMessage as error:
        raise AuthenticationError(f"certificate {name_of(certificate)} names nobody: {error}") from error
    _check_leaf(extensions, identity)
    if identity.federation != federation:
        raise AuthenticationError(
            f"certificate of {identity.uri} is of another federation than {federation}: enrol here"
        )
    _check_purpose(extensions, identity)
    if problem := Window.of(certificate).problem_at(now):
        raise OutsideValidity(f"certificate of {identity.uri} {problem}")
    return identity, names


def _check_leaf(extensions: x509.Extensions, identity: Identity) -> None:
    for extension in extensions:
        if extension.critical and extension.oid not in UNDERSTOOD_EXTENSIONS:
            raise AuthenticationError(
                f"certificate of {identity.uri} has the unknown critical extension {extension.oid.dotted_string}: "
                "have it issued again"
            )
        if isinstance(extension.value, x509.BasicConstraints) and extension.value.ca:
            raise AuthenticationError(f"certificate of {identity.uri} is a CA certificate: have a leaf issued")


def _check_purpose(extensions: x509.Extensions, identity: Identity) -> None:
    wanted = key_purpose(identity.role)
    try:
        purposes = tuple(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        purposes = ()
    if purposes != (wanted,):
        found = [purpose.dotted_string for purpose in purposes]
        raise AuthenticationError(
            f"certificate of {identity.uri} has the extended key usage {found}, not {wanted.dotted_string} alone: "
            "have it issued again"
        )
