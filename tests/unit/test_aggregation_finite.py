import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from silo_wire.server_step.finite import extremes

DTYPES = [torch.float32, torch.bfloat16]


def finite(values: torch.Tensor) -> bool:
    return bool(torch.isfinite(extremes(values)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.lists(st.floats(width=32), max_size=20))
def test_says_what_isfinite_says_of_each(dtype: torch.dtype, numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32).to(dtype)
    assert finite(values) == bool(torch.isfinite(values).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_among_huge_ones_is_found(dtype: torch.dtype, bad: float) -> None:
    values = torch.full((100_000,), 3e38, dtype=dtype)
    assert finite(values)
    values[77_777] = bad
    assert not finite(values)
