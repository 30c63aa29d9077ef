"""Trimmed mean and median of rows: by hand, against an exact calculation, and what hostile rows can do at most."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lorica_coordinator.aggregation.trimmed_mean import comparators, gathered, trimmed_mean
from lorica_coordinator.aggregation.weighting import CohortWeights, SiloSummary, WeightCaps, weigh
from lorica_security.errors import MalformedMessage, StateError
from lorica_security.identifiers import SiloName
from silo_wire.plans.robust import median_trims, trimmed_silos
from silo_wire.weightings.equal import EQUAL

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def of_rows(rows: list[list[float]], trimmed: int) -> list[float]:
    values = torch.tensor(rows, dtype=torch.float32)
    return [float(it) for it in trimmed_mean(values, trimmed, torch.empty(values.shape[1]))]


def cohort_of(norms: dict[str, float], caps: WeightCaps) -> CohortWeights:
    told = [
        SiloSummary(silo=SiloName(silo), examples=1, loss_reduction=0.0, optimizer_steps=1, delta_norm=norm)
        for silo, norm in norms.items()
    ]
    return weigh(told, weighting=EQUAL, caps=caps)


# --- by hand


def test_a_trimmed_mean_by_hand() -> None:
    """Of 1, 2, 4, 5 and 100 the middle three; of -9, 0, 0, 3 and 6 the middle three."""
    assert of_rows([[100, 0], [1, 6], [4, -9], [2, 0], [5, 3]], 1) == [
        pytest.approx(11 / 3),
        pytest.approx(1.0),
    ]


def test_a_median_by_hand() -> None:
    assert of_rows([[3.0], [1e30], [2.0]], median_trims(3)) == [3.0]
    assert of_rows([[3.0], [1e30], [2.0], [-1e30]], median_trims(4)) == [2.5]
    assert of_rows([[3.0], [5.0]], median_trims(2)) == [4.0]
    assert of_rows([[3.0]], median_trims(1)) == [3.0]


def test_how_many_are_left_out_by_hand() -> None:
    """0.3 x 10 is 3 as people write it, and 3 less a rounding as a product of doubles would have it in other cases."""
    assert [trimmed_silos(share, silos) for share, silos in ((0.2, 5), (0.3, 10), (0.29, 100), (0.49, 3))] == [
        1,
        3,
        29,
        1,
    ]
    assert [median_trims(silos) for silos in (1, 2, 3, 4, 5, 6)] == [0, 0, 1, 1, 2, 2]


def test_a_sum_beyond_float32_has_a_mean_within_it() -> None:
    assert of_rows([[3e38], [3e38], [3e38], [3e38]], median_trims(4)) == pytest.approx([3e38])


def test_a_zero_has_no_sign_whoever_sent_it() -> None:
    for rows in itertools.permutations([[-0.0], [0.0], [-0.0]]):
        result = trimmed_mean(torch.tensor(rows), 1, torch.empty(1))
        assert not torch.signbit(result).any()


def test_leaving_nobody_is_refused() -> None:
    with pytest.raises(StateError, match="2 silos at either end of 4 leave none to average"):
        of_rows([[1.0]] * 4, 2)


# --- for all rows


@pytest.mark.parametrize("rows", range(1, 11))
def test_the_network_sorts_all_zeros_and_ones_and_so_whatever_there_is(rows: int) -> None:
    """Knuth's zero-one principle."""
    table = np.array(list(itertools.product([0, 1], repeat=rows)), dtype=np.int8).T
    for low, high in comparators(rows):
        table[[low, high]] = np.minimum(table[low], table[high]), np.maximum(table[low], table[high])
    assert (np.diff(table, axis=0) >= 0).all()


@settings(deadline=None, max_examples=60)
@given(st.lists(FLOATS, min_size=1, max_size=9), st.data())
def test_it_is_the_exact_mean_of_what_is_kept_rounded(values: list[float], data: st.DataObject) -> None:
    trimmed = data.draw(st.integers(0, (len(values) - 1) // 2))
    kept = sorted(Fraction(value) for value in values)[trimmed : len(values) - trimmed]
    exact, found = sum(kept) / len(kept), of_rows([[value] for value in values], trimmed)[0]
    largest = max(abs(value) for value in kept)
    assert abs(Fraction(found) - exact) <= largest * Fraction(1, 1 << 49) + abs(exact) * Fraction(
        1, 1 << 23
    ) + Fraction(1, 1 << 149)
    assert kept[0] <= Fraction(found) <= kept[-1]


def test_neither_order_nor_slab_changes_a_bit() -> None:
    values = torch.randn((7, 20_000), generator=torch.Generator().manual_seed(1))
    whole = trimmed_mean(values.clone(), 2, torch.empty(20_000))
    turned = trimmed_mean(values.flip(0).contiguous(), 2, torch.empty(20_000))
    parts = [trimmed_mean(part.clone(), 2, torch.empty(part.shape[1])) for part in values.split(333, dim=1)]
    assert torch.equal(whole, turned)
    assert torch.equal(whole, torch.cat(parts))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_hostile_rows_move_a_parameter_no_further_than_the_docstring_says(data: st.DataObject) -> None:
    """And can move it as far: where they all send one huge number."""
    honest = sorted(data.draw(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=9)))
    hostile = data.draw(st.lists(FLOATS, min_size=1, max_size=len(honest) - 1))
    silos, count = len(honest) + len(hostile), len(hostile)
    trimmed = data.draw(st.integers(count, (silos - 1) // 2))
    least = np.mean(np.float64(honest[trimmed - count : silos - trimmed - count]))
    most = np.mean(np.float64(honest[trimmed : silos - trimmed]))
    slack = 1e-6 * max(1.0, abs(honest[0]), abs(honest[-1]))
    assert least - slack <= of_rows([[it] for it in (*honest, *hostile)], trimmed)[0] <= most + slack
    worst = of_rows([[it] for it in (*honest, *[3e38] * count)], trimmed)[0]
    assert worst == pytest.approx(most, abs=slack)


# --- what comes


def gather(norms: dict[str, float], slabs: list[tuple[str, Tensor]], caps: WeightCaps | None = None) -> Tensor:
    rows = torch.empty((len(norms), 2))
    gathered(((SiloName(silo), slab) for silo, slab in slabs), cohort_of(norms, caps or WeightCaps()), rows)
    return rows


def test_a_delta_that_is_too_long_is_shortened_before_it_is_compared() -> None:
    rows = gather(
        {"a": 5.0, "b": 1.0},
        [("a", torch.tensor([3.0, 4.0])), ("b", torch.tensor([1.0, 0.0], dtype=torch.bfloat16))],
        WeightCaps(max_delta_norm=2.5),
    )
    assert rows.tolist() == [[1.5, 2.0], [1.0, 0.0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_has_no_place_in_an_order_costs_the_silo_its_place(bad: float) -> None:
    with pytest.raises(MalformedMessage, match="the delta of silo b holds NaN or infinite values"):
        gather({"a": 1.0, "b": 1.0}, [("a", torch.ones(2)), ("b", torch.tensor([0.0, bad]))])


def test_other_silos_than_were_weighed_are_refused() -> None:
    with pytest.raises(StateError, match="expected the delta of silo b, got c"):
        gather({"a": 1.0, "b": 1.0}, [("a", torch.ones(2)), ("c", torch.ones(2))])
    with pytest.raises(StateError, match="silo c is not in the cohort"):
        gather({"a": 1.0}, [("a", torch.ones(2)), ("c", torch.ones(2))])
    with pytest.raises(MalformedMessage, match=r"silo a is torch.float32 of shape \(3,\)"):
        gather({"a": 1.0}, [("a", torch.ones(3))])
