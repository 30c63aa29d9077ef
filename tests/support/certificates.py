"""Certificates and requests that no Lorica code would make: those that tests must see refused, and other servers'."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lorica_security.identifiers import FederationName, Identity, Role, coordinator_dns_name
from lorica_security.pki.authority import Authority
from lorica_security.pki.tls_key import tls_key_to_pem

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
FEDERATION = FederationName("northern-care")
OTHER_FEDERATION = FederationName("southern-care")
HOSPITAL = Identity(FEDERATION, Role.SILO, "hospital-a")
BANK = Identity(FEDERATION, Role.SILO, "bank-b")
OPERATOR = Identity(FEDERATION, Role.OPERATOR, "olga")
VIEWER = Identity(FEDERATION, Role.VIEWER, "victor")
COORDINATOR = Identity(FEDERATION, Role.COORDINATOR)
ALL_IDENTITIES = (HOSPITAL, OPERATOR, VIEWER, COORDINATOR)


def uri(text: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(text)


COORDINATOR_NAMES: tuple[x509.GeneralName, ...] = (
    uri(COORDINATOR.uri),
    x509.DNSName(coordinator_dns_name(FEDERATION)),
)
CLIENT = (ExtendedKeyUsageOID.CLIENT_AUTH,)
SERVER = (ExtendedKeyUsageOID.SERVER_AUTH,)


def forge(
    authority: Authority,
    names: Sequence[x509.GeneralName],
    *,
    purposes: Sequence[x509.ObjectIdentifier] = CLIENT,
    ca: bool = False,
    begin: datetime = NOW,
    end: datetime = NOW + timedelta(days=7),
    extra: Sequence[tuple[x509.ExtensionType, bool]] = (),
    key: ec.EllipticCurvePrivateKey | None = None,
    serial: int | None = None,
) -> bytes:
    """DER of a certificate that `authority`'s key signs, whatever it says: what a coordinator gone wrong could issue.

    `key` is the one that the certificate is for; without it, one that nobody has.
    """
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "forged")]))
        .issuer_name(authority.certificate.subject)
        .public_key((key or ec.generate_private_key(ec.SECP256R1())).public_key())
        .serial_number(serial or x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if purposes:
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    for extension, critical in extra:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(authority.key, hashes.SHA256()).public_bytes(Encoding.DER)


def forged(authority: Authority, *identities: Identity, **profile: object) -> tuple[bytes, bytes]:
    """Key and certificate that `authority` signs for all these identities, valid now unless `profile` says
    otherwise."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    values: dict[str, object] = {"begin": now - timedelta(days=1), "end": now + timedelta(days=1), **profile}
    der = forge(authority, [uri(identity.uri) for identity in identities], key=key, **values)  # type: ignore[arg-type]
    return tls_key_to_pem(key), x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM)


def forge_request(
    names: Sequence[x509.GeneralName],
    *,
    key: Any = None,
    digest: hashes.HashAlgorithm | None = None,
    extra: Sequence[x509.ExtensionType] = (),
) -> bytes:
    """DER of a certificate request with any names, key, digest and further extensions."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    if digest is None and not isinstance(key, ed25519.Ed25519PrivateKey):
        digest = hashes.SHA256()
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    for extension in extra:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, digest).public_bytes(Encoding.DER)


def flip(data: bytes, position: int) -> bytes:
    """`data` with one bit changed; bit 0 is the highest of the first byte."""
    number = int.from_bytes(data, "big") ^ 1 << 8 * len(data) - 1 - position
    return number.to_bytes(len(data), "big")


def authority_and_server(address: str) -> tuple[bytes, tuple[bytes, bytes]]:
    """A root certificate, and a key with the certificate that it signed for `address`; PEM."""
    now, keys = datetime.now(UTC), [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("root", "server")]

    def signed(which: int, extension: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder().issuer_name(names[0]).subject_name(names[which])
        builder = builder.public_key(keys[which].public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        return (
            builder.add_extension(extension, critical=False).sign(keys[0], hashes.SHA256()).public_bytes(Encoding.PEM)
        )

    key = keys[1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))])
    return signed(0, x509.BasicConstraints(ca=True, path_length=0)), (key, signed(1, alternative))
