import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import AuthenticationError, MalformedMessage
from lorica_security.pki.authority import Authority
from lorica_security.pki.pins import spki_pin
from lorica_security.pki.tls_key import new_tls_key
from lorica_security.pki.trust_bundle import MAX_AUTHORITIES, TrustBundle
from tests.support.certificates import FEDERATION, HOSPITAL, NOW, forge

OLD = Authority.create(FEDERATION, now=NOW)
NEW = Authority.create(FEDERATION, now=NOW)
LEAF = OLD.issue(new_tls_key().public_key(), HOSPITAL, now=NOW)


def test_pem_round_trip_keeps_the_order():
    bundle = TrustBundle((OLD.certificate, NEW.certificate))
    assert TrustBundle.from_pem(bundle.to_pem()) == bundle
    assert bundle.to_pem() == OLD.certificate_pem() + NEW.certificate_pem()


def test_during_an_overlap_each_leaf_finds_its_own_ca():
    bundle = TrustBundle((OLD.certificate, NEW.certificate))
    new_leaf = NEW.issue(new_tls_key().public_key(), HOSPITAL, now=NOW)
    assert bundle.issuers_of(LEAF) == (OLD.certificate,)
    assert bundle.issuers_of(new_leaf) == (NEW.certificate,)
    assert TrustBundle((NEW.certificate,)).issuers_of(LEAF) == ()


def test_a_pin_leaves_the_pinned_ca_alone_and_not_what_was_slipped_in_beside_it():
    bundle = TrustBundle((NEW.certificate, OLD.certificate))
    assert bundle.pinned(spki_pin(OLD.certificate)) == TrustBundle((OLD.certificate,))


def test_a_bundle_without_the_pinned_ca_is_refused():
    with pytest.raises(AuthenticationError, match="something stands between"):
        TrustBundle((NEW.certificate,)).pinned(spki_pin(OLD.certificate))


def test_a_pinned_key_in_a_certificate_that_somebody_rewrote_is_refused():
    attacker = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(OLD.certificate.subject)
        .issuer_name(OLD.certificate.subject)
        .public_key(OLD.certificate.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW.replace(year=2090))
    )
    for extension in OLD.certificate.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    rewritten = TrustBundle((builder.sign(attacker, hashes.SHA256()),))
    with pytest.raises(AuthenticationError, match="altered"):
        rewritten.pinned(spki_pin(OLD.certificate))


def test_a_leaf_in_the_bundle_is_refused():
    with pytest.raises(MalformedMessage, match="not a CA certificate"):
        TrustBundle((OLD.certificate, LEAF))


@pytest.mark.parametrize("ca", [True, False])
def test_a_certificate_that_lacks_the_right_to_sign_others_is_refused(ca: bool):
    without_key_usage = x509.load_der_x509_certificate(forge(OLD, [], ca=ca))
    with pytest.raises(MalformedMessage, match="not a CA certificate"):
        TrustBundle((without_key_usage,))


def test_an_empty_or_an_endless_bundle_is_refused():
    with pytest.raises(MalformedMessage):
        TrustBundle(())
    with pytest.raises(MalformedMessage, match="17 certificates"):
        TrustBundle((OLD.certificate,) * (MAX_AUTHORITIES + 1))


def test_der_is_not_taken_for_a_bundle():
    with pytest.raises(MalformedMessage):
        TrustBundle.from_pem(OLD.certificate.public_bytes(Encoding.DER))


@given(st.binary(max_size=200))
def test_random_bytes_are_a_malformed_bundle(data: bytes):
    for pem in (data, b"-----BEGIN CERTIFICATE-----\n" + data + b"\n-----END CERTIFICATE-----\n"):
        with pytest.raises(MalformedMessage):
            TrustBundle.from_pem(pem)
