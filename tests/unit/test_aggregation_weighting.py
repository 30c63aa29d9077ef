"""Weights, caps and shares: hand-worked numbers first, then what must hold for every cohort."""

import itertools
import math
import pkgutil
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica.documentation.settings_fields import template_comments
from lorica_coordinator.aggregation.weighting import Cap, CohortWeights, SiloSummary, WeightCaps, weigh
from lorica_coordinator.plans.plan_text import plan_template
from lorica_security.errors import ConfigurationError, Conflict, Fault, MalformedMessage, StateError
from lorica_security.identifiers import silo_name
from silo_wire import weightings as weightings_room
from silo_wire.weightings.equal import EQUAL
from silo_wire.weightings.lorar import LORAR
from silo_wire.weightings.loss_reduction import LOSS_REDUCTION
from silo_wire.weightings.named import WEIGHTINGS, weighting_named
from silo_wire.weightings.size import SIZE
from silo_wire.weightings.sqrt_size import SQRT_SIZE
from silo_wire.weightings.weighting import Weighting


def summary(name: str, *, examples: int = 100, loss_reduction: float = 1.0, delta_norm: float = 1.0) -> SiloSummary:
    return SiloSummary(
        silo=silo_name(name), examples=examples, loss_reduction=loss_reduction, optimizer_steps=1, delta_norm=delta_norm
    )


BANK = summary("bank", examples=100, loss_reduction=2.0)
CLINIC = summary("clinic", examples=300, loss_reduction=0.5)
HOSPITAL = summary("hospital", examples=600, loss_reduction=0.25)


def shares(cohort: CohortWeights) -> list[float]:
    return [silo.share for silo in cohort.silos]


@pytest.mark.parametrize(
    ("weighting", "raw_weights", "total"),
    [
        (LORAR, [200.0, 150.0, 150.0], 500.0),
        (SIZE, [100.0, 300.0, 600.0], 1000.0),
        (SQRT_SIZE, [10.0, math.sqrt(300.0), math.sqrt(600.0)], 10.0 + math.sqrt(300.0) + math.sqrt(600.0)),
        (LOSS_REDUCTION, [2.0, 0.5, 0.25], 2.75),
        (EQUAL, [1.0, 1.0, 1.0], 3.0),
    ],
)
def test_each_weighting_by_hand(weighting: Weighting, raw_weights: list[float], total: float) -> None:
    cohort = weigh([HOSPITAL, BANK, CLINIC], weighting=weighting)
    assert [silo.silo for silo in cohort.silos] == ["bank", "clinic", "hospital"]
    assert [silo.raw_weight for silo in cohort.silos] == raw_weights
    assert [silo.weight for silo in cohort.silos] == raw_weights
    assert shares(cohort) == pytest.approx([weight / total for weight in raw_weights], rel=1e-15)
    assert cohort.total == total
    assert not cohort.fallback
    assert all(silo.delta_scale == 1.0 and silo.caps == frozenset() for silo in cohort.silos)


def test_a_weighting_is_known_by_its_plan_name() -> None:
    names = [weighting.name for weighting in WEIGHTINGS]
    assert names == ["lorar", "size", "sqrt_size", "loss_reduction", "equal", "fednova", "q_fedavg"]
    assert [weighting_named(name, fairness=1.0) for name in names] == list(WEIGHTINGS)


def test_a_new_plan_names_every_weighting_with_its_meaning() -> None:
    comment = template_comments(plan_template())["aggregation.weighting"]
    assert [f'"{weighting.name}" ({weighting.meaning})' in comment for weighting in WEIGHTINGS] == [True] * len(
        WEIGHTINGS
    )


def test_every_file_of_the_room_is_a_weighting_that_a_plan_can_name() -> None:
    room = {module.name for module in pkgutil.iter_modules(weightings_room.__path__)}
    assert room - {"named", "weighting"} == {weighting.name for weighting in WEIGHTINGS}


@pytest.mark.parametrize("weighting", [LORAR, LOSS_REDUCTION])
def test_a_zero_sum_falls_back_to_examples_and_says_so(weighting: Weighting) -> None:
    cohort = weigh(
        [summary("a", examples=30, loss_reduction=0.0), summary("b", examples=10, loss_reduction=0.0)],
        weighting=weighting,
    )
    assert cohort.fallback
    assert [silo.raw_weight for silo in cohort.silos] == [0.0, 0.0]
    assert [silo.weight for silo in cohort.silos] == [30.0, 10.0]
    assert shares(cohort) == [0.75, 0.25]
    assert cohort.total == 40.0


def test_one_positive_weight_is_no_fallback() -> None:
    cohort = weigh([summary("a", loss_reduction=0.0), summary("b", loss_reduction=1e-9)], weighting=LORAR)
    assert not cohort.fallback
    assert shares(cohort) == [0.0, 1.0]


def test_max_weight_cuts_a_weight_by_hand() -> None:
    cohort = weigh([BANK, CLINIC, HOSPITAL], weighting=SIZE, caps=WeightCaps(max_weight=300.0))
    assert [silo.weight for silo in cohort.silos] == [100.0, 300.0, 300.0]
    assert [silo.raw_weight for silo in cohort.silos] == [100.0, 300.0, 600.0]
    assert shares(cohort) == pytest.approx([1 / 7, 3 / 7, 3 / 7], rel=1e-15)
    assert [silo.caps for silo in cohort.silos] == [frozenset(), frozenset(), {Cap.MAX_WEIGHT}]
    assert cohort.total == 700.0


def test_max_weight_share_hands_the_excess_out_by_weight() -> None:
    # 100, 300, 600 with at most 0.5 each: 0.1 of excess goes 1 : 3 to the other two.
    cohort = weigh([BANK, CLINIC, HOSPITAL], weighting=SIZE, caps=WeightCaps(max_weight_share=0.5))
    assert shares(cohort) == pytest.approx([0.125, 0.375, 0.5], rel=1e-15)
    assert [silo.caps for silo in cohort.silos] == [frozenset(), frozenset(), {Cap.MAX_WEIGHT_SHARE}]


def test_max_weight_share_fills_until_every_share_holds() -> None:
    # Shares 0.1, 0.3, 0.6 under 0.36: the excess of the third pushes the second to 0.48, which is cut in turn.
    cohort = weigh([BANK, CLINIC, HOSPITAL], weighting=SIZE, caps=WeightCaps(max_weight_share=0.36))
    assert shares(cohort) == pytest.approx([0.28, 0.36, 0.36], rel=1e-14)
    assert [bool(silo.caps) for silo in cohort.silos] == [False, True, True]


def test_excess_among_silos_that_weigh_nothing_goes_by_examples_and_says_so() -> None:
    cohort = weigh(
        [
            summary("a", examples=10, loss_reduction=1.0),
            summary("b", examples=30, loss_reduction=0.0),
            summary("c", examples=10, loss_reduction=0.0),
        ],
        weighting=LORAR,
        caps=WeightCaps(max_weight_share=0.6),
    )
    assert shares(cohort) == pytest.approx([0.6, 0.3, 0.1], rel=1e-14)
    assert cohort.fallback


def test_max_delta_norm_scales_the_delta_and_leaves_the_share() -> None:
    cohort = weigh(
        [summary("a", delta_norm=4.0), summary("b", delta_norm=0.5), summary("c", delta_norm=0.0)],
        weighting=EQUAL,
        caps=WeightCaps(max_delta_norm=1.0),
    )
    assert [silo.delta_scale for silo in cohort.silos] == [0.25, 1.0, 1.0]
    assert [silo.caps for silo in cohort.silos] == [{Cap.MAX_DELTA_NORM}, frozenset(), frozenset()]
    assert cohort.silos[0].factor == pytest.approx(1 / 12, rel=1e-15)


@pytest.mark.parametrize("silos", [1, 2, 3, 7, 10, 49, 98, 103])
def test_a_share_cap_of_one_over_n_is_feasible_for_n_silos(silos: int) -> None:
    cohort = weigh(
        [summary(f"s{i}", examples=1 + i * i) for i in range(silos)],
        weighting=SIZE,
        caps=WeightCaps(max_weight_share=1 / silos),
    )
    assert shares(cohort) == pytest.approx([1 / silos] * silos, rel=1e-8)
    assert math.fsum(shares(cohort)) == pytest.approx(1.0, abs=1e-12)


def test_a_share_cap_that_cannot_hold_is_named_with_its_remedy() -> None:
    with pytest.raises(
        ConfigurationError, match=r"max_weight_share 0\.3 cannot hold for 3 silos.*at least 0\.333333.*4"
    ):
        weigh([BANK, CLINIC, HOSPITAL], weighting=LORAR, caps=WeightCaps(max_weight_share=0.3))
    WeightCaps(max_weight_share=0.3).require_feasible(4)


def test_a_silo_that_claims_a_huge_loss_reduction_stays_under_every_cap() -> None:
    liar = summary("liar", examples=2**63 - 1, loss_reduction=1e9, delta_norm=1e30)
    cohort = weigh(
        [BANK, CLINIC, HOSPITAL, liar],
        weighting=LORAR,
        caps=WeightCaps(max_weight=500.0, max_weight_share=0.4, max_delta_norm=1.0),
    )
    lied = cohort.silos[3]
    assert lied.caps == {Cap.MAX_WEIGHT, Cap.MAX_WEIGHT_SHARE, Cap.MAX_DELTA_NORM}
    assert lied.weight == 500.0
    assert lied.share == 0.4
    assert lied.delta_scale * 1e30 == pytest.approx(1.0)


@pytest.mark.parametrize("loss_reduction", [-1e-9, -math.inf, math.inf, math.nan, 1.1e9])
def test_a_loss_reduction_outside_its_range_is_refused_by_silo(loss_reduction: float) -> None:
    with pytest.raises(MalformedMessage, match="silo bank reports loss reduction") as refused:
        summary("bank", loss_reduction=loss_reduction)
    assert refused.value.fault is Fault.PEER


@pytest.mark.parametrize("examples", [0, -1, 2**63])
def test_an_example_count_outside_its_range_is_refused_by_silo(examples: int) -> None:
    with pytest.raises(MalformedMessage, match=f"silo bank reports {examples} examples"):
        summary("bank", examples=examples)


@pytest.mark.parametrize("delta_norm", [-1.0, math.inf, math.nan])
def test_a_norm_outside_its_range_is_refused_by_silo(delta_norm: float) -> None:
    with pytest.raises(MalformedMessage, match="silo bank has norm"):
        summary("bank", delta_norm=delta_norm)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("cap", ["max_weight", "max_weight_share", "max_delta_norm"])
def test_a_cap_outside_its_range_is_refused_by_key(cap: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"^{cap} is"):
        WeightCaps(**{cap: value})


def test_a_share_cap_above_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"max_weight_share is 1\.5"):
        WeightCaps(max_weight_share=1.5)


def test_two_updates_of_one_silo_are_refused() -> None:
    with pytest.raises(Conflict, match="silo bank has two updates"):
        weigh([BANK, CLINIC, BANK], weighting=EQUAL)


def test_an_empty_cohort_is_refused() -> None:
    with pytest.raises(StateError, match="no silo has an update"):
        weigh([], weighting=EQUAL)


@st.composite
def cohorts(draw: st.DrawFn) -> list[SiloSummary]:
    count = draw(st.integers(1, 9))
    reductions = st.one_of(st.just(0.0), st.floats(0.0, 1e9))
    return [
        summary(
            f"silo-{i}",
            examples=draw(st.integers(1, 2**63 - 1)),
            loss_reduction=draw(reductions),
            delta_norm=draw(st.floats(0.0, 1e30)),
        )
        for i in range(count)
    ]


@st.composite
def cohorts_with_caps(draw: st.DrawFn) -> tuple[list[SiloSummary], WeightCaps]:
    cohort = draw(cohorts())
    maybe = st.none() | st.floats(1e-6, 1e12)
    share = draw(st.none() | st.floats(1.0 / len(cohort), 1.0))
    return cohort, WeightCaps(max_weight=draw(maybe), max_weight_share=share, max_delta_norm=draw(maybe))


weightings = st.sampled_from(WEIGHTINGS)


@settings(deadline=None)
@given(cohorts_with_caps(), weightings)
def test_shares_sum_to_one_and_caps_hold(case: tuple[list[SiloSummary], WeightCaps], weighting: Weighting) -> None:
    summaries, caps = case
    cohort = weigh(summaries, weighting=weighting, caps=caps)
    assert math.fsum(shares(cohort)) == pytest.approx(1.0, abs=1e-12)
    assert cohort.total > 0.0
    for silo, reported in zip(cohort.silos, sorted(summaries, key=lambda s: s.silo), strict=True):
        assert silo.share >= 0.0
        assert 0.0 < silo.delta_scale <= 1.0
        if caps.max_weight is not None:
            assert silo.weight <= caps.max_weight
        if caps.max_weight_share is not None:
            assert silo.share <= caps.max_weight_share * (1.0 + 1e-8)
        if caps.max_delta_norm is not None:
            assert reported.delta_norm * silo.delta_scale <= caps.max_delta_norm * (1.0 + 1e-12)
        assert (Cap.MAX_DELTA_NORM in silo.caps) == (silo.delta_scale < 1.0)


@settings(deadline=None)
@given(cohorts_with_caps(), weightings, st.randoms(use_true_random=False))
def test_arrival_order_changes_nothing(
    case: tuple[list[SiloSummary], WeightCaps], weighting: Weighting, shuffler: random.Random
) -> None:
    summaries, caps = case
    shuffled = list(summaries)
    shuffler.shuffle(shuffled)
    assert weigh(shuffled, weighting=weighting, caps=caps) == weigh(summaries, weighting=weighting, caps=caps)


@settings(deadline=None)
@given(cohorts(), weightings)
def test_shares_are_the_exact_quotients_within_rounding(summaries: list[SiloSummary], weighting: Weighting) -> None:
    cohort = weigh(summaries, weighting=weighting)
    weights = [Fraction(silo.weight) for silo in cohort.silos]
    for share, weight in zip(shares(cohort), weights, strict=True):
        assert share == pytest.approx(float(weight / sum(weights)), rel=1e-14, abs=1e-300)


@settings(deadline=None)
@given(cohorts(), weightings)
def test_fallback_is_told_exactly_when_all_raw_weights_are_zero(
    summaries: list[SiloSummary], weighting: Weighting
) -> None:
    cohort = weigh(summaries, weighting=weighting)
    assert cohort.fallback == all(silo.raw_weight == 0.0 for silo in cohort.silos)


@settings(deadline=None)
@given(cohorts_with_caps())
def test_shares_below_the_share_cap_keep_their_proportions(case: tuple[list[SiloSummary], WeightCaps]) -> None:
    summaries, caps = case
    cohort = weigh(summaries, weighting=SIZE, caps=caps)
    below = [silo for silo in cohort.silos if Cap.MAX_WEIGHT_SHARE not in silo.caps and silo.share > 1e-9]
    for one, other in itertools.combinations(below, 2):
        assert one.share * other.weight == pytest.approx(other.share * one.weight, rel=1e-9)
