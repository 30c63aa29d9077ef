"""Nearest-neighbour mixing: by hand, and what hostile deltas can do at most with a trimmed mean after it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_coordinator.aggregation.neighbour_mixing import mixed, nearest
from lorica_coordinator.aggregation.squared_distances import between
from lorica_security.errors import StateError
from tests.support.robust_search import beyond_the_spread, names


def test_each_is_mixed_with_the_nearest_by_hand() -> None:
    """Numbers on a line, one hostile of five: four of each, itself among them."""
    rows = np.array([[0], [1], [2], [4], [30]], dtype=np.float32)
    found = nearest(between(names(5), [rows]), 1)
    assert found == [[0, 1, 2, 3]] * 4 + [[1, 2, 3, 4]]
    after = mixed(torch.from_numpy(rows), found, torch.empty(5, 1))
    assert after.flatten().tolist() == [1.75] * 4 + [9.25]


def test_it_is_always_mixed_with_itself_and_of_equally_near_ones_with_the_first() -> None:
    assert nearest(np.zeros((5, 5)), 2) == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 3], [0, 1, 4]]


def test_too_few_silos_are_refused() -> None:
    with pytest.raises(StateError, match="4 silos are too few to mix with 2 hostile ones"):
        nearest(np.zeros((4, 4)), 2)


def test_long_deltas_are_mixed_within_range() -> None:
    rows = torch.tensor([[3e38], [3e38], [-3e38]])
    assert mixed(rows, [[0, 1], [0, 2], [1]], torch.empty(3, 1)).flatten().tolist() == pytest.approx([3e38, 0, 3e38])


NUMBERS = st.integers(-40, 40).map(lambda it: it / 8)
POINTS = st.tuples(NUMBERS, NUMBERS)
ANYWHERE = st.one_of(POINTS, st.tuples(*[st.floats(-(2.0**90), 2.0**90, width=32)] * 2))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 3).flatmap(
        lambda f: st.tuples(
            st.lists(POINTS, min_size=f + 1, max_size=f + 4, unique=True),
            st.lists(ANYWHERE, min_size=f, max_size=f),
        )
    )
)
def test_hostile_deltas_bring_it_no_further_than_the_docstring_says(
    both: tuple[list[tuple[float, ...]], list[tuple[float, ...]]],
) -> None:
    honest, hostile = (np.array(points, dtype=np.float32) for points in both)
    assert beyond_the_spread(honest, hostile) <= 1 + 1e-5
