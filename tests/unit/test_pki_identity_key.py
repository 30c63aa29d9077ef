import re
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage
from lorica_security.identity import identity_key
from lorica_security.identity.identity_key import (
    identity_key_from_pem,
    identity_key_to_pem,
    new_identity_key,
    public_key_bytes,
    public_key_from_bytes,
    sign,
    verify,
)
from lorica_security.pki.tls_key import new_tls_key, tls_key_to_pem

KEY = new_identity_key()
PUBLIC = KEY.public_key()

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P


def test_a_signature_is_plain_ed25519_over_the_documented_bytes():
    signature = sign(KEY, domain=b"update", payload=b"bytes")
    PUBLIC.verify(signature, b"lorica/v1/update\x00bytes")
    assert len(signature) == 64


@given(payload=st.binary(max_size=200), domain=st.from_regex(rb"\A[a-z0-9/-]{1,64}\Z"))
def test_what_is_signed_verifies(payload: bytes, domain: bytes):
    verify(PUBLIC, domain=domain, payload=payload, signature=sign(KEY, domain=domain, payload=payload))


SIGNATURE = sign(KEY, domain=b"update", payload=b"payload")


def test_signature_replayed_in_another_domain_is_refused():
    with pytest.raises(IntegrityError, match="signature for roster"):
        verify(PUBLIC, domain=b"roster", payload=b"payload", signature=SIGNATURE)


def test_signature_over_other_bytes_is_refused():
    with pytest.raises(IntegrityError):
        verify(PUBLIC, domain=b"update", payload=b"payloae", signature=SIGNATURE)


def test_signature_by_another_key_is_refused():
    with pytest.raises(IntegrityError):
        verify(new_identity_key().public_key(), domain=b"update", payload=b"payload", signature=SIGNATURE)


@given(position=st.integers(0, 63), bit=st.integers(0, 7))
def test_signature_with_one_bit_changed_is_refused(position: int, bit: int):
    changed = bytearray(SIGNATURE)
    changed[position] ^= 1 << bit
    with pytest.raises(IntegrityError):
        verify(PUBLIC, domain=b"update", payload=b"payload", signature=bytes(changed))


@pytest.mark.parametrize("size", [0, 63, 65])
def test_signature_of_another_length_is_refused(size: int):
    with pytest.raises(IntegrityError):
        verify(PUBLIC, domain=b"update", payload=b"payload", signature=SIGNATURE.ljust(65, b"\0")[:size])


@pytest.mark.parametrize("domain", [b"", b"a\0b", b"Update", b"a b", b"a" * 65, b"update\n"])
def test_a_domain_that_could_run_into_the_payload_is_refused(domain: bytes):
    with pytest.raises(ValueError, match="domain"):
        sign(KEY, domain=domain, payload=b"")
    with pytest.raises(ValueError, match="domain"):
        verify(PUBLIC, domain=domain, payload=b"", signature=SIGNATURE)


def test_public_key_round_trip():
    assert public_key_from_bytes(public_key_bytes(PUBLIC)) == PUBLIC


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_public_key_of_another_length_is_refused(size: int):
    with pytest.raises(MalformedMessage, match=f"of {size} bytes"):
        public_key_from_bytes(b"\x02" * size)


def add(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """The curve's complete addition law, RFC 8032 5.1.4, in affine coordinates."""
    (x1, y1), (x2, y2) = one, other
    t = D * x1 * x2 * y1 * y2
    return (
        (x1 * y2 + x2 * y1) * pow(1 + t, -1, P) % P,
        (y1 * y2 + x1 * x2) * pow(1 - t, -1, P) % P,
    )


def x_of(y: int) -> int:
    """A square root of (y^2 - 1) / (d y^2 + 1)."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    root = pow(square, (P + 3) // 8, P)
    if root * root % P != square:
        root = root * pow(2, (P - 1) // 4, P) % P
    assert root * root % P == square
    return root


def test_the_small_order_list_is_the_whole_subgroup_of_order_eight():
    points = set()
    for y in {y % P for y in identity_key._SMALL_ORDER_Y}:
        for x in {x_of(y), -x_of(y) % P}:
            point = (x, y)
            double = add(point, point)
            quadruple = add(double, double)
            assert add(quadruple, quadruple) == (0, 1)
            points.add(point)
    assert len(points) == 8


@pytest.mark.parametrize("sign_bit", [0, 1])
def test_identity_key_of_small_order_is_refused(sign_bit: int):
    for y in identity_key._SMALL_ORDER_Y:
        with pytest.raises(MalformedMessage, match="small order"):
            public_key_from_bytes((y | sign_bit << 255).to_bytes(32, "little"))


def test_why_small_order_is_refused_one_signature_fits_any_message():
    neutral = (1).to_bytes(32, "little")
    forged = neutral + bytes(32)
    key = Ed25519PublicKey.from_public_bytes(neutral)
    key.verify(forged, b"I owe you nothing")
    key.verify(forged, b"I owe you everything")


def test_no_two_kinds_of_statement_share_a_domain():
    """What was signed, sealed or chained as one thing is none of the others, however its bytes may be read."""
    root, named = (
        Path(__file__).parents[2],
        re.compile(r'^ *(?:_?[A-Z_]*DOMAIN|domain)(?:: Final)? = b?"([^"]+)"', re.M),
    )
    sources = [
        path for part in ("security", "silo_agent", "coordinator", "proto") for path in (root / part).rglob("*.py")
    ]
    domains = [domain for path in sources for domain in named.findall(path.read_text())]
    assert len(domains) >= 25, "they are named otherwise now"
    assert sorted(domains) == sorted(set(domains))


def test_key_pem_round_trip():
    assert public_key_bytes(identity_key_from_pem(identity_key_to_pem(KEY)).public_key()) == public_key_bytes(PUBLIC)


def test_a_tls_key_in_place_of_the_identity_key_is_refused():
    with pytest.raises(ConfigurationError, match="restore the Ed25519 key"):
        identity_key_from_pem(tls_key_to_pem(new_tls_key()))


def test_bytes_that_are_no_key_are_refused_without_showing_them():
    with pytest.raises(ConfigurationError) as caught:
        identity_key_from_pem(b"my secret words")
    assert "my secret" not in str(caught.value)


def test_rfc8032_test_vector_2_through_the_same_library():
    key = Ed25519PrivateKey.from_private_bytes(
        bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    )
    wanted = "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert public_key_bytes(key.public_key()).hex() == wanted
