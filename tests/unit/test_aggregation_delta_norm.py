import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lorica_coordinator.aggregation.delta_norm import norm_of, sum_of_squares

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def chunk_of(values: Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()


def drawn(elements: int, dtype: str, *, scale: float = 1.0) -> Tensor:
    return (torch.randn(elements, generator=torch.Generator().manual_seed(1)) * scale).to(DTYPES[dtype])


def exact(values: Tensor) -> float:
    return math.fsum(value**2 for value in values.double().tolist())


def test_three_four_is_five() -> None:
    chunks = [chunk_of(torch.tensor(values)) for values in ([3.0], [0.0, -4.0])]
    assert norm_of(sum_of_squares(chunk, "float32") for chunk in chunks) == 5.0


def test_no_elements_have_norm_zero() -> None:
    assert norm_of([]) == 0.0
    assert sum_of_squares(b"", "float32") == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-5, 1.0, 1e15, 1e25])
@pytest.mark.parametrize("elements", [1, 2, 3, 4095, 4096, 8193, 100_000])
def test_agrees_with_an_exactly_rounded_sum(elements: int, scale: float, dtype: str) -> None:
    values = drawn(elements, dtype, scale=scale)
    assert sum_of_squares(chunk_of(values), dtype) == pytest.approx(exact(values), rel=1e-6)


def test_numbers_too_small_for_float32_squares_still_count() -> None:
    assert sum_of_squares(chunk_of(torch.full((9,), 1e-30)), "float32") == pytest.approx(9e-60, rel=1e-6)


def test_large_finite_values_are_no_infinity() -> None:
    chunk = chunk_of(torch.full((4,), 3e38))
    assert norm_of([sum_of_squares(chunk, "float32")]) == pytest.approx(6e38, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 40_001, 70_000])
@pytest.mark.parametrize("others", [0.0, 1.0, 3e38])
def test_nan_poisoning_is_found(bad: float, place: int, others: float, dtype: str) -> None:
    values = torch.full((70_001,), others, dtype=DTYPES[dtype])
    values[place] = bad
    assert not math.isfinite(sum_of_squares(chunk_of(values), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@given(elements=st.integers(1, 9000), offset=st.integers(0, 7))
def test_where_a_chunk_lies_in_memory_does_not_change_a_bit(elements: int, offset: int, dtype: str) -> None:
    chunk = chunk_of(drawn(elements, dtype))
    moved = memoryview(bytes(offset) + chunk)[offset:]
    assert sum_of_squares(moved, dtype) == sum_of_squares(chunk, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(raw=st.binary(max_size=200).map(lambda raw: raw[: len(raw) // 4 * 4]))
def test_says_of_any_bytes_whether_they_are_finite_numbers(raw: bytes, dtype: str) -> None:
    values = torch.from_numpy(np.frombuffer(bytearray(raw), dtype=np.uint8)).view(DTYPES[dtype])
    assert math.isfinite(sum_of_squares(raw, dtype)) == bool(torch.isfinite(values).all())
