"""Fixed point: sums are exact and cannot overflow, rounding has no bias, errors stay far under what training
notices."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import StateError
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.fixed_point import (
    BLOCK_ELEMENTS,
    EXTRA_WORDS,
    Encoder,
    FixedPoint,
    Ranges,
    Workspace,
    decode,
    decode_tail,
)
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, Words
from tests.support.secagg_federation import entropy

CUT = 1 - EXTRA_WORDS
"""Where the count of coordinates that were cut stands; the weight is before it, scores after it."""


def rounding(*names: object) -> KeyStream:
    return KeyStream(Secret(entropy("rounding", *names)))


def encode(fixed_point: FixedPoint, delta: np.ndarray, weight: float, *names: object) -> Words:
    workspace = Workspace()
    encoder = Encoder(fixed_point=fixed_point, weight=weight, rounding=rounding(*names))
    out = np.zeros(fixed_point.words, dtype="<u4")
    saturated = encoder.encode(out[:-EXTRA_WORDS], delta, 0, workspace)
    out[-EXTRA_WORDS:] = encoder.encode_tail(saturated, workspace)
    return out


def one_tensor(size: int, *, bound: float = 1.0, cap: float = 1.0, cohort: int = 8) -> FixedPoint:
    return FixedPoint.of(cohort=cohort, ranges=Ranges.of(sizes=[size], largest_delta=[bound], largest_weight=cap))


# --- overflow and saturation ------------------------------------------------------------------------------------------


@given(
    st.integers(1, 40),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
    st.floats(0, 1e30),
)
def test_no_delta_and_no_weight_overflow_the_sum_of_a_cohort(cohort: int, values: list[float], weight: float) -> None:
    fixed_point = one_tensor(len(values), bound=0.5, cap=3.0, cohort=cohort)
    delta = np.array(values, dtype=np.float32)
    encoded = [encode(fixed_point, delta, weight, index) for index in range(cohort)]
    exact = sum(words[:CUT].view("<i4").astype(np.int64) for words in encoded)
    wrapped = np.sum(encoded, axis=0, dtype=np.uint32)
    assert np.array_equal(exact, wrapped[:CUT].view(np.int32))
    assert int(wrapped[CUT]) == sum(int(words[CUT]) for words in encoded)


def test_the_largest_values_of_all_silos_fill_the_word_and_no_more() -> None:
    fixed_point = one_tensor(64, cohort=32)
    for sign in (1, -1):
        delta = np.full(64, 7 * sign, dtype=np.float32)
        total = np.sum([encode(fixed_point, delta, 1.0, index) for index in range(32)], axis=0, dtype=np.uint32)
        signed = total[:64].view(np.int32).astype(np.int64) * sign
        assert ((signed >= 32 * (fixed_point.levels - 1)) & (signed < 2**31)).all()
        assert total[CUT] == 32 * 64


def test_the_count_of_saturated_coordinates_stops_at_its_limit() -> None:
    fixed_point = FixedPoint(cohort=8, levels=1 << 20, saturation_limit=5, ranges=one_tensor(9).ranges)
    assert encode(fixed_point, np.full(9, 2, dtype=np.float32), 1.0)[CUT] == 5


def test_a_clipped_coordinate_is_counted_and_others_are_not_touched() -> None:
    fixed_point = one_tensor(4)
    words = encode(fixed_point, np.array([0.5, 1.5, -1.0, -2.0], dtype=np.float32), 1.0)
    assert words[CUT] == 2
    assert np.abs(words[:4].view("<i4") / fixed_point.levels - [0.5, 1, -1, -1]).max() < 1e-8


def test_a_weight_above_the_cap_counts_as_the_cap_in_delta_and_weight_alike() -> None:
    fixed_point = one_tensor(3, cap=2.0)
    above, at_cap = (encode(fixed_point, np.full(3, 0.25, dtype=np.float32), weight) for weight in (50.0, 2.0))
    assert np.array_equal(above[:CUT], at_cap[:CUT])
    assert (above[CUT], at_cap[CUT]) == (1, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_delta_that_is_not_finite_does_not_leave(value: float) -> None:
    delta = np.zeros(100_000, dtype=np.float32)
    delta[77_777] = value
    with pytest.raises(StateError, match="not finite"):
        encode(one_tensor(100_000), delta, 1.0)
    with pytest.raises(StateError, match="weight"):
        encode(one_tensor(3), np.zeros(3, dtype=np.float32), value)


# --- addressing -------------------------------------------------------------------------------------------------------


def test_pieces_of_any_size_give_the_bytes_of_the_whole() -> None:
    sizes = (5, BLOCK_ELEMENTS + 3, 1, 70_001)
    ranges = Ranges.of(sizes=sizes, largest_delta=[1, 2, 3, 4], largest_weight=1)
    fixed_point = FixedPoint.of(cohort=3, ranges=ranges)
    delta = np.random.default_rng(1).uniform(-1, 1, ranges.elements).astype(np.float32)
    whole = encode(fixed_point, delta, 0.7)
    workspace = Workspace()
    encoder = Encoder(fixed_point=fixed_point, weight=0.7, rounding=rounding())
    pieces = np.zeros_like(whole)
    cuts = [0, 1, 4, 5, 6, 4097, 40_000, 40_003, ranges.elements]
    for first, last in reversed(list(pairwise(cuts))):
        assert encoder.encode(pieces[first:last], delta[first:last], first, workspace) == 0
    pieces[-EXTRA_WORDS:] = encoder.encode_tail(0, workspace)
    assert np.array_equal(whole, pieces)
    with pytest.raises(ValueError, match="do not fit"):
        encoder.encode(pieces, np.zeros(len(pieces), dtype=np.float32), 0, workspace)


def test_decoding_in_pieces_gives_the_whole() -> None:
    ranges = Ranges.of(sizes=(3, 5), largest_delta=[1, 1], largest_weight=2)
    fixed_point = FixedPoint.of(cohort=3, ranges=ranges)
    delta = np.array([0.1, -0.9, 0.2, 0, 0, 0.5, -0.25, 0], dtype=np.float32)
    words = encode(fixed_point, delta, 2.0)
    out = np.zeros(8, dtype=np.float32)
    for first, last in ((4, 8), (0, 2), (2, 4)):
        decode(fixed_point, words[first:last], first, out[first:last])
    assert np.allclose(out, 2 * delta, atol=1e-7)
    assert decode_tail(fixed_point, words[-EXTRA_WORDS:]).weight_sum == pytest.approx(2.0)


# --- rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.999, -0.125, -0.5])
@pytest.mark.parametrize("whole", [0, 3, 1_000_001, -77])
def test_rounding_has_no_bias(fraction: float, whole: int) -> None:
    """The mean of 400 000 roundings is within 5 standard errors of the value, and only its neighbours occur."""
    count = 400_000
    fixed_point = one_tensor(count, bound=1.0, cohort=8)
    value = np.float32((whole + fraction) / fixed_point.levels)
    exact = float(value) * fixed_point.levels
    words = encode(fixed_point, np.full(count, value), 1.0, whole, fraction)[:-EXTRA_WORDS].view("<i4")
    assert set(np.unique(words)) <= {int(np.floor(exact)), int(np.ceil(exact))}
    spread = exact - np.floor(exact)
    deviation = np.sqrt(max(spread * (1 - spread), 1e-12) / count)
    assert abs(words.mean() - exact) <= 5 * deviation + 1e-6


def test_rounding_of_neighbouring_coordinates_and_of_two_silos_is_independent() -> None:
    count = 200_000
    fixed_point = one_tensor(count)
    value = np.full(count, np.float32(0.5 / fixed_point.levels))
    one, other = (encode(fixed_point, value, 1.0, name)[:-EXTRA_WORDS].astype(float) for name in ("one", "other"))
    for left, right in ((one[:-1], one[1:]), (one, other)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / np.sqrt(count)


# --- accuracy over rounds ---------------------------------------------------------------------------------------------

SCALES = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
SIZES = (4096, 64, 16_384, 512, 4096)


def deltas(cohort: int, round_: int, *, agreement: float) -> list[np.ndarray]:
    """T5-shaped: heavy-tailed, scales four orders of magnitude apart, silos that partly pull in one direction."""
    scales = np.repeat(SCALES, SIZES) * 0.7**round_
    common = np.random.default_rng(1000 + round_).standard_t(4, sum(SIZES))
    result = []
    for index in range(cohort):
        own = np.random.default_rng((index, round_)).standard_t(4, sum(SIZES))
        mixed = agreement * common + (1 - agreement) * own
        result.append((scales * mixed).astype(np.float32))
    return result


def relative(secure: np.ndarray, plain: np.ndarray) -> float:
    return float(np.linalg.norm(secure - plain) / np.linalg.norm(plain))


def errors_of_rounds(
    cohort: int, rounds: int, *, agreement: float, bounds: Sequence[float]
) -> list[tuple[float, float, int]]:
    """Per round: the relative error, the worst tensor's root mean square error as a multiple of what the module states,
    how many were cut.

    Weights are 50 times apart and drift from round to round.
    """
    ranges = Ranges.of(sizes=SIZES, largest_delta=bounds, largest_weight=100.0)
    found = []
    for round_ in range(rounds):
        fixed_point = FixedPoint.of(cohort=cohort, ranges=ranges)
        weights = np.geomspace(2.0, 100.0, cohort) * 0.6**round_
        all_deltas = deltas(cohort, round_, agreement=agreement)
        total = np.zeros(fixed_point.words, dtype=np.uint32)
        plain = np.zeros(sum(SIZES))
        for index, (delta, weight) in enumerate(zip(all_deltas, weights, strict=True)):
            total += encode(fixed_point, delta, float(weight), round_, index)
            plain += weight * delta.astype(np.float64)
        tail = decode_tail(fixed_point, total[-EXTRA_WORDS:])
        secure = np.zeros(sum(SIZES))
        decode(fixed_point, total[:-EXTRA_WORDS], 0, secure)
        secure, plain = secure / tail.weight_sum, plain / weights.sum()
        step = np.sqrt(cohort) / 2 / fixed_point.levels * ranges.weight_cap / weights.sum()
        worst = max(
            float(np.sqrt(np.mean((secure[a:b] - plain[a:b]) ** 2))) / (step * ranges.tensors[index].bound)
            for index, a, b in ranges.pieces(0, sum(SIZES))
        )
        found.append((relative(secure, plain), worst, tail.saturated))
    return found


@pytest.mark.parametrize("cohort", [3, 8, 32])
@pytest.mark.parametrize("agreement", [0.7, 0.1])
def test_the_aggregate_is_exact_to_1e_4_and_no_tensor_is_further_off_than_stated(cohort: int, agreement: float) -> None:
    for overall, worst, saturated in errors_of_rounds(cohort, 4, agreement=agreement, bounds=[1.0] * len(SIZES)):
        assert saturated == 0
        assert overall <= 1e-4
        assert worst <= 1.1


def test_a_bound_near_what_deltas_have_makes_the_aggregate_exact_to_1e_6() -> None:
    (overall, worst, saturated), *_ = errors_of_rounds(8, 1, agreement=0.5, bounds=[scale * 100 for scale in SCALES])
    assert saturated == 0
    assert overall < 1e-6
    assert worst <= 1.1
