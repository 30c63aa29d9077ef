"""An authority of the federation that an institution's CA certifies: our key and request, its signature, its
self-signed root above.

The key is made here and stays here. What comes back must be for that key, carry the federation's URI (SPIFFE's trust
domain), sign leaves and nothing else, and lead by signatures to one self-signed certificate, which enrolment tokens
then pin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from lorica_security.errors import ConfigurationError, MalformedMessage
from lorica_security.identifiers import FederationName
from lorica_security.pki.parsing import parse_certificates
from lorica_security.pki.profile import federation_uri, key_usage
from lorica_security.pki.trust_bundle import directly_issued, is_authority, is_of_federation, name_of, path_length
from lorica_security.pki.validity import Window

MOST_ABOVE = 4
"""Certificates between an authority and its self-signed root, the root included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """An authority's certificate, and the chain above it: issuer first, self-signed root last."""

    certificate: x509.Certificate
    chain: tuple[x509.Certificate, ...]


def authority_request(key: ec.EllipticCurvePrivateKey, federation: FederationName) -> bytes:
    """A PEM request for a CA of `federation` that signs leaves alone: constraints, key usage and URI as they have to
    be."""
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, federation),
            x509.NameAttribute(NameOID.COMMON_NAME, "Lorica CA"),
        ]
    )
    builder = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(of_authority=True), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(federation_uri(federation))]), critical=False
        )
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def check_certified(
    certificate_pem: bytes,
    chain_pem: bytes,
    *,
    key: ec.EllipticCurvePublicKey,
    federation: FederationName,
    now: datetime,
) -> Certified:
    """What the institution's CA made of the request; raises ConfigurationError that says what to have it do otherwise.

    `chain_pem` has the certificates above it in any order; others among them are left out.
    """
    try:
        (certificate, *_), above = parse_certificates(certificate_pem), parse_certificates(chain_pem)
    except (MalformedMessage, ValueError) as error:
        raise ConfigurationError(f"the signed certificate or its chain cannot be read: {error}") from error
    if certificate.public_key() != key:
        raise ConfigurationError(
            f"certificate {name_of(certificate)} is not for the key of the request: have the newest request signed, or "
            "make another with `coordinator ca request`"
        )
    if not is_authority(certificate) or path_length(certificate) != 0:
        raise ConfigurationError(
            f"certificate {name_of(certificate)} is not that of a CA that signs leaves alone: have it signed with "
            "basicConstraints = critical, CA:TRUE, pathlen:0 and keyUsage = critical, keyCertSign, cRLSign"
        )
    if not is_of_federation(certificate, federation):
        raise ConfigurationError(
            f"certificate {name_of(certificate)} does not name federation {federation}: have it signed with the "
            f"alternative name of the request, URI:{federation_uri(federation)}, and no other URI"
        )
    chain = _chain(certificate, above)
    for each in (certificate, *chain):
        if problem := Window.of(each).problem_at(now):
            raise ConfigurationError(f"certificate {name_of(each)} {problem}")
    return Certified(certificate=certificate, chain=chain)


def _chain(certificate: x509.Certificate, above: Sequence[x509.Certificate]) -> tuple[x509.Certificate, ...]:
    chain: list[x509.Certificate] = []
    at = certificate
    while not directly_issued(at, by=at):
        issuer = next((one for one in above if is_authority(one) and directly_issued(at, by=one)), None)
        if issuer is None or len(chain) == MOST_ABOVE:
            raise ConfigurationError(
                f"nothing in the chain issued {name_of(at)}: give every certificate above it up to the self-signed "
                f"root (at most {MOST_ABOVE}) with --chain"
            )
        allowed = path_length(issuer)
        if allowed is not None and allowed < len(chain) + 1:
            raise ConfigurationError(
                f"CA {name_of(issuer)} allows {allowed} CAs below itself, here are {len(chain) + 1}: "
                "ask it for a certificate of a CA that allows more"
            )
        chain.append(issuer)
        at = issuer
    if not chain:
        raise ConfigurationError(
            f"certificate {name_of(certificate)} is signed by its own key: for a new authority without an "
            "institution's CA run `coordinator ca rotate`"
        )
    return tuple(chain)
