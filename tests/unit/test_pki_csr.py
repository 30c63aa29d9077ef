import shutil
import subprocess
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import AuthorisationError, ConfigurationError, MalformedMessage
from lorica_security.identifiers import Identity, Role
from lorica_security.pki.csr import certificate_request, check_request
from lorica_security.pki.parsing import MAX_REQUEST_BYTES
from lorica_security.pki.tls_key import new_tls_key, tls_key_from_pem, tls_key_to_pem
from tests.support.certificates import BANK, FEDERATION, HOSPITAL, OTHER_FEDERATION, flip, forge_request, uri

GOOD = certificate_request(new_tls_key(), HOSPITAL)


@pytest.mark.parametrize(
    "key",
    [new_tls_key(), ec.generate_private_key(ec.SECP384R1())],
    ids=["P-256", "P-384"],
)
def test_a_sound_request_gives_its_public_key(key):
    request = certificate_request(key, HOSPITAL)
    assert check_request(request, HOSPITAL) == key.public_key()
    pem = x509.load_der_x509_csr(request).public_bytes(Encoding.PEM)
    assert check_request(pem, HOSPITAL) == key.public_key()


def test_new_keys_are_p256_and_differ():
    one, other = new_tls_key(), new_tls_key()
    assert isinstance(one.curve, ec.SECP256R1)
    assert one.public_key() != other.public_key()


def test_csr_for_another_silos_name_is_refused():
    with pytest.raises(AuthorisationError, match="is for spiffe://northern-care/silo/bank-b"):
        check_request(certificate_request(new_tls_key(), BANK), HOSPITAL)


@pytest.mark.parametrize(
    "wanted",
    [
        Identity(OTHER_FEDERATION, Role.SILO, "hospital-a"),
        Identity(FEDERATION, Role.OPERATOR, "hospital-a"),
        Identity(FEDERATION, Role.COORDINATOR),
    ],
    ids=["other-federation", "operator", "coordinator"],
)
def test_csr_for_more_than_the_invited_role_and_federation_is_refused(wanted: Identity):
    with pytest.raises(AuthorisationError):
        check_request(certificate_request(new_tls_key(), wanted), HOSPITAL)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (rsa.generate_private_key(65537, 2048), "RSA with 2048 bits"),
        (rsa.generate_private_key(65537, 1024), "RSA with 1024 bits"),
        (ec.generate_private_key(ec.SECP521R1()), "secp521r1"),
        (ec.generate_private_key(ec.SECP192R1()), "secp192r1"),
        (ec.generate_private_key(ec.SECP256K1()), "secp256k1"),
        (ed25519.Ed25519PrivateKey.generate(), "Ed25519"),
    ],
    ids=["RSA-2048", "RSA-1024", "P-521", "P-192", "secp256k1", "Ed25519"],
)
def test_csr_with_a_weak_or_unwanted_key_is_refused(key, reason: str):
    with pytest.raises(MalformedMessage, match=f"{reason}.*use ECDSA"):
        check_request(forge_request([uri(HOSPITAL.uri)], key=key), HOSPITAL)


def test_csr_with_an_ed448_key_is_refused():
    key = ed448.Ed448PrivateKey.generate()
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, None)
    with pytest.raises(MalformedMessage, match="Ed448"):
        check_request(request.public_bytes(Encoding.DER), HOSPITAL)


def test_csr_signed_with_sha1_is_refused(tmp_path: Path):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command line is not installed, and the library refuses to sign with SHA-1")
    (tmp_path / "key.pem").write_bytes(tls_key_to_pem(new_tls_key()))
    command = [openssl, "req", "-new", "-sha1", "-key", "key.pem", "-subj", "/CN=x", "-outform", "DER", "-out", "r.der"]
    command += ["-addext", f"subjectAltName=URI:{HOSPITAL.uri}"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=30)
    with pytest.raises(MalformedMessage, match="signed with sha1: use SHA-256"):
        check_request((tmp_path / "r.der").read_bytes(), HOSPITAL)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command line is not installed")
def test_a_request_made_by_openssl_is_accepted(tmp_path: Path):
    key = new_tls_key()
    (tmp_path / "key.pem").write_bytes(tls_key_to_pem(key))
    (tmp_path / "c.cnf").write_text("[req]\ndistinguished_name=dn\n[dn]\n")
    command = ["openssl", "req", "-new", "-config", "c.cnf", "-key", "key.pem", "-subj", "/CN=x", "-out", "r.pem"]
    command += ["-addext", f"subjectAltName=URI:{HOSPITAL.uri}"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=30)
    assert check_request((tmp_path / "r.pem").read_bytes(), HOSPITAL) == key.public_key()


@pytest.mark.parametrize("digest", [hashes.SHA224(), hashes.SHA3_256()], ids=lambda digest: digest.name)
def test_csr_signed_with_a_digest_outside_the_list_is_refused(digest: hashes.HashAlgorithm):
    with pytest.raises(MalformedMessage, match="SHA-256"):
        check_request(forge_request([uri(HOSPITAL.uri)], digest=digest), HOSPITAL)


def test_csr_with_two_uris_is_refused():
    with pytest.raises(MalformedMessage, match="2 identity URIs"):
        check_request(forge_request([uri(HOSPITAL.uri), uri(BANK.uri)]), HOSPITAL)


def test_csr_with_the_same_uri_twice_is_refused():
    with pytest.raises(MalformedMessage, match="2 identity URIs"):
        check_request(forge_request([uri(HOSPITAL.uri), uri(HOSPITAL.uri)]), HOSPITAL)


@pytest.mark.parametrize(
    "name",
    [
        x509.DNSName("coordinator.northern-care.lorica.internal"),
        x509.IPAddress(ip_address("10.0.0.1")),
        x509.RFC822Name("a@example.org"),
        x509.DirectoryName(x509.Name([])),
    ],
    ids=["dns", "ip", "email", "directory"],
)
def test_csr_with_an_extra_name_is_refused(name: x509.GeneralName):
    with pytest.raises(MalformedMessage, match="2 names"):
        check_request(forge_request([uri(HOSPITAL.uri), name]), HOSPITAL)


@pytest.mark.parametrize("names", [[], [x509.DNSName("hospital-a")]], ids=["no-names", "dns-only"])
def test_csr_without_an_identity_is_refused(names: list[x509.GeneralName]):
    with pytest.raises(MalformedMessage, match="0 identity URIs"):
        check_request(forge_request(names), HOSPITAL)


@pytest.mark.parametrize(
    "text",
    [
        "spiffe://northern-care/silo/hospital-a/",
        "spiffe://northern-care/silo/hospital-a?x=1",
        "spiffe://northern-care/silo/Hospital-a",
        "spiffe://northern-care/silo/hospital-a%00",
        "SPIFFE://northern-care/silo/hospital-a",
        "spiffe://northern-care/admin/hospital-a",
        "spiffe://northern-care:1/silo/hospital-a",
        "spiffe://northern-care/silo/hospital-a\n",
        "https://northern-care/silo/hospital-a",
        "",
    ],
)
def test_csr_with_a_uri_that_only_resembles_the_identity_is_refused(text: str):
    with pytest.raises(MalformedMessage):
        check_request(forge_request([uri(text)]), HOSPITAL)


def test_csr_with_a_uri_of_thousands_of_characters_is_refused_in_a_short_line():
    with pytest.raises(MalformedMessage) as caught:
        check_request(forge_request([uri("spiffe://x/silo/" + "a" * 6000)]), HOSPITAL)
    assert len(str(caught.value)) < 200


def test_csr_that_asks_to_be_a_ca_is_refused():
    with pytest.raises(MalformedMessage, match="CA:TRUE"):
        check_request(
            forge_request([uri(HOSPITAL.uri)], extra=[x509.BasicConstraints(ca=True, path_length=None)]), HOSPITAL
        )


def test_csr_that_asks_for_a_key_usage_of_its_own_is_refused():
    asked = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH])
    with pytest.raises(MalformedMessage, match=r"2\.5\.29\.37"):
        check_request(forge_request([uri(HOSPITAL.uri)], extra=[asked]), HOSPITAL)


def test_csr_for_a_key_that_the_sender_does_not_hold_is_refused():
    key, other = new_tls_key(), new_tls_key()
    request = certificate_request(key, HOSPITAL)
    mine, theirs = (k.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint) for k in (key, other))
    swapped = request.replace(mine, theirs)
    assert swapped != request
    with pytest.raises(MalformedMessage, match="not signed by the key it holds"):
        check_request(swapped, HOSPITAL)


def test_csr_whose_name_was_changed_after_signing_is_refused():
    changed = certificate_request(new_tls_key(), HOSPITAL).replace(b"silo/hospital-a", b"silo/hospital-b")
    with pytest.raises(MalformedMessage, match="not signed by"):
        check_request(changed, Identity(FEDERATION, Role.SILO, "hospital-b"))


@pytest.mark.parametrize("size", [0, MAX_REQUEST_BYTES + 1])
def test_csr_of_a_size_outside_the_limits_is_refused(size: int):
    with pytest.raises(MalformedMessage, match=f"of {size} bytes: send 1 to 8192 bytes"):
        check_request(b"0" * size, HOSPITAL)


def test_csr_followed_by_more_bytes_is_refused():
    with pytest.raises(MalformedMessage, match="does not parse"):
        check_request(GOOD + b"\0", HOSPITAL)


@given(st.binary(max_size=300))
def test_random_bytes_are_a_malformed_request(data: bytes):
    for request in (data, b"-----BEGIN CERTIFICATE REQUEST-----\n" + data):
        with pytest.raises(MalformedMessage):
            check_request(request, HOSPITAL)


def test_no_bit_of_what_a_request_says_can_be_changed():
    # The one byte that counts a signature's unused bits is read leniently; it is neither signed nor part of what is
    # said.
    said = x509.load_der_x509_csr(GOOD)
    for position in range(8 * len(GOOD)):
        changed = flip(GOOD, position)
        try:
            check_request(changed, HOSPITAL)
        except (MalformedMessage, AuthorisationError):
            continue
        accepted = x509.load_der_x509_csr(changed)
        assert accepted.tbs_certrequest_bytes == said.tbs_certrequest_bytes
        assert accepted.signature == said.signature


def test_tls_key_pem_round_trip():
    key = new_tls_key()
    again = tls_key_from_pem(tls_key_to_pem(key))
    assert again.public_key() == key.public_key()


def test_tls_key_file_with_another_kind_of_key_is_refused():
    for key in (rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP521R1())):
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        with pytest.raises(ConfigurationError, match="not allowed"):
            tls_key_from_pem(pem)


def test_tls_key_file_that_is_no_key_is_refused_without_showing_it():
    with pytest.raises(ConfigurationError) as caught:
        tls_key_from_pem(b"my secret words")
    assert "my secret" not in str(caught.value)
