from collections.abc import Sequence
from datetime import datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, ObjectIdentifier
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import AuthenticationError, OutsideValidity
from lorica_security.identifiers import FederationName, Identity, coordinator_dns_name
from lorica_security.pki.authority import Authority
from lorica_security.pki.peer import check_coordinator, identify_client
from lorica_security.pki.tls_key import new_tls_key
from lorica_security.pki.trust_bundle import TrustBundle
from tests.support.certificates import (
    ALL_IDENTITIES,
    BANK,
    CLIENT,
    COORDINATOR,
    COORDINATOR_NAMES,
    FEDERATION,
    HOSPITAL,
    NOW,
    OPERATOR,
    OTHER_FEDERATION,
    SERVER,
    VIEWER,
    flip,
    forge,
    uri,
)

AUTHORITY = Authority.create(FEDERATION, now=NOW)
STRANGER = Authority.create(FEDERATION, now=NOW)
TRUST = TrustBundle((AUTHORITY.certificate,))
KEY = new_tls_key()


def issued(identity: Identity, authority: Authority = AUTHORITY) -> bytes:
    return authority.issue(KEY.public_key(), identity, now=NOW).public_bytes(Encoding.DER)


def identify(certificate: bytes, *, trust: TrustBundle = TRUST, now: datetime = NOW) -> Identity:
    return identify_client(certificate, trust=trust, now=now, federation=FEDERATION)


def check(certificate: bytes, *, trust: TrustBundle = TRUST, now: datetime = NOW) -> Identity:
    return check_coordinator(certificate, trust=trust, now=now, federation=FEDERATION)


GOOD = issued(HOSPITAL)


@pytest.mark.parametrize("identity", [HOSPITAL, OPERATOR, VIEWER], ids=lambda identity: identity.role.value)
def test_a_client_is_who_its_certificate_says(identity: Identity):
    assert identify(issued(identity)) == identity


def test_pem_and_der_name_the_same_peer():
    pem = x509.load_der_x509_certificate(GOOD).public_bytes(Encoding.PEM)
    assert identify(pem) == identify(GOOD) == HOSPITAL


def test_the_coordinator_is_known_by_its_certificate():
    assert check(issued(COORDINATOR)) == COORDINATOR


def test_the_forger_of_these_tests_makes_certificates_that_pass_when_nothing_is_wrong():
    assert identify(forge(AUTHORITY, [uri(HOSPITAL.uri)])) == HOSPITAL
    assert check(forge(AUTHORITY, COORDINATOR_NAMES, purposes=SERVER)) == COORDINATOR


def test_certificate_of_another_ca_is_refused():
    with pytest.raises(AuthenticationError, match="not issued by a CA of federation northern-care"):
        identify(issued(HOSPITAL, STRANGER))
    with pytest.raises(AuthenticationError, match="not issued by"):
        check(issued(COORDINATOR, STRANGER))


def test_self_signed_certificate_is_refused():
    name = AUTHORITY.certificate.subject  # even under the CA's own name
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(KEY.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([uri(HOSPITAL.uri)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(CLIENT), critical=False)
        .sign(KEY, hashes.SHA256())
    )
    with pytest.raises(AuthenticationError, match="not issued by"):
        identify(certificate.public_bytes(Encoding.DER))


def test_certificate_that_a_silo_issued_with_its_own_key_is_refused():
    silo_as_ca = Authority(
        key=KEY, certificate=x509.load_der_x509_certificate(GOOD), federation=FEDERATION
    )  # KEY is the hospital's TLS key
    with pytest.raises(AuthenticationError, match="not issued by"):
        identify(forge(silo_as_ca, [uri(BANK.uri)]))


@pytest.mark.parametrize("position", ["name", "signature"])
def test_certificate_changed_after_signing_is_refused(position: str):
    if position == "name":
        changed = GOOD.replace(b"silo/hospital-a", b"silo/hospital-b")
    else:
        changed = GOOD[:-1] + bytes([GOOD[-1] ^ 1])
    assert changed != GOOD
    with pytest.raises(AuthenticationError):
        identify(changed)


def test_no_bit_of_what_a_certificate_says_can_be_changed():
    # The one byte that counts a signature's unused bits is read leniently; it is neither signed nor part of what is
    # said.
    said = x509.load_der_x509_certificate(GOOD)
    for position in range(8 * len(GOOD)):
        changed = flip(GOOD, position)
        try:
            identify(changed)
        except AuthenticationError:
            continue
        accepted = x509.load_der_x509_certificate(changed)
        assert accepted.tbs_certificate_bytes == said.tbs_certificate_bytes
        assert accepted.signature == said.signature


@given(st.binary(max_size=300))
def test_random_bytes_are_nobody(data: bytes):
    with pytest.raises(AuthenticationError):
        identify(data)


def test_certificate_of_another_federation_is_refused():
    foreign = f"spiffe://{OTHER_FEDERATION}/silo/hospital-a"
    with pytest.raises(AuthenticationError, match="of another federation than northern-care"):
        identify(forge(AUTHORITY, [uri(foreign)]))


def test_coordinator_of_another_federation_is_refused():
    other = Authority.create(OTHER_FEDERATION, now=NOW)
    identity = Identity(OTHER_FEDERATION, COORDINATOR.role)
    both = TrustBundle((AUTHORITY.certificate, other.certificate))
    with pytest.raises(AuthenticationError, match="not issued by a CA of federation"):
        check(issued(identity, other), trust=both)


def test_attack_authority_of_another_federation_in_the_bundle_names_a_silo_of_this_one():
    """As does an institution's own root, or a neighbour that the bundle was made with: TLS alone would take it."""
    other = Authority.create(OTHER_FEDERATION, now=NOW)
    both = TrustBundle((AUTHORITY.certificate, other.certificate))
    certificate = forge(other, [uri(HOSPITAL.uri)])
    with pytest.raises(AuthenticationError, match="not issued by a CA of federation northern-care"):
        identify(certificate, trust=both)


@pytest.mark.parametrize(
    "names",
    [
        [],
        [x509.DNSName("hospital-a")],
        [uri(HOSPITAL.uri), uri(BANK.uri)],
        [uri("https://northern-care/silo/hospital-a")],
        [uri("spiffe://northern-care/silo/hospital-a/x")],
        [uri("spiffe://northern-care/root/hospital-a")],
        [uri("spiffe://northern-care")],
    ],
    ids=["no-names", "dns-only", "two-uris", "https", "longer-path", "unknown-role", "the-cas-own"],
)
def test_certificate_with_a_wrong_san_is_refused(names: Sequence[x509.GeneralName]):
    with pytest.raises(AuthenticationError, match="names nobody"):
        identify(forge(AUTHORITY, names))


def test_the_ca_certificate_itself_is_no_peer():
    with pytest.raises(AuthenticationError, match="names nobody"):
        identify(AUTHORITY.certificate.public_bytes(Encoding.DER))


def test_certificate_with_ca_true_is_refused():
    with pytest.raises(AuthenticationError, match="is a CA certificate"):
        identify(forge(AUTHORITY, [uri(HOSPITAL.uri)], ca=True))


def test_silo_certificate_posing_as_the_coordinator_is_refused():
    with pytest.raises(AuthenticationError, match="impostor"):
        check(GOOD)


def test_silo_certificate_with_the_coordinators_dns_name_posing_as_it_is_refused():
    names = [uri(HOSPITAL.uri), x509.DNSName(coordinator_dns_name(FEDERATION))]
    with pytest.raises(AuthenticationError, match="key usage"):
        check(forge(AUTHORITY, names, purposes=SERVER))
    with pytest.raises(AuthenticationError, match="impostor"):
        check(forge(AUTHORITY, names, purposes=CLIENT))


def test_coordinator_certificate_used_by_a_client_is_refused():
    with pytest.raises(AuthenticationError, match="connected as a client"):
        identify(issued(COORDINATOR))


def test_coordinator_certificate_without_its_dns_name_is_refused():
    with pytest.raises(AuthenticationError, match=r"lacks the DNS name coordinator\.northern-care\.lorica\.internal"):
        check(forge(AUTHORITY, [uri(COORDINATOR.uri), x509.DNSName("fl.example.org")], purposes=SERVER))


@pytest.mark.parametrize("identity", ALL_IDENTITIES, ids=lambda identity: identity.role.value)
@pytest.mark.parametrize(
    "purposes",
    [
        (),
        (ExtendedKeyUsageOID.CODE_SIGNING,),
        (ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE,),
        (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH),
        "the other side's",
    ],
    ids=["none", "code-signing", "any", "both", "other-side"],
)
def test_certificate_with_the_wrong_key_usage_is_refused(
    identity: Identity, purposes: Sequence[ObjectIdentifier] | str
):
    serves = identity == COORDINATOR
    if isinstance(purposes, str):
        purposes = CLIENT if serves else SERVER
    names = COORDINATOR_NAMES if serves else [uri(identity.uri)]
    with pytest.raises(AuthenticationError, match="key usage"):
        (check if serves else identify)(forge(AUTHORITY, names, purposes=purposes))


def test_certificate_with_an_unknown_critical_extension_is_refused():
    unknown = x509.UnrecognizedExtension(ObjectIdentifier("1.3.6.1.4.1.55555.1"), b"\x05\x00")
    with pytest.raises(AuthenticationError, match=r"unknown critical extension 1\.3\.6\.1\.4\.1\.55555\.1"):
        identify(forge(AUTHORITY, [uri(HOSPITAL.uri)], extra=[(unknown, True)]))
    assert identify(forge(AUTHORITY, [uri(HOSPITAL.uri)], extra=[(unknown, False)])) == HOSPITAL


def test_validity_includes_both_ends_and_nothing_beyond():
    begin, end = NOW - timedelta(minutes=5), NOW + timedelta(days=7)
    assert identify(GOOD, now=begin) == HOSPITAL
    assert identify(GOOD, now=end) == HOSPITAL


def test_expired_certificate_is_refused():
    with pytest.raises(OutsideValidity, match=r"hospital-a expired at 2026-03-08T12:00:00\+00:00"):
        identify(GOOD, now=NOW + timedelta(days=7, microseconds=1))


def test_certificate_that_is_not_yet_valid_is_refused():
    certificate = forge(AUTHORITY, [uri(HOSPITAL.uri)], begin=NOW + timedelta(seconds=1))
    with pytest.raises(OutsideValidity, match=r"is not valid before .* check the clock"):
        identify(certificate)


def test_certificate_that_outlives_its_ca_is_refused_once_the_ca_expired():
    authority = Authority.create(FEDERATION, now=NOW, lifetime=timedelta(days=1))
    certificate = forge(authority, [uri(HOSPITAL.uri)])
    trust = TrustBundle((authority.certificate,))
    assert identify(certificate, trust=trust, now=NOW + timedelta(days=1)) == HOSPITAL
    with pytest.raises(AuthenticationError, match=r"CA certificate .* expired"):
        identify(certificate, trust=trust, now=NOW + timedelta(days=1, seconds=1))


def test_a_ca_renewed_with_its_key_covers_the_certificates_of_the_expired_one():
    old = Authority.create(FEDERATION, now=NOW, lifetime=timedelta(days=1))
    builder = (
        x509.CertificateBuilder()
        .subject_name(old.certificate.subject)
        .issuer_name(old.certificate.subject)
        .public_key(old.key.public_key())
        .serial_number(2)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=30))
    )
    for extension in old.certificate.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    renewed = builder.sign(old.key, hashes.SHA256())
    trust = TrustBundle((old.certificate, renewed))
    assert identify(forge(old, [uri(HOSPITAL.uri)]), trust=trust, now=NOW + timedelta(days=2)) == HOSPITAL


def test_a_second_certificate_behind_the_leaf_is_refused():
    pem = x509.load_der_x509_certificate(GOOD).public_bytes(Encoding.PEM)
    with pytest.raises(AuthenticationError, match="2 certificates"):
        identify(pem + AUTHORITY.certificate_pem())


def test_oversize_certificate_is_refused():
    with pytest.raises(AuthenticationError, match="of 16385 bytes: send 1 to 16384 bytes"):
        identify(b"0" * 16385)


def test_a_clock_without_a_time_zone_is_refused():
    with pytest.raises(ValueError, match="time zone"):
        identify(GOOD, now=NOW.replace(tzinfo=None))


def test_a_certificate_signed_by_a_p384_ca_is_understood():
    key = ec.generate_private_key(ec.SECP384R1())
    with_p256 = Authority.create(FederationName(FEDERATION), now=NOW)
    builder = (
        x509.CertificateBuilder()
        .subject_name(with_p256.certificate.subject)
        .issuer_name(with_p256.certificate.subject)
        .public_key(key.public_key())
        .serial_number(3)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=30))
    )
    for extension in with_p256.certificate.extensions:
        if not isinstance(extension.value, x509.SubjectKeyIdentifier):
            builder = builder.add_extension(extension.value, extension.critical)
    authority = Authority(key=key, certificate=builder.sign(key, hashes.SHA384()), federation=FEDERATION)
    assert identify(issued(HOSPITAL, authority), trust=TrustBundle((authority.certificate,))) == HOSPITAL
