"""The ranges of a roster, as a silo holds them to what it knows: what honest sums lead to is taken, whatever they are; what a
coordinator makes up is refused by name.
"""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from security.errors import PolicyRefusal
from security.secure_aggregation.attempt import Attempt
from security.secure_aggregation.fixed_point import FixedPoint, Ranges, TensorRange
from security.secure_aggregation.range_rule import RangeRule, SeenRanges
from security.secure_aggregation.silo_memory import SiloMemory
from tests.support.secagg_federation import attempt

FIRST = Ranges.conservative(sizes=[4, 7], largest_delta=[1.0, 1.0], largest_weight=100.0)
RULE = RangeRule(first=FIRST, weight_ratio=10.0)


def with_bound(ranges: Ranges, bound: float) -> Ranges:
    """Of the last tensor."""
    return replace(ranges, tensors=(*ranges.tensors[:-1], TensorRange(ranges.tensors[-1].elements, bound)))


def refused(offered: Ranges, round_number: int, seen: SeenRanges | None = None, rule: RangeRule = RULE) -> str:
    with pytest.raises(PolicyRefusal) as caught:
        rule.check(offered, round_number=round_number, seen=seen)
    assert caught.value.rule == "ranges"
    assert "this silo masks nothing by them; have the operator make a new plan" in str(caught.value)
    return str(caught.value)


# --- honest ranges


@st.composite
def honest_rounds(draw: st.DrawFn) -> tuple[RangeRule, list[Ranges]]:
    """The ranges of rounds 1, 2, ...: sums of any peaks and any weights that silos say, also false ones, of any cohorts."""
    ratio = draw(st.floats(1.0, 30.0))
    bounds = st.floats(1e-9, 1e9)
    first = Ranges.conservative(sizes=[4, 7], largest_delta=[draw(bounds), draw(bounds)], largest_weight=draw(bounds))
    rounds = [first]
    for _ in range(draw(st.integers(0, 40))):
        cohort = draw(st.integers(3, 200))
        levels = FixedPoint.of(cohort=cohort, ranges=first).levels
        peak = st.one_of(st.just(0), st.just(1), st.integers(0, cohort * (levels + 1)))
        rounds.append(
            rounds[-1].after(
                peaks=[draw(peak), draw(peak)],
                levels=levels,
                mean_weight=draw(st.one_of(st.just(0.0), st.floats(0.0, 1e30))),
                weight_ratio=ratio,
            )
        )
    return RangeRule(first=first, weight_ratio=ratio), rounds


@settings(max_examples=150, deadline=None)
@given(honest=honest_rounds(), data=st.data())
def test_whatever_sums_lead_to_is_taken_whichever_rounds_a_silo_saw(
    honest: tuple[RangeRule, list[Ranges]], data: st.DataObject
) -> None:
    rule, rounds = honest
    seen = None
    for number, ranges in enumerate(rounds, 1):
        if data.draw(st.booleans()):
            rule.check(ranges, round_number=number, seen=seen)
            seen = SeenRanges(round=number, ranges=ranges)
            rule.check(ranges, round_number=number, seen=seen)  # a further attempt


# --- ranges that no sum led to


@pytest.mark.parametrize("value", [2.0**-200, 2.0**100, 2.0**-61, 2.0**61])
def test_absurd_ranges_are_refused_however_many_rounds_went_by(value: float) -> None:
    cap = replace(FIRST, weight_cap=value)
    for round_number in (2, 1000, 1_000_000):
        assert f"cap on weights is {value:.3g}" in refused(cap, round_number)
        assert f"range of tensor 1 is {value:.3g}" in refused(with_bound(FIRST, value), round_number)


def test_the_first_round_has_the_plans_ranges_to_the_last_bit() -> None:
    RULE.check(FIRST, round_number=1, seen=None)
    for other in (with_bound(FIRST, math.nextafter(1.0, 2)), replace(FIRST, weight_cap=math.nextafter(100.0, 0))):
        assert "round 1 has other ranges than the plan's first round" in refused(other, 1)


def test_no_attempt_of_a_round_has_other_ranges_than_the_first() -> None:
    seen = SeenRanges(round=4, ranges=with_bound(FIRST, 0.5))
    RULE.check(seen.ranges, round_number=4, seen=seen)
    assert "round 4 has other ranges than round 4" in refused(FIRST, 4, seen)


@pytest.mark.parametrize("moves", [1, 2, 5])
@pytest.mark.parametrize("seen_at", [None, 3])
def test_a_cap_moves_by_the_ratio_a_round_and_not_further(moves: int, seen_at: int | None) -> None:
    seen = None if seen_at is None else SeenRanges(round=seen_at, ranges=FIRST)
    number = (seen_at or 1) + moves
    for most in (100.0 * 10**moves, 100.0 / 10**moves):
        scaled = [TensorRange(it.elements, it.bound * 100.0 / most) for it in FIRST.tensors]  # w * delta as before
        RULE.check(Ranges(weight_cap=most, tensors=tuple(scaled)), round_number=number, seen=seen)
        further = most * (1.001 if most > 100 else 0.999)
        assert "cap on weights" in refused(Ranges(weight_cap=further, tensors=tuple(scaled)), number, seen)


@pytest.mark.parametrize("moves", [1, 2, 3])
def test_a_range_grows_by_its_headroom_a_round_and_not_further(moves: int) -> None:
    RULE.check(with_bound(FIRST, 32.0**moves), round_number=1 + moves, seen=None)
    assert "range of tensor 1" in refused(with_bound(FIRST, 32.0**moves * 1.001), 1 + moves)


def test_a_range_shrinks_to_the_headroom_of_one_level_a_round_and_not_further() -> None:
    least = 32 / (FixedPoint.of(cohort=3, ranges=FIRST).levels)
    RULE.check(with_bound(FIRST, least), round_number=2, seen=None)
    assert "range of tensor 1" in refused(with_bound(FIRST, least * 0.999), 2)
    RULE.check(with_bound(FIRST, least**2), round_number=3, seen=None)


def test_what_was_seen_counts_and_not_the_plan() -> None:
    """In round 9 the plan alone would allow nearly anything."""
    seen = SeenRanges(round=8, ranges=FIRST)
    far = with_bound(FIRST, 2.0**20)
    RULE.check(far, round_number=9, seen=None)
    refused(far, 9, seen)


# --- what is remembered


def at(round_number: int, number: int = 1) -> Attempt:
    return replace(attempt(), round=round_number, number=number)


def test_ranges_stay_remembered_through_rounds_that_came_to_no_roster() -> None:
    plan = at(1).plan
    memory = SiloMemory().joined(at(1))
    assert memory.ranges_of(plan) is None
    memory = memory.dealt(at(1), FIRST).answered(at(1)).joined(at(2)).joined(at(3))
    assert memory.ranges_of(plan) == SeenRanges(round=1, ranges=FIRST)
    memory = memory.dealt(at(3), with_bound(FIRST, 2.0))
    assert memory.ranges_of(plan) == SeenRanges(round=3, ranges=with_bound(FIRST, 2.0))
    (held,) = memory.plans
    assert (held.round, held.number, held.answered) == (3, 1, False)
    assert memory.ranges_of(bytes(32)) is None
