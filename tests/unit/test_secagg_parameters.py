"""Parameters: what a cohort may agree on, and what the constructors refuse."""

from dataclasses import replace

import pytest

from lorica_security.errors import MalformedMessage
from lorica_security.secure_aggregation.masked_vectors.fixed_point import FixedPoint, Ranges, TensorRange
from lorica_security.secure_aggregation.parameters import Parameters, default_threshold, least_threshold
from tests.support.secagg_federation import alone, ranges, silo_names, terms


def parameters(cohort: int, threshold: int, *, colluders: int = 0, min_survivors: int = 3) -> Parameters:
    return Parameters(
        cohort=cohort,
        threshold=threshold,
        colluders=colluders,
        min_survivors=min_survivors,
        least_sum=min(cohort, max(threshold, min_survivors)),
        fixed_point=FixedPoint.of(cohort=cohort, ranges=ranges()),
    )


@pytest.mark.parametrize("cohort", range(3, 65))
def test_the_default_threshold_is_allowed_and_outvotes_a_third_of_colluders(cohort: int) -> None:
    threshold = default_threshold(cohort)
    assert least_threshold(cohort) <= threshold <= cohort
    colluders = max(0, min((cohort - 1) // 3, cohort - 2))
    if cohort > 3:
        assert 2 * threshold > cohort + colluders
        parameters(cohort, threshold, colluders=colluders, min_survivors=max(3, colluders + 2))


@pytest.mark.parametrize(
    ("cohort", "threshold", "more", "says"),
    [
        (2, 2, {}, "at least 3"),
        (3, 2, {}, "allowed are 3 to 3"),
        (8, 4, {}, "allowed are 5 to 8"),
        (8, 9, {}, "allowed are 5 to 8"),
        (8, 5, {"colluders": 2}, "twice the threshold must exceed 10"),
        (8, 6, {"colluders": -1}, "colluders"),
        (8, 6, {"min_survivors": 2}, "allowed are 3 to 8"),
        (8, 6, {"colluders": 2, "min_survivors": 3}, "allowed are 4 to 8"),
        (8, 6, {"min_survivors": 9}, "allowed are 3 to 8"),
    ],
)
def test_what_does_not_hold_is_refused(cohort: int, threshold: int, more: dict[str, int], says: str) -> None:
    with pytest.raises(MalformedMessage, match=says):
        parameters(cohort, threshold, **more)


def test_the_fixed_point_is_for_the_same_cohort() -> None:
    with pytest.raises(MalformedMessage, match="fixed point is for 4 silos"):
        Parameters(
            cohort=5,
            threshold=4,
            colluders=0,
            min_survivors=3,
            least_sum=4,
            fixed_point=FixedPoint.of(cohort=4, ranges=ranges()),
        )


def test_a_cohort_too_large_for_words_of_32_bits_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="smaller cohort"):
        FixedPoint.of(cohort=33_000, ranges=ranges())


@pytest.mark.parametrize("cohort", [1, 2, 3, 7, 8, 32, 1000, 32000])
def test_the_finest_safe_encoding_is_safe_and_one_level_more_is_not(cohort: int) -> None:
    finest = FixedPoint.of(cohort=cohort, ranges=ranges())
    assert cohort * (finest.levels + 1) < 2**31
    assert cohort * finest.saturation_limit < 2**32
    one_more = {"cohort": cohort, "ranges": ranges()}
    with pytest.raises(MalformedMessage, match="overflow"):
        FixedPoint(levels=finest.levels + 1, saturation_limit=finest.saturation_limit, **one_more)
    with pytest.raises(MalformedMessage, match="overflow"):
        FixedPoint(levels=finest.levels, saturation_limit=finest.saturation_limit + 1, **one_more)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan"), 1e300, 1])
def test_a_bound_is_a_finite_positive_float(bound: float) -> None:
    with pytest.raises(MalformedMessage, match="bound"):
        TensorRange(3, bound)
    with pytest.raises(MalformedMessage, match="weight cap"):
        Ranges(weight_cap=bound, tensors=(TensorRange(3, 1.0),))


def test_terms_refuse_a_cohort_below_their_own_minimum() -> None:
    with pytest.raises(MalformedMessage, match="at least 6"):
        terms(min_cohort=6).parameters(silo_names(5))
    assert terms(min_cohort=6).parameters(silo_names(6)).threshold == 5
    assert terms(threshold=6).parameters(silo_names(8)).threshold == 6


def test_more_must_sign_where_more_may_collude_than_the_default_threshold_stands() -> None:
    names = silo_names(9)
    assert default_threshold(9) == 7
    made = terms(link=alone(names, colluders=5), colluders=5, min_survivors=7).parameters(names)
    assert made.threshold == 8


@pytest.mark.parametrize(("colluders", "honest"), [(0, 5), (1, 5), (2, 4)])
def test_whoever_looks_at_a_sum_knows_its_own_noise_or_that_of_all_who_work_with_it(
    colluders: int, honest: int
) -> None:
    made = parameters(6, 6, colluders=colluders, min_survivors=max(3, colluders + 2))
    assert (made.least_sum, made.honest) == (6, honest)


def test_every_number_is_in_what_the_roster_digest_covers() -> None:
    base = parameters(8, 6)
    others = [
        parameters(7, 6),
        parameters(8, 7),
        parameters(8, 6, colluders=1),
        parameters(8, 6, min_survivors=4),
        replace(base, least_sum=7),
        Parameters(
            cohort=8,
            threshold=6,
            colluders=0,
            min_survivors=3,
            least_sum=6,
            fixed_point=FixedPoint.of(
                cohort=8, ranges=Ranges(weight_cap=65.0, tensors=base.fixed_point.ranges.tensors)
            ),
        ),
        Parameters(
            cohort=8,
            threshold=6,
            colluders=0,
            min_survivors=3,
            least_sum=6,
            fixed_point=FixedPoint(
                cohort=8,
                levels=base.fixed_point.levels - 1,
                saturation_limit=base.fixed_point.saturation_limit,
                ranges=base.fixed_point.ranges,
            ),
        ),
    ]
    assert len({str(it.parts) for it in [base, *others]}) == len(others) + 1
