"""AES-CTR by way of GCM: the very same keystream, from any counter block on."""

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from lorica_security.secure_aggregation.masked_vectors.counter_mode import (
    BLOCK_BYTES,
    COUNTER_BITS,
    Nonces,
    _block,
    _element,
    _inverse,
    _product,
    by_ctr,
    gcm_reaches,
)
from tests.support.secagg_federation import entropy

KEYS = [bytes(32), bytes(range(32)), *(entropy("counter mode", index) for index in range(6))]
COUNTERS = [0, 1, 2, 3, 1 << 16, (1 << 16) - 1, 987_654_321, (1 << 32) - 9, 1 << 32, (1 << 32) + 1, (1 << 37) + 12_345]


def blocks(key: bytes, first: int, count: int) -> bytes:
    """By the cipher alone."""
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return b"".join(cipher.update(counter.to_bytes(BLOCK_BYTES, "big")) for counter in range(first, first + count))


@pytest.mark.parametrize("key", KEYS, ids=[key.hex()[:8] for key in KEYS])
@pytest.mark.parametrize("counter", COUNTERS)
def test_both_ways_give_the_blocks_of_the_counters(key: bytes, counter: int) -> None:
    assert gcm_reaches(counter, 9)
    expected = blocks(key, counter, 9)
    assert by_ctr(key, counter).update(bytes(len(expected))) == expected
    assert Nonces(key).by_gcm(key, counter).update(bytes(len(expected))) == expected


def test_one_table_serves_every_counter_in_pieces_of_any_length() -> None:
    nonces = Nonces(KEYS[1])
    for counter in COUNTERS:
        expected, context = blocks(KEYS[1], counter, 9), nonces.by_gcm(KEYS[1], counter)
        assert b"".join(context.update(bytes(size)) for size in (1, 15, 16, 17, 95)) == expected


def test_gcm_is_not_asked_past_the_end_of_its_counter() -> None:
    low = 1 << 32
    assert gcm_reaches(low - 9, 9)
    assert not gcm_reaches(low - 9, 10)  # its 32 bits run over
    assert gcm_reaches(0, low - 2)
    assert not gcm_reaches(0, low - 1)  # a message ends before
    assert gcm_reaches((1 << COUNTER_BITS) - 1, 1)
    assert not gcm_reaches((1 << COUNTER_BITS) - 1, 2)


def test_what_it_knows_of_a_key_can_be_erased() -> None:
    nonces = Nonces(KEYS[2])
    assert any(nonces._lines)
    nonces.erase()
    assert not any(nonces._lines)


def test_the_field_is_that_of_gcm() -> None:
    """Test case 2 of the GCM specification: H, a ciphertext block C, and GHASH(C, length)."""
    h = _element(bytes.fromhex("66e94bd4ef8a2c3b884cfa59ca342b2e"))
    ciphertext = _element(bytes.fromhex("0388dace60b6a392f328c2b971b2fe78"))
    length = _element((128).to_bytes(16, "big"))
    hashed = _product(_product(ciphertext, h) ^ length, h)
    assert _block(hashed).hex() == "f38cbb1ad69223dcc3457ae5b6b0f885"


def test_inverses() -> None:
    one = 1
    for index in range(50):
        element = _element(entropy("field", index)[:16])
        assert _product(element, _inverse(element)) == one
    assert _inverse(one) == one
    with pytest.raises(ZeroDivisionError):
        _inverse(0)
