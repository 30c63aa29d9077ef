import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from silo_agent.task.update import FloatBlock, TrainingDiverged, clip_factor, delta_norm, encode_update


def blocks() -> Iterator[FloatBlock]:
    yield np.array([3.0, 0.0], dtype=np.float32)
    yield np.array([[4.0]], dtype=np.float32)


def test_the_norm_is_over_all_blocks() -> None:
    assert delta_norm(blocks()) == 5.0


def test_the_norm_is_summed_in_float64() -> None:
    assert delta_norm([np.full(10, 3e38, dtype=np.float32)]) == pytest.approx(3e38 * math.sqrt(10), rel=1e-6)


def test_a_delta_that_is_not_clipped_leaves_bit_for_bit() -> None:
    expected = np.array([3, 0, 4], dtype="<f4").tobytes()
    assert b"".join(encode_update(blocks, norm=5.0)) == expected
    assert b"".join(encode_update(blocks, norm=5.0, clipping_norm=5.0)) == expected


def test_clip_then_weight() -> None:
    # Norm 5 clipped to 1 is [0.6, 0, 0.8]; times weight 10.
    encoded = np.frombuffer(b"".join(encode_update(blocks, norm=5.0, clipping_norm=1.0, weight=10.0)), dtype="<f4")
    np.testing.assert_allclose(encoded, [6.0, 0.0, 8.0], rtol=1e-6)


@given(st.floats(0, 1e30), st.floats(1e-6, 1e6))
def test_a_clipped_norm_is_within_its_bound(norm: float, bound: float) -> None:
    factor = clip_factor(norm, bound)
    assert 0 < factor <= 1
    assert norm * factor <= bound * (1 + 1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_delta_that_is_not_finite_never_leaves(value: float) -> None:
    with pytest.raises(TrainingDiverged, match="delta tensor 1 has values that are not finite"):
        delta_norm([np.zeros(3, dtype=np.float32), np.array([0, value], dtype=np.float32)])


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_an_impossible_weight_is_refused(weight: float) -> None:
    with pytest.raises(TrainingDiverged, match="weight of this silo's delta"):
        next(encode_update(blocks, norm=5.0, weight=weight))
