import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from coordinator.aggregation.delta_norm import expanded, norm_of, sum_of_squares

Values = NDArray[np.float32]


def drawn(elements: int, *, seed: int, scale: float = 1.0) -> Values:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * scale
    return values.numpy()


def exact(values: Values) -> float:
    return math.fsum(float(value) ** 2 for value in values)


def test_three_four_is_five() -> None:
    chunks = [np.array(chunk, dtype="<f4") for chunk in ([3.0], [0.0, -4.0])]
    assert norm_of(map(sum_of_squares, chunks)) == 5.0


def test_no_elements_have_norm_zero() -> None:
    assert norm_of([]) == 0.0
    assert sum_of_squares(np.empty(0, dtype="<f4")) == 0.0


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-5, 1.0, 1e15, 1e25])
@pytest.mark.parametrize("elements", [1, 4095, 4096, 4097, 100_000])
def test_agrees_with_an_exactly_rounded_sum(elements: int, scale: float) -> None:
    values = drawn(elements, seed=1, scale=scale)
    assert sum_of_squares(values) == pytest.approx(exact(values), rel=1e-6)


def test_numbers_too_small_for_float32_squares_still_count() -> None:
    assert sum_of_squares(np.full(9, 1e-30, dtype="<f4")) == pytest.approx(9e-60, rel=1e-6)


def test_large_finite_values_are_no_infinity() -> None:
    assert norm_of([sum_of_squares(np.full(4, 3e38, dtype="<f4"))]) == pytest.approx(6e38, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 40_000, 70_000])
@pytest.mark.parametrize("others", [0.0, 1.0, 3e38])
def test_nan_poisoning_is_found(bad: float, place: int, others: float) -> None:
    values = np.full(70_001, others, dtype="<f4")
    values[place] = bad
    assert not math.isfinite(sum_of_squares(values))


@given(st.integers(1, 9000), st.integers(0, 7))
def test_where_a_chunk_lies_in_memory_does_not_change_a_bit(elements: int, offset: int) -> None:
    values = drawn(elements, seed=3)
    moved = memoryview(bytes(offset) + values.tobytes())[offset:]
    assert sum_of_squares(expanded(moved, "float32")) == sum_of_squares(values)


@given(st.binary(min_size=2, max_size=200).filter(lambda raw: len(raw) % 2 == 0))
def test_bfloat16_expands_as_in_torch(raw: bytes) -> None:
    theirs = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).float().numpy()
    assert expanded(raw, "bfloat16").tobytes() == theirs.tobytes()
