"""Distances and Multi-Krum: by hand, against an exact calculation, and what hostile deltas can do at most."""

from fractions import Fraction
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lorica_coordinator.aggregation import krum
from lorica_coordinator.aggregation.squared_distances import BLOCK, between, to_centre
from lorica_security.errors import MalformedMessage, StateError
from lorica_security.identifiers import SiloName
from silo_wire.plans.robust import krum_reach

Rows = NDArray[np.float32]


def names(count: int) -> list[SiloName]:
    return [SiloName(f"silo-{index:02}") for index in range(count)]


def distances_of(rows: Rows, step: int | None = None) -> NDArray[np.float64]:
    step = step or rows.shape[1]
    return between(names(len(rows)), (rows[:, first : first + step] for first in range(0, rows.shape[1], step)))


def table(*rows: list[float]) -> Rows:
    return np.array(rows, dtype=np.float32)


# --- by hand


def test_distances_by_hand() -> None:
    rows = table([0, 0], [3, 4], [3, 0])
    assert distances_of(rows).tolist() == [[0, 25, 9], [25, 0, 16], [9, 16, 0]]
    assert to_centre(names(3), [(rows, table([3, 1])[0])]).tolist() == [10, 9, 1]


def test_krum_by_hand() -> None:
    """Numbers on a line, one hostile of five: each score is of the two nearest others."""
    distances = distances_of(table([0], [1], [2], [4], [30]))
    assert krum.scores(distances, 1) == [1 + 4, 1 + 1, 1 + 4, 4 + 9, 26**2 + 28**2]
    assert krum.kept(distances, 1) == [0, 1, 2, 3]


def test_of_equal_scores_the_first_are_kept() -> None:
    assert krum.kept(distances_of(table(*[[1.0]] * 5)), 1) == [0, 1, 2, 3]
    assert krum.kept(distances_of(table([3], [-3], [1], [0], [-1])), 1) == [0, 2, 3, 4]


def test_too_few_silos_are_refused() -> None:
    with pytest.raises(StateError, match="6 silos are too few to choose among with 2 hostile ones"):
        krum.kept(np.zeros((6, 6)), 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_has_no_distance_costs_the_silo_its_place(bad: float) -> None:
    with pytest.raises(MalformedMessage, match="the delta of silo silo-01 holds NaN or infinite values"):
        distances_of(table([0, 0], [1, bad], [2, 2]))


# --- for all deltas


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=2)
)
def test_distances_are_exact_but_for_rounding_however_long_a_delta_is(rows: list[list[float]]) -> None:
    found = distances_of(table(*rows))
    for i, one in enumerate(rows):
        for j, other in enumerate(rows):
            exact = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(one, other, strict=True))
            assert found[i, j] == pytest.approx(float(exact), rel=1e-14)


def test_neither_order_nor_pieces_change_a_bit() -> None:
    rows = torch.randn((6, 3 * BLOCK + 17), generator=torch.Generator().manual_seed(1)).numpy()
    whole = distances_of(rows)
    assert (distances_of(rows, BLOCK) == whole).all()
    assert (distances_of(rows, 2 * BLOCK) == whole).all()
    assert (distances_of(rows[::-1])[::-1, ::-1] == whole).all()


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Rows, Rows]:
    """Honest deltas, and fewer hostile ones, some of them beside honest ones or beside each other."""
    hostile = draw(st.integers(1, 3))
    honest = draw(st.integers(hostile + 3, hostile + 5))
    number = st.integers(-40, 40).map(lambda it: it / 8)
    point = st.tuples(number, number)
    good = draw(st.lists(point, min_size=honest, max_size=honest))
    near = st.tuples(st.sampled_from(good), point, st.sampled_from([1e-3, 0.1, 1.0, 1e6])).map(
        lambda it: (it[0][0] + it[2] * it[1][0], it[0][1] + it[2] * it[1][1])
    )
    bad = draw(st.one_of(st.lists(near, min_size=hostile, max_size=hostile), near.map(lambda it: [it] * hostile)))
    return np.array(good, dtype=np.float32), np.array(bad, dtype=np.float32)


VOUCH_FOR_EACH_OTHER = (
    np.array([(0, 0), (1, 0), (0, 1), (1, 1), (2, 0)], dtype=np.float32),
    np.array([(1e6, 0)] * 2, dtype=np.float32),
)


@settings(deadline=None, max_examples=80)
@given(rounds())
@example(VOUCH_FOR_EACH_OTHER)
def test_hostile_deltas_bring_the_mean_no_further_than_the_docstring_says(both: tuple[Rows, Rows]) -> None:
    honest, hostile = both
    rows, count = np.concatenate(both), len(hostile)
    silos = len(rows)
    between_honest = np.sqrt(distances_of(honest).max())
    kept = krum.kept(distances_of(rows), count)
    assert len(kept) == silos - count
    strangers = [rows[index] for index in kept if index >= len(honest)]
    nearest = [float(np.linalg.norm(honest - one, axis=1).min()) for one in strangers]
    reach = between_honest * sqrt((silos - count - 2) / (silos - 2 * count - 1))
    assert all(distance <= reach * (1 + 1e-6) + 1e-12 for distance in nearest)
    assert sum(nearest) / len(kept) <= krum_reach(count, silos) * between_honest * (1 + 1e-6) + 1e-12
