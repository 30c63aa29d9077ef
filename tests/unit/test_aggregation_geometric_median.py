"""The geometric median from inner products: by hand, by what makes it the median, and what hostile deltas can do."""

from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lorica_coordinator.aggregation.geometric_median import median_shares
from lorica_coordinator.aggregation.squared_distances import BLOCK, inner_products
from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName
from silo_wire.plans.robust import median_reach

Rows = NDArray[np.float32]


def products_of(rows: Rows, step: int | None = None) -> NDArray[np.float64]:
    names = [SiloName(f"silo-{index:02}") for index in range(len(rows))]
    step = step or rows.shape[1]
    return inner_products(names, (rows[:, first : first + step] for first in range(0, rows.shape[1], step)))


def median_of(rows: Rows) -> NDArray[np.float64]:
    return np.array(median_shares(products_of(rows))) @ rows.astype(np.float64)


def table(*rows: list[float]) -> Rows:
    return np.array(rows, dtype=np.float32)


# --- by hand


def test_products_by_hand() -> None:
    assert products_of(table([1, 2], [3, 4], [0, -1])).tolist() == [[5, 11, -2], [11, 25, -4], [-2, -4, 1]]


def test_fermats_point_by_hand() -> None:
    """Of (0, 0), (2, 0) and (1, 1): from (1, 1/sqrt(3)) they are seen at 120 degrees from each other."""
    assert median_of(table([0, 0], [2, 0], [1, 1])) == pytest.approx([1, 1 / sqrt(3)], abs=1e-6)


def test_on_a_line_it_is_the_median() -> None:
    assert median_of(table([0, 0], [1, 1], [2, 2], [7, 7], [100, 100])) == pytest.approx([2, 2], abs=1e-4)


def test_the_corners_of_a_square_count_the_same() -> None:
    assert median_shares(products_of(table([0, 0], [0, 1], [1, 0], [1, 1]))) == pytest.approx([1 / 4] * 4)


def test_more_than_half_that_agree_are_followed_whatever_the_others_send() -> None:
    assert median_shares(products_of(table([1, 2], [1e30, 0], [1, 2], [0, -1e30], [1, 2]))) == [
        pytest.approx(share) for share in (1 / 3, 0, 1 / 3, 0, 1 / 3)
    ]


def test_deltas_of_zeros_have_a_median() -> None:
    assert median_shares(np.zeros((4, 4))) == [1 / 4] * 4


def test_neither_pieces_nor_order_change_a_product() -> None:
    rows = np.linspace(-1, 1, 5 * (2 * BLOCK + 9), dtype=np.float32).reshape(5, -1) ** 3
    whole = products_of(rows)
    assert (products_of(rows, BLOCK) == whole).all()
    assert (products_of(rows[::-1])[::-1, ::-1] == whole).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_has_no_product_costs_the_silo_its_place(bad: float) -> None:
    with pytest.raises(MalformedMessage, match="the delta of silo silo-01 holds NaN or infinite values"):
        products_of(table([0, 0], [1, bad]))


# --- for all deltas

NUMBERS = st.integers(-40, 40).map(lambda it: it / 8)
POINTS = st.tuples(NUMBERS, NUMBERS, NUMBERS)
FAR = st.tuples(*[st.floats(-(2.0**100), 2.0**100, width=32)] * 3)


@settings(deadline=None, max_examples=60)
@given(st.lists(POINTS, min_size=3, max_size=8))
def test_no_point_nearby_has_a_smaller_sum_of_distances(points: list[tuple[float, ...]]) -> None:
    rows = np.array(points, dtype=np.float32)
    found = median_of(rows)

    def total(point: NDArray[np.float64]) -> float:
        return float(np.linalg.norm(rows - point, axis=1).sum())

    least = total(found)
    for other in (*rows.astype(np.float64), rows.mean(axis=0), *(found + 0.01 * np.vstack([np.eye(3), -np.eye(3)]))):
        assert least <= total(other) + 1e-4


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 3).flatmap(
        lambda f: st.tuples(
            st.lists(POINTS, min_size=f + 1, max_size=f + 4), st.lists(st.one_of(POINTS, FAR), min_size=f, max_size=f)
        )
    )
)
def test_hostile_deltas_bring_it_no_further_than_the_docstring_says(
    both: tuple[list[tuple[float, ...]], list[tuple[float, ...]]],
) -> None:
    honest, rows = np.array(both[0]), np.array([*both[0], *both[1]], dtype=np.float32)
    middle = honest.mean(axis=0)
    farthest = np.linalg.norm(honest - middle, axis=1).max()
    reach = median_reach(len(both[1]), len(rows)) * farthest
    assert np.linalg.norm(median_of(rows) - middle) <= reach * (1 + 1e-4) + 1e-4
