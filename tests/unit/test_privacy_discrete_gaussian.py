"""Random words, and the discrete Gaussian drawn from them: moments, bins and bits, each under a fixed key."""

import math
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from lorica_security.noise import discrete_gaussian
from lorica_security.noise.chance_table import ONE, ChanceTable
from lorica_security.noise.discrete_gaussian import SIGMA, draw, happens
from lorica_security.noise.random_words import RandomWords

KEY = bytes(range(32))
SAMPLES = 1 << 19
SURE = 1e-6
"""Below this a test fails. Keys are fixed: one that passes goes on passing."""


@pytest.fixture(scope="module")
def samples() -> np.ndarray:
    return draw(RandomWords(KEY), SAMPLES)


# --- the words


def test_words_are_the_keystream_of_aes_256_in_counter_mode() -> None:
    stream = Cipher(algorithms.AES(KEY), modes.CTR(bytes(16))).encryptor().update(bytes(48))
    words = RandomWords(KEY)
    assert words.words64(3).tobytes() + words.words32(6).tobytes() == stream


def test_no_word_is_given_twice() -> None:
    words = RandomWords(KEY)
    drawn = np.concatenate([words.words64(70_000) for _ in range(3)])
    assert len(np.unique(drawn)) == len(drawn)


def test_a_key_has_32_bytes() -> None:
    with pytest.raises(ValueError, match="31 bytes"):
        RandomWords(KEY[:31])


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 7, 1 << 15, (1 << 16) - 1])
def test_whole_numbers_below_a_bound_are_uniform(bound: int) -> None:
    drawn = RandomWords(KEY).below(bound, 200_000)
    assert drawn.max() < bound
    counts = np.bincount(drawn // -(-bound // 64), minlength=1)
    widths = np.bincount(np.arange(bound) // -(-bound // 64))
    assert stats.chisquare(counts, widths / bound * len(drawn)).pvalue > SURE or bound == 1


def test_what_would_make_some_numbers_likelier_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    words = RandomWords(KEY)
    served = iter([np.array([0xFFFFFFFF, 4], dtype="<u4"), np.array([5], dtype="<u4")])
    monkeypatch.setattr(words, "words32", lambda count: next(served))
    assert words.below(3, 2).tolist() == [2, 1]  # 2^32 - 1 is a multiple of 3, and no whole number beside it fits


# --- a table of chances


def chances(*parts: Fraction) -> list[int]:
    whole = [int(part * ONE) for part in parts]
    return [ONE - sum(whole[1:]), *whole[1:]]


UNEVEN = chances(*(Fraction(1, 7), Fraction(0), Fraction(5, 11), Fraction(1, 1 << 100), Fraction(31, 77)))


def test_a_table_holds_each_chance_to_the_last_bit() -> None:
    """Added up over the slots: what each entry has of them, of 2^128 together."""
    table = ChanceTable(UNEVEN)
    room = ONE // len(table._first)
    held = [0] * len(table._first)
    for slot, (first, second, other) in enumerate(
        zip(table._first.tolist(), table._second.tolist(), table._others.tolist(), strict=True)
    ):
        own = (first << 64) + second
        held[slot] += own
        held[other] += room - own
    assert held == [*UNEVEN, 0, 0, 0]


def test_entries_come_as_often_as_their_chances_say() -> None:
    drawn = ChanceTable(UNEVEN).draw(RandomWords(KEY), 300_000)
    counts = np.bincount(drawn, minlength=5)
    assert counts[1] == counts[3] == 0
    likely = [0, 2, 4]
    assert stats.chisquare(counts[likely], [UNEVEN[entry] / ONE * len(drawn) for entry in likely]).pvalue > SURE


def test_a_word_that_ends_at_a_threshold_is_decided_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ChanceTable(chances(Fraction(2, 3), Fraction(1, 3)))
    (slot,) = np.flatnonzero(table._others != np.arange(2))
    at = np.uint64(int(slot) << 63 | int(table._first[slot]))
    second = table._second[slot]
    assert second > 0
    words = RandomWords(KEY)
    served = iter([np.array([at, at], dtype="<u8"), np.array([second - np.uint64(1), second], dtype="<u8")])
    monkeypatch.setattr(words, "words64", lambda count: next(served))
    assert table.draw(words, 2).tolist() == [slot, table._others[slot]]


@pytest.mark.parametrize("wrong", [[ONE - 1], [ONE + 1, -1], [ONE // 2] * 3])
def test_chances_that_are_none_are_refused(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match="chances"):
        ChanceTable(wrong)


# --- the noise


def test_moments(samples: np.ndarray) -> None:
    z = samples / SIGMA
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - moment) < 5 * math.sqrt(spread / SAMPLES)


def test_as_many_samples_in_each_bin_as_of_a_gaussian(samples: np.ndarray) -> None:
    edges = stats.norm.ppf(np.linspace(0, 1, 257)[1:-1]) * SIGMA
    counts = np.bincount(np.searchsorted(edges, samples), minlength=256)
    assert stats.chisquare(counts).pvalue > SURE


def test_far_from_the_middle_too(samples: np.ndarray) -> None:
    """Beyond the third SIGMA and the fourth."""
    beyond = [int((abs(samples) > k * SIGMA).sum()) for k in (3, 4)]
    for k, count in zip((3, 4), beyond, strict=True):
        assert stats.binomtest(count, SAMPLES, 2 * stats.norm.sf(k)).pvalue > SURE


@pytest.mark.parametrize("shift", [0, 8, 16, 22])
def test_low_bits_are_uniform(samples: np.ndarray, shift: int) -> None:
    assert stats.chisquare(np.bincount((samples >> shift) & 255, minlength=256)).pvalue > SURE


def test_neighbouring_samples_have_nothing_in_common(samples: np.ndarray) -> None:
    z = samples / SIGMA
    for lag in (1, 2, 64):
        assert abs((z[lag:] * z[:-lag]).mean()) < 5 / math.sqrt(SAMPLES)


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 1000), Fraction(1, 2), Fraction(1)])
@pytest.mark.parametrize("one_bits", [9, 61])
def test_events_of_probability_e_to_the_minus(exponent: Fraction, one_bits: int) -> None:
    count = 300_000
    whole = int(exponent * (1 << one_bits))
    happened = int(happens(RandomWords(KEY), np.full(count, np.uint64(whole)), one_bits=one_bits).sum())
    assert stats.binomtest(happened, count, math.exp(-whole / (1 << one_bits))).pvalue > SURE


def test_sizes_on_one_stair_fall_as_the_curve_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stair so far out that the curve falls by a tenth from its one end to the other."""
    stair = 13 << 7
    only = ChanceTable([0] * stair + [ONE])
    monkeypatch.setattr(discrete_gaussian, "_stairs", lambda bits: only)
    rest = (abs(draw(RandomWords(KEY), 200_000)) / SIGMA * 128 - stair).tolist()
    edges = np.linspace(stair, stair + 1, 9) / 128
    expected = np.exp(-((edges[:-1] + edges[1:]) ** 2) / 8)
    counts, _ = np.histogram(rest, np.linspace(0, 1, 9))
    assert stats.chisquare(counts, expected / expected.sum() * counts.sum()).pvalue > SURE


def test_any_number_of_samples() -> None:
    for count in (0, 1, 2, 1000):
        assert len(draw(RandomWords(KEY), count)) == count


@pytest.mark.parametrize("bits", [4, 9, 20])
def test_a_smaller_scale_is_the_discrete_gaussian_of_that_scale(bits: int) -> None:
    """Bin by bin, against the probabilities themselves: of single integers where the scale is small."""
    scale, count = 1 << bits, 200_000
    drawn = draw(RandomWords(KEY), count, sigma_bits=bits)
    reach = 6 * scale
    values = np.arange(-reach, reach + 1)
    probabilities = np.exp(-(values.astype(float) ** 2) / (2 * scale**2))
    width = max(1, scale // 8)
    bins = (values + reach) // width
    expected = np.bincount(bins, probabilities / probabilities.sum()) * count
    counts = np.bincount((np.clip(drawn, -reach, reach) + reach) // width, minlength=len(expected))
    often = expected > 20
    assert (
        stats.chisquare(
            [*counts[often], counts[~often].sum()], [*expected[often], expected[~often].sum()], sum_check=False
        ).pvalue
        > SURE
    )


@pytest.mark.parametrize("bits", [3, 31])
def test_a_scale_that_the_arithmetic_does_not_hold_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="scale"):
        draw(RandomWords(KEY), 1, sigma_bits=bits)
