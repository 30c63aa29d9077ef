import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from silo_agent.rounds.update import (
    BLOCK_ELEMENTS,
    bfloat16_bits,
    clip_factor,
    from_bfloat16,
    round_to_bfloat16,
    squared_norm,
)

ALL_BITS = np.arange(1 << 16, dtype=np.uint16)


def test_the_squared_norm_is_over_all_values() -> None:
    assert squared_norm(np.array([3, 0, -4], dtype=np.float32)) == 25.0
    assert squared_norm(np.zeros(2000, dtype=np.float32)) == 0.0
    assert squared_norm(np.empty(0, dtype=np.float32)) == 0.0


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS])
def test_the_squared_norm_is_close_whatever_the_length(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).numpy()
    assert squared_norm(values) == pytest.approx(float(np.square(values, dtype=np.float64).sum()), rel=1e-6)


@pytest.mark.parametrize("size", [3e38, 1e-30])
def test_squares_outside_of_float32_are_summed_in_float64(size: float) -> None:
    assert squared_norm(np.full(5000, size, dtype=np.float32)) == pytest.approx(5000 * float(np.float32(size)) ** 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1500, 1999])
def test_a_value_that_is_not_finite_shows_in_the_squared_norm(value: float, at: int) -> None:
    values = np.ones(2000, dtype=np.float32)
    values[at] = value
    assert not math.isfinite(squared_norm(values))


@given(st.floats(0, 1e30), st.floats(1e-6, 1e6))
def test_a_clipped_norm_is_within_its_bound(norm: float, bound: float) -> None:
    factor = clip_factor(norm, bound)
    assert 0 < factor <= 1
    assert norm * factor <= bound * (1 + 1e-12)
    assert clip_factor(norm, 0.0) == 1.0


@pytest.mark.parametrize("low", [0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_rounding_is_torchs_for_every_upper_half(low: int) -> None:
    """Every sign, exponent and kept significand; cut off: nothing, less than half, half (a tie), more, nearly all."""
    values = ((ALL_BITS.astype(np.uint32) << 16) | low).view(np.float32)
    values = values[np.isfinite(values)]
    assert len(values) == (1 << 16) - 2 * (1 << 7)
    rounded, bits = np.empty_like(values), np.empty(len(values), dtype=np.uint16)
    round_to_bfloat16(values, rounded)
    bfloat16_bits(rounded, bits)
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    assert np.array_equal(bits, theirs.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(rounded.view(np.uint32), theirs.float().numpy().view(np.uint32))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_rounding_is_torchs_for_any_values(numbers: list[float]) -> None:
    values = np.array(numbers, dtype=np.float32)
    rounded = np.empty_like(values)
    round_to_bfloat16(values, rounded)
    theirs = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    assert np.array_equal(rounded.view(np.uint32), theirs.view(np.uint32))


@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=50))
def test_what_rounding_cuts_off_is_a_float32_itself(numbers: list[float]) -> None:
    values = np.array(numbers, dtype=np.float32)
    rounded = np.empty_like(values)
    round_to_bfloat16(values, rounded)
    left = values - rounded
    assert np.array_equal(left.astype(np.float64) + rounded.astype(np.float64), values.astype(np.float64))
    assert np.array_equal(left + rounded, values)


def test_widening_is_exact_for_every_bfloat16() -> None:
    wide = np.empty(len(ALL_BITS), dtype=np.float32)
    from_bfloat16(ALL_BITS, wide)
    theirs = torch.from_numpy(ALL_BITS.view(np.int16)).view(torch.bfloat16).float().numpy()
    numbers = ~np.isnan(theirs)
    assert np.array_equal(wide.view(np.uint32)[numbers], theirs.view(np.uint32)[numbers])
    assert np.array_equal(np.isnan(wide), ~numbers)
