"""Mask streams are AES-256-CTR, addressable at any word; masked vectors look like nothing at all."""

import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from lorica_security.errors import StateError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.mask_stream import (
    BLOCK_WORDS,
    LONG_WORDS,
    KeyStream,
    MaskSum,
    Workspace,
)
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import machine as silo_machine
from tests.support.secagg_federation import Federation, attempt, entropy

WORDS = 10_000_000


def stream(*names: object) -> KeyStream:
    return KeyStream(Secret(entropy("stream", *names)))


def words(of: KeyStream, count: int, start: int = 0) -> np.ndarray:
    out = np.zeros(count, dtype="<u4")
    of.words_into(out, start, Workspace())
    return out


def test_the_stream_is_aes_256_ctr_from_counter_zero() -> None:
    """The key and first blocks of FIPS-197 C.3's cipher, by the counter mode of SP 800-38A."""
    key = bytes(range(32))
    plain = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    expected = b"".join(plain.update(counter.to_bytes(16, "big")) for counter in range(4))
    assert words(KeyStream(Secret(key)), 16).tobytes() == expected
    assert words(KeyStream(Secret(key)), 4).tobytes().hex() == "f29000b62a499fd0a9f39a6add2e7780"


@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 7, BLOCK_WORDS - 1, BLOCK_WORDS, 3 * BLOCK_WORDS + 5])
def test_any_stretch_of_the_stream_can_be_had_alone(start: int) -> None:
    whole = words(stream(), start + 1000)
    assert np.array_equal(words(stream(), 1000, start), whole[start:])


@pytest.mark.parametrize(
    "start", [0, 3, 4, LONG_WORDS, (1 << 34) - LONG_WORDS - 5, (1 << 34) - 9, 1 << 34, (1 << 36) + 1]
)
def test_a_long_stretch_is_what_its_short_pieces_are(start: int) -> None:
    """A long one comes by another way, and where that ends by the plain one; 2^34 words are where GCM's counter runs
    over."""
    count = LONG_WORDS + 77
    pieces = [words(stream(), min(10_000, count - at), start + at) for at in range(0, count, 10_000)]
    assert np.array_equal(words(stream(), count, start), np.concatenate(pieces))


def test_an_opened_sum_goes_on_where_it_was_left() -> None:
    masks = MaskSum(added=(stream("a"), stream("b")), subtracted=(stream("c"),))
    whole, parts = np.zeros(LONG_WORDS + 1000, dtype="<u4"), np.zeros(LONG_WORDS + 1000, dtype="<u4")
    masks.apply(whole, 7, Workspace())
    opened = masks.opened(7, len(parts), Workspace())
    for first, last in ((0, 1), (1, 1000), (1000, 1000), (1000, LONG_WORDS + 1), (LONG_WORDS + 1, len(parts))):
        opened.apply(parts[first:last])
    assert np.array_equal(parts, whole)


def test_a_sum_of_streams_adds_and_subtracts_mod_2_to_the_32() -> None:
    count = 2 * BLOCK_WORDS + 17
    masks = MaskSum(added=(stream("a"), stream("b")), subtracted=(stream("c"),))
    vector = words(stream("vector"), count)
    expected = vector + words(stream("a"), count) + words(stream("b"), count) - words(stream("c"), count)
    masked = vector.copy()
    masks.apply(masked[: BLOCK_WORDS + 3], 0, Workspace())
    masks.apply(masked[BLOCK_WORDS + 3 :], BLOCK_WORDS + 3, Workspace())
    assert np.array_equal(masked, expected)
    MaskSum(added=masks.subtracted, subtracted=masks.added).apply(masked, 0, Workspace())
    assert np.array_equal(masked, vector)


def test_an_erased_stream_gives_nothing() -> None:
    masks = MaskSum(added=(stream("a"),), subtracted=(stream("b"),))
    masks.erase()
    with pytest.raises(StateError, match="erased"):
        masks.apply(np.zeros(4, dtype="<u4"), 0, Workspace())
    workspace = Workspace()
    stream("a").words_into(np.zeros(4, dtype="<u4"), 0, workspace)
    workspace.words[:] = 1
    nonces = workspace.nonces(Secret(entropy("stream")))
    workspace.erase()
    assert not workspace.words.any()
    assert not any(nonces._lines)


# --- masks mask: fixed keys, so that a statistic is what it is, every time -------------------------------------------


def vector_of(kind: str) -> np.ndarray:
    if kind == "zero":
        return np.zeros(WORDS, dtype="<u4")
    if kind == "constant":
        return np.full(WORDS, 123_456_789, dtype="<u4")
    real = np.random.default_rng(3).standard_normal(WORDS, dtype=np.float32) * 1e4
    return real.astype("<i4").view("<u4")


def masked(kind: str, name: str) -> np.ndarray:
    """The vector as a silo of five masks it in one attempt: with its own stream, and four agreed ones."""
    federation = Federation(5, of=attempt(salt=name)).run(until="masked input")
    to, delivery = federation.queue[2]
    each = federation.silos[SiloName(to)]
    _, effects = silo_machine.step(each.state, delivery, each.party)
    masks = next(effect.masks for effect in effects if isinstance(effect, silo_effects.MaskVector))
    assert (len(masks.added), len(masks.subtracted)) == (3, 2)
    vector = vector_of(kind)
    masks.apply(vector, 0, Workspace())
    return vector


def z_of_chi_square(counts: np.ndarray) -> float:
    """How many standard deviations the chi-square of `counts` against equal chances is from its expectation."""
    expected = counts.sum() / len(counts)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    return (chi_square - freedom) / math.sqrt(2 * freedom)


def statistics(of: np.ndarray) -> dict[str, float]:
    data = of.view(np.uint8).reshape(-1, 4)
    found = {f"byte {index}": z_of_chi_square(np.bincount(data[:, index], minlength=256)) for index in range(4)}
    found["low 16 bits"] = z_of_chi_square(np.bincount(of & 0xFFFF, minlength=1 << 16))
    found["high 16 bits"] = z_of_chi_square(np.bincount(of >> 16, minlength=1 << 16))
    pairs = (of[:-1] >> 24) << 8 | of[1:] >> 24
    found["serial, words 1 apart"] = z_of_chi_square(np.bincount(pairs, minlength=1 << 16))
    pairs = (of[:-4] & 0xFF) << 8 | of[4:] & 0xFF
    found["serial, one cipher block apart"] = z_of_chi_square(np.bincount(pairs, minlength=1 << 16))
    centred = of.astype(np.float64) / 2**32 - 0.5
    for lag in (1, 4, BLOCK_WORDS):
        found[f"correlation, lag {lag}"] = float(centred[:-lag] @ centred[lag:]) * 12 / math.sqrt(len(of) - lag)
    found["mean"] = float(centred.sum()) * math.sqrt(12 / len(of))
    return found


@pytest.mark.parametrize("kind", ["zero", "constant", "real"])
def test_ten_million_masked_words_are_indistinguishable_from_uniform(kind: str) -> None:
    found = statistics(masked(kind, "first"))
    assert max(map(abs, found.values())) < 4.5, found


def test_the_statistics_do_see_a_vector_that_is_not_masked() -> None:
    assert max(map(abs, statistics(vector_of("real")).values())) > 1000
    almost = masked("zero", "first")
    almost[::100] &= 0xFFFFFFFE
    assert abs(statistics(almost)["byte 0"]) > 4.5


def test_the_same_update_masked_twice_shares_nothing() -> None:
    one, other = masked("constant", "first"), masked("constant", "second")
    assert abs(int((one == other).sum()) - WORDS / 2**32) <= 3
    difference = statistics(one - other)
    assert max(map(abs, difference.values())) < 4.5, difference
