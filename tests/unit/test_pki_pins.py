import base64
import hashlib
import shutil
import subprocess

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import MalformedMessage
from lorica_security.pki.authority import Authority
from lorica_security.pki.pins import parse_pin, pin_digest, pin_from_digest, pins_equal, spki_pin
from tests.support.certificates import FEDERATION, NOW

AUTHORITY = Authority.create(FEDERATION, now=NOW)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command line is not installed")
def test_the_pin_is_what_openssl_computes():
    spki_pem = subprocess.run(
        ["openssl", "x509", "-pubkey", "-noout"], input=AUTHORITY.certificate_pem(), capture_output=True, check=True
    ).stdout
    spki = subprocess.run(
        ["openssl", "pkey", "-pubin", "-outform", "DER"], input=spki_pem, capture_output=True, check=True
    ).stdout
    assert spki_pin(AUTHORITY.certificate) == base64.b64encode(hashlib.sha256(spki).digest()).decode()


def test_the_pin_follows_the_key_and_not_the_certificate():
    loaded = Authority.load(key_pem=AUTHORITY.key_pem(), certificate_pem=AUTHORITY.certificate_pem())
    assert pins_equal(spki_pin(loaded.certificate), spki_pin(AUTHORITY.certificate))
    other = Authority.create(FEDERATION, now=NOW)
    assert other.certificate.subject == AUTHORITY.certificate.subject
    assert not pins_equal(spki_pin(other.certificate), spki_pin(AUTHORITY.certificate))
    assert other.certificate.public_bytes(Encoding.DER) != AUTHORITY.certificate.public_bytes(Encoding.DER)


@given(st.binary(min_size=32, max_size=32))
def test_digest_and_pin_round_trip(digest: bytes):
    pin = pin_from_digest(digest)
    assert len(pin) == 44
    assert pin_digest(pin) == digest
    assert parse_pin(pin) == pin


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A" * 43,
        "A" * 44,
        "A" * 42 + "B=",  # the spare bits are not zero
        "A" * 43 + "=\n",
        "A" * 42 + "==",
        "é" * 44,
        "A" * 64,
        base64.b64encode(b"x" * 31).decode(),
    ],
)
def test_a_pin_in_another_spelling_is_refused(text: str):
    with pytest.raises(MalformedMessage):
        parse_pin(text)


@pytest.mark.parametrize("size", [0, 20, 31, 33])
def test_a_digest_of_another_length_is_refused(size: int):
    with pytest.raises(MalformedMessage):
        pin_from_digest(bytes(size))
