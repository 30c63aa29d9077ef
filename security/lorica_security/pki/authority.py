"""The federation's certificate authority: one P-256 key that signs leaves and nothing else (path length 0).

The authority decides every field of a certificate; from the request it takes the public key alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lorica_security.errors import ConfigurationError, MalformedMessage
from lorica_security.identifiers import FederationName, Identity, Role, coordinator_dns_name, federation_name
from lorica_security.pki.hosts import parse_host
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.profile import alternative_names, federation_uri, key_purpose, key_usage
from lorica_security.pki.tls_key import TlsPublicKey, check_tls_public_key
from lorica_security.pki.trust_bundle import is_authority
from lorica_security.pki.validity import Window

DEFAULT_CA_LIFETIME_DAYS = 3652
DEFAULT_CERTIFICATE_LIFETIME_DAYS = 7

_URI_PREFIX = federation_uri(FederationName(""))


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA's private key and certificate, of one federation."""

    key: ec.EllipticCurvePrivateKey = field(repr=False)
    certificate: x509.Certificate
    federation: FederationName

    @classmethod
    def create(
        cls,
        federation: FederationName,
        *,
        now: datetime,
        lifetime: timedelta = timedelta(days=DEFAULT_CA_LIFETIME_DAYS),
        key: ec.EllipticCurvePrivateKey | None = None,
    ) -> "Authority":
        """`key`, or a new one, and its self-signed certificate."""
        federation = federation_name(federation)
        key = key or ec.generate_private_key(ec.SECP256R1())
        window = Window.starting(now, lifetime)
        name = _subject(federation, "Lorica CA")
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(window.begin)
            .not_valid_after(window.end)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(key_usage(of_authority=True), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(federation_uri(federation))]),
                critical=False,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key=key, certificate=certificate, federation=federation)

    @classmethod
    def load(cls, *, key_pem: bytes, certificate_pem: bytes) -> "Authority":
        """From what `key_pem` and `certificate_pem` gave; raises ConfigurationError when they are not a CA's pair."""
        try:
            key = serialization.load_pem_private_key(key_pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise ConfigurationError(
                "CA key file holds no unencrypted PEM private key: restore it from backup"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigurationError(f"CA key file holds a {type(key).__name__}: restore the ECDSA key from backup")
        return cls.of(key, certificate_pem=certificate_pem)

    @classmethod
    def of(cls, key: ec.EllipticCurvePrivateKey, *, certificate_pem: bytes) -> "Authority":
        """As `load`, of a key that was read already, or that lies in a token."""
        try:
            certificate = parse_certificate(certificate_pem)
            if not is_authority(certificate):
                raise ConfigurationError("CA certificate file holds no CA certificate: restore it from backup")
            uris = alternative_names(certificate.extensions).get_values_for_type(x509.UniformResourceIdentifier)
        except MalformedMessage as error:
            raise ConfigurationError(f"CA certificate file cannot be used: {error}") from error
        if certificate.public_key() != key.public_key():
            raise ConfigurationError("CA key and CA certificate do not belong together: restore both from one backup")
        if len(uris) != 1 or not uris[0].startswith(_URI_PREFIX):
            raise ConfigurationError(
                f"CA certificate names {uris} where one {_URI_PREFIX}FEDERATION is expected: restore it"
            )
        return cls(key=key, certificate=certificate, federation=federation_name(uris[0].removeprefix(_URI_PREFIX)))

    def key_pem(self) -> bytes:
        """The private key as unencrypted PKCS#8 PEM: secret bytes, for a file of mode 0600."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        public_key: TlsPublicKey,
        identity: Identity,
        *,
        now: datetime,
        lifetime: timedelta = timedelta(days=DEFAULT_CERTIFICATE_LIFETIME_DAYS),
        hosts: Sequence[str] = (),
    ) -> x509.Certificate:
        """A certificate for `identity`, valid from 5 minutes before `now` and never outside the CA's own validity.

        `hosts` are further DNS names and IP addresses of the coordinator; its name of DESIGN section 6 is always there.
        Raises ConfigurationError for another federation's identity, hosts of another role, or a CA not valid at `now`;
        MalformedMessage for a key that may not stand in a certificate.
        """
        check_tls_public_key(public_key)
        if identity.federation != self.federation:
            raise ConfigurationError(f"CA of federation {self.federation} cannot issue {identity.uri}: use its own CA")
        if hosts and identity.role is not Role.COORDINATOR:
            raise ConfigurationError(
                f"{identity.uri} cannot have host names {list(hosts)}: only the coordinator serves"
            )
        validity = Window.of(self.certificate)
        if problem := validity.problem_at(now):
            raise ConfigurationError(f"CA certificate of {self.federation} {problem}")
        window = Window.starting(now, lifetime).within(validity)
        return (
            x509.CertificateBuilder()
            .subject_name(_subject(self.federation, identity.name or identity.role.value))
            .issuer_name(self.certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(window.begin)
            .not_valid_after(window.end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(of_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([key_purpose(identity.role)]), critical=False)
            .add_extension(_names(identity, hosts), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )


def _subject(federation: FederationName, common_name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, federation),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def _names(identity: Identity, hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
    if identity.role is Role.COORDINATOR:
        names.append(x509.DNSName(coordinator_dns_name(identity.federation)))
    for host in map(parse_host, dict.fromkeys(hosts)):
        names.append(x509.DNSName(host) if isinstance(host, str) else x509.IPAddress(host))
    return x509.SubjectAlternativeName(names)
