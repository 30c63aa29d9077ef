import shutil
import subprocess
from datetime import UTC, datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import ConfigurationError, MalformedMessage
from lorica_security.identifiers import FederationName, Identity, Role
from lorica_security.identity.identity_key import identity_key_to_pem, new_identity_key
from lorica_security.pki.authority import Authority
from lorica_security.pki.tls_key import new_tls_key, tls_key_to_pem
from tests.support.certificates import (
    ALL_IDENTITIES,
    COORDINATOR,
    FEDERATION,
    HOSPITAL,
    NOW,
    OTHER_FEDERATION,
)

AUTHORITY = Authority.create(FEDERATION, now=NOW)
KEY = new_tls_key()


def issue(identity: Identity = HOSPITAL, **more: object) -> x509.Certificate:
    return AUTHORITY.issue(KEY.public_key(), identity, **{"now": NOW, **more})


def names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def test_the_ca_certificate_may_sign_leaves_only():
    extensions = AUTHORITY.certificate.extensions
    constraints = extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    usage = extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert usage.value.key_cert_sign
    assert not usage.value.digital_signature
    assert isinstance(AUTHORITY.key.curve, ec.SECP256R1)
    AUTHORITY.certificate.verify_directly_issued_by(AUTHORITY.certificate)


def test_the_ca_lives_ten_years_from_five_minutes_ago():
    assert AUTHORITY.certificate.not_valid_before_utc == datetime(2026, 3, 1, 11, 55, tzinfo=UTC)
    assert AUTHORITY.certificate.not_valid_after_utc == NOW + timedelta(days=3652)


def test_load_gives_back_what_was_saved():
    loaded = Authority.load(key_pem=AUTHORITY.key_pem(), certificate_pem=AUTHORITY.certificate_pem())
    assert loaded.certificate == AUTHORITY.certificate
    assert loaded.federation == FEDERATION
    certificate = loaded.issue(KEY.public_key(), HOSPITAL, now=NOW)
    certificate.verify_directly_issued_by(AUTHORITY.certificate)


def test_load_refuses_a_key_of_another_ca():
    other = Authority.create(FEDERATION, now=NOW)
    with pytest.raises(ConfigurationError, match="do not belong together"):
        Authority.load(key_pem=other.key_pem(), certificate_pem=AUTHORITY.certificate_pem())


def test_load_refuses_a_leaf_as_ca_certificate():
    with pytest.raises(ConfigurationError, match="no CA certificate"):
        Authority.load(key_pem=tls_key_to_pem(KEY), certificate_pem=issue().public_bytes(Encoding.PEM))


def test_load_refuses_a_ca_that_names_no_federation():
    usage = AUTHORITY.certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    nameless = (
        x509.CertificateBuilder()
        .subject_name(AUTHORITY.certificate.subject)
        .issuer_name(AUTHORITY.certificate.subject)
        .public_key(AUTHORITY.key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(AUTHORITY.key, AUTHORITY.certificate.signature_hash_algorithm)
    )
    with pytest.raises(ConfigurationError, match="spiffe://FEDERATION"):
        Authority.load(key_pem=AUTHORITY.key_pem(), certificate_pem=nameless.public_bytes(Encoding.PEM))


def test_load_refuses_an_identity_key_as_ca_key():
    with pytest.raises(ConfigurationError, match="restore the ECDSA key"):
        Authority.load(key_pem=identity_key_to_pem(new_identity_key()), certificate_pem=AUTHORITY.certificate_pem())


@pytest.mark.parametrize("pem", [b"", b"garbage", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_load_refuses_bytes_that_are_no_key_or_certificate_and_does_not_show_them(pem: bytes):
    with pytest.raises(ConfigurationError) as caught:
        Authority.load(key_pem=pem, certificate_pem=AUTHORITY.certificate_pem())
    assert "AAAA" not in str(caught.value)
    with pytest.raises(ConfigurationError):
        Authority.load(key_pem=AUTHORITY.key_pem(), certificate_pem=pem)


def test_repr_shows_no_key():
    assert "key=" not in repr(AUTHORITY)


@pytest.mark.parametrize("identity", ALL_IDENTITIES, ids=lambda identity: identity.role.value)
def test_a_leaf_carries_its_identity_and_the_purpose_of_its_role(identity: Identity):
    certificate = issue(identity)
    certificate.verify_directly_issued_by(AUTHORITY.certificate)
    assert names(certificate).get_values_for_type(x509.UniformResourceIdentifier) == [identity.uri]
    purpose = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    wanted = ExtendedKeyUsageOID.SERVER_AUTH if identity.role is Role.COORDINATOR else ExtendedKeyUsageOID.CLIENT_AUTH
    assert list(purpose) == [wanted]
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert not constraints.value.ca
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.digital_signature
    assert not usage.key_cert_sign
    assert certificate.public_key() == KEY.public_key()


def test_the_coordinator_has_its_dns_name_and_the_hosts_it_was_given():
    certificate = issue(COORDINATOR, hosts=["fl.example.org", "10.0.0.5", "fd00::5", "fl.example.org"])
    assert names(certificate).get_values_for_type(x509.DNSName) == [
        "coordinator.northern-care.lorica.internal",
        "fl.example.org",
    ]
    assert names(certificate).get_values_for_type(x509.IPAddress) == [ip_address("10.0.0.5"), ip_address("fd00::5")]


def test_a_silo_has_no_dns_name():
    assert names(issue()).get_values_for_type(x509.DNSName) == []


def test_a_silo_that_asks_for_host_names_is_refused():
    with pytest.raises(ConfigurationError, match="only the coordinator serves"):
        issue(HOSPITAL, hosts=["coordinator.northern-care.lorica.internal"])


@pytest.mark.parametrize(
    "host", ["*.example.org", "a b", "", "10.0.0.300", "-x.org", "Ä.org", "a..b", "x\n", "fe80::1%eth0"]
)
def test_a_host_that_is_none_is_refused(host: str):
    with pytest.raises(ConfigurationError, match="neither"):
        issue(COORDINATOR, hosts=[host])


def test_an_identity_of_another_federation_is_not_issued():
    with pytest.raises(ConfigurationError, match="cannot issue"):
        issue(Identity(OTHER_FEDERATION, Role.SILO, "hospital-a"))


def test_a_certificate_for_an_rsa_key_is_not_issued():
    with pytest.raises(MalformedMessage, match="RSA with 2048 bits"):
        AUTHORITY.issue(rsa.generate_private_key(65537, 2048).public_key(), HOSPITAL, now=NOW)


def test_a_leaf_lives_seven_days_from_five_minutes_ago():
    certificate = issue(now=datetime(2026, 3, 1, 14, 0, 0, 999_999, tzinfo=timezone(timedelta(hours=1))))
    assert certificate.not_valid_before_utc == datetime(2026, 3, 1, 12, 55, tzinfo=UTC)
    assert certificate.not_valid_after_utc == datetime(2026, 3, 8, 13, 0, tzinfo=UTC)


@given(
    age=st.timedeltas(min_value=timedelta(minutes=-5), max_value=timedelta(days=30)),
    lifetime=st.timedeltas(min_value=timedelta(seconds=1), max_value=timedelta(days=400)),
)
def test_no_leaf_is_valid_outside_its_ca(age: timedelta, lifetime: timedelta):
    authority = SHORT_LIVED
    certificate = authority.issue(KEY.public_key(), HOSPITAL, now=NOW + age, lifetime=lifetime)
    assert authority.certificate.not_valid_before_utc <= certificate.not_valid_before_utc
    assert certificate.not_valid_before_utc <= NOW + age
    assert certificate.not_valid_after_utc <= authority.certificate.not_valid_after_utc
    assert certificate.not_valid_after_utc <= NOW + age + lifetime


SHORT_LIVED = Authority.create(FEDERATION, now=NOW, lifetime=timedelta(days=30))


@pytest.mark.parametrize("age", [timedelta(days=30, seconds=1), timedelta(minutes=-5, seconds=-1)])
def test_a_ca_outside_its_own_validity_issues_nothing(age: timedelta):
    with pytest.raises(ConfigurationError, match=r"expired|not valid before"):
        SHORT_LIVED.issue(KEY.public_key(), HOSPITAL, now=NOW + age)


@pytest.mark.parametrize("lifetime", [timedelta(0), timedelta(days=-1), timedelta(milliseconds=999), timedelta.max])
def test_an_impossible_lifetime_is_refused(lifetime: timedelta):
    with pytest.raises(ConfigurationError, match="lifetime"):
        issue(lifetime=lifetime)
    with pytest.raises(ConfigurationError, match="lifetime"):
        Authority.create(FEDERATION, now=NOW, lifetime=lifetime)


def test_a_clock_without_a_time_zone_is_refused():
    with pytest.raises(ValueError, match="time zone"):
        issue(now=NOW.replace(tzinfo=None))


def test_serial_numbers_are_random_and_positive():
    serials = {issue().serial_number for _ in range(20)}
    assert len(serials) == 20
    assert all(0 < serial < 2**159 for serial in serials)
    assert max(serials).bit_length() > 140


def test_the_longest_names_fit():
    federation = FederationName("f" * 63)
    authority = Authority.create(federation, now=NOW)
    certificate = authority.issue(KEY.public_key(), Identity(federation, Role.SILO, "s" * 63), now=NOW)
    assert names(certificate).get_values_for_type(x509.UniformResourceIdentifier) == [
        f"spiffe://{'f' * 63}/silo/{'s' * 63}"
    ]


OPENSSL = shutil.which("openssl")


@pytest.mark.skipif(
    OPENSSL is None, reason="the openssl command line is not installed, so nobody else checks our chains"
)
def test_openssl_verifies_our_chains_and_refuses_wrong_ones(tmp_path: Path):
    other = Authority.create(FEDERATION, now=NOW)
    (tmp_path / "ca.pem").write_bytes(AUTHORITY.certificate_pem())
    (tmp_path / "both.pem").write_bytes(other.certificate_pem() + AUTHORITY.certificate_pem())
    (tmp_path / "other.pem").write_bytes(other.certificate_pem())
    (tmp_path / "silo.pem").write_bytes(issue().public_bytes(Encoding.PEM))
    (tmp_path / "coordinator.pem").write_bytes(issue(COORDINATOR, hosts=["10.0.0.5"]).public_bytes(Encoding.PEM))

    def verifies(
        leaf: str, purpose: str, *, ca: str = "ca.pem", at: datetime = NOW, more: tuple[str, ...] = ()
    ) -> bool:
        seconds = str(int(at.timestamp()))
        command = [
            OPENSSL,
            "verify",
            "-x509_strict",
            "-attime",
            seconds,
            "-purpose",
            purpose,
            *more,
            "-CAfile",
            ca,
            leaf,
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert done.returncode in (0, 2), done.stderr
        return done.returncode == 0

    host = ("-verify_hostname", "coordinator.northern-care.lorica.internal")
    assert verifies("silo.pem", "sslclient")
    assert verifies("silo.pem", "sslclient", ca="both.pem")
    assert verifies("coordinator.pem", "sslserver", more=host)
    assert verifies("coordinator.pem", "sslserver", more=("-verify_ip", "10.0.0.5"))
    assert not verifies("silo.pem", "sslserver")
    assert not verifies("coordinator.pem", "sslclient")
    assert not verifies("silo.pem", "sslclient", ca="other.pem")
    assert not verifies("silo.pem", "sslclient", at=NOW + timedelta(days=8))
    assert not verifies("coordinator.pem", "sslserver", more=("-verify_hostname", "coordinator.other.lorica.internal"))
