"""The ranges of masked sums are constants of a plan: a silo takes these and no others, whatever the coordinator
offers."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_security.errors import PolicyRefusal
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.fixed_point import (
    EXTRA_WORDS,
    FixedPoint,
    Ranges,
    TensorRange,
    decode,
    decode_tail,
)
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream
from silo_wire.plans.masked_ranges import CLOSING_RANGES, check_ranges, ranges_of
from silo_wire.plans.plan import PlanBundle
from tests.support.federation_peer import small_bundle
from tests.support.secagg_federation import encoded, entropy

SIZE = 40


def bundle(**aggregation: Any) -> PlanBundle:
    return small_bundle(
        elements=SIZE,
        schedule={"rounds": 3, "min_silos": 3},
        aggregation={"secure_aggregation": True, "max_weight": 100.0, **aggregation},
    )


def refused(offered: Ranges, *, closing: bool = False, of: PlanBundle | None = None) -> str:
    with pytest.raises(PolicyRefusal) as caught:
        check_ranges(of or bundle(), offered, closing=closing)
    assert caught.value.rule == "ranges"
    assert "are the same in every round: this silo masks nothing by them" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("aggregation", "cap", "bound"),
    [
        ({}, 100.0, 1.0),
        ({"weighting": "equal"}, 1.0, 1.0),
        ({"delta_bound": 0.25}, 100.0, 0.25),
        ({"max_delta_norm": 0.5}, 100.0, 0.5),
        ({"max_delta_norm": 0.0, "delta_bound": 8.0}, 100.0, 8.0),
    ],
)
def test_ranges_are_the_plans_bounds(aggregation: dict[str, Any], cap: float, bound: float) -> None:
    made = bundle(**aggregation)
    assert ranges_of(made) == Ranges(weight_cap=cap, tensors=(TensorRange(SIZE, bound),))
    check_ranges(made, ranges_of(made), closing=False)


def test_where_silos_make_noise_no_coordinate_is_cut() -> None:
    """The noise is sized for a delta of `max_delta_norm`, whatever shape it has."""
    noised = small_bundle(
        elements=SIZE,
        schedule={"rounds": 3, "min_silos": 3},
        aggregation={"secure_aggregation": True, "max_weight": 100.0, "max_delta_norm": 8.0},
        evaluation={"every": 0, "initial": False, "last": False},
        privacy={"level": "silo", "noise_multiplier": 1.0, "nominal_silos": 3, "max_noise_to_signal": 1e6},
    )
    assert noised.plan.noise_at == "silos"
    assert ranges_of(noised).tensors == (TensorRange(SIZE, 8.0),)


@settings(max_examples=300, deadline=None)
@given(
    cap=st.one_of(st.just(100.0), st.floats(2.0**-200, 2.0**200), st.just(math.nextafter(100.0, 0))),
    bound=st.one_of(st.just(1.0), st.floats(2.0**-200, 2.0**200), st.just(math.nextafter(1.0, 2))),
    sizes=st.one_of(st.just([SIZE]), st.lists(st.integers(1, SIZE), min_size=1, max_size=4)),
    closing=st.booleans(),
)
def test_no_other_ranges_are_taken_whatever_a_coordinator_offers(
    cap: float, bound: float, sizes: list[int], closing: bool
) -> None:
    offered = Ranges.of(sizes=sizes, largest_delta=[bound] * len(sizes), largest_weight=cap)
    if offered == (CLOSING_RANGES if closing else ranges_of(bundle())):
        check_ranges(bundle(), offered, closing=closing)
    else:
        refused(offered, closing=closing)


def test_a_closing_round_has_its_own_and_no_other_round_has_those() -> None:
    check_ranges(bundle(), CLOSING_RANGES, closing=True)
    refused(CLOSING_RANGES, closing=False)
    refused(ranges_of(bundle()), closing=True)
    refused(replace(CLOSING_RANGES, weight_cap=2.0), closing=True)


def test_why_a_cap_must_not_move_four_sums_under_four_caps_tell_every_weight_and_every_delta() -> None:
    """What the rule is for: the sums that a coordinator got before there was one. Deltas and weights are the same in
    each."""
    weights = (11.0, 13.0, 14.0, 15.0)
    deltas = [np.random.default_rng(silo).uniform(-0.5, 0.5, SIZE).astype("<f4") for silo in range(4)]
    sums, totals, caps = [], [], (100.0, 12.0, 13.5, 14.5)
    for cap in caps:
        ranges = replace(ranges_of(bundle()), weight_cap=cap)
        point = FixedPoint.of(cohort=4, ranges=ranges)
        words = np.zeros(point.words, dtype="<u4")
        for silo, (delta, weight) in enumerate(zip(deltas, weights, strict=True)):
            rounding = KeyStream(Secret(entropy("rounding", cap, silo)))
            words += encoded(point, rounding, delta, weight)
        out = np.zeros(SIZE)
        decode(point, words[:-EXTRA_WORDS], 0, out)
        sums.append(out)
        totals.append(decode_tail(point, words[-EXTRA_WORDS:]).weight_sum)
    first = totals[1] - 3 * 12.0
    second = totals[2] - 2 * 13.5 - first
    third = totals[3] - 14.5 - first - second
    found = (first, second, third, totals[0] - first - second - third)
    assert found == pytest.approx(weights, abs=1e-4)
    shares = np.array([[min(weight, cap) for weight in found] for cap in caps])
    assert np.abs(np.linalg.solve(shares, np.array(sums)) - np.array(deltas)).max() < 1e-4
