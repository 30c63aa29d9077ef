"""Scores in a masked sum: they add up exactly whatever silos tell, and who tells nothing adds zeros."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import MalformedMessage
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.fixed_point import (
    EXTRA_WORDS,
    Encoder,
    FixedPoint,
    Ranges,
    Workspace,
    decode_tail,
)
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, Words
from lorica_security.secure_aggregation.masked_vectors.scores import LOSS_UNITS, NO_SCORES, SCORE_WORDS, Scores
from tests.support.secagg_federation import Federation, entropy, scores_of

RANGES = Ranges.of(sizes=[1], largest_delta=[1.0], largest_weight=1.0)


def tail_of(fixed_point: FixedPoint, told: Scores) -> Words:
    rounding = KeyStream(Secret(entropy("rounding")))
    encoder = Encoder(fixed_point=fixed_point, weight=0.5, rounding=rounding, scores=told)
    return encoder.encode_tail(0, Workspace())


@st.composite
def any_scores(draw: st.DrawFn, most: int = 1 << 40) -> Scores:
    questions = draw(st.integers(0, most))
    executed = draw(st.integers(0, questions))
    return Scores(
        questions=questions,
        exact_matches=draw(st.integers(0, questions)),
        executed=executed,
        execution_matches=draw(st.integers(0, executed)),
        loss=draw(st.integers(0, most)) if questions else 0,
    )


@given(st.lists(any_scores(), min_size=1, max_size=33))
def test_no_scores_overflow_the_sum_of_a_cohort(told: list[Scores]) -> None:
    fixed_point = FixedPoint.of(cohort=len(told), ranges=RANGES)
    total = np.sum([tail_of(fixed_point, one) for one in told], axis=0, dtype=np.uint32)
    capped = [one.capped(fixed_point.saturation_limit) for one in told]
    found = decode_tail(fixed_point, total).scores
    assert found is not None
    assert found.words == tuple(map(sum, zip(*(one.words for one in capped), strict=True)))


@given(st.lists(any_scores(most=1 << 20), min_size=1, max_size=8))
def test_scores_of_an_ordinary_size_are_summed_as_they_are(told: list[Scores]) -> None:
    fixed_point = FixedPoint.of(cohort=len(told), ranges=RANGES)
    total = np.sum([tail_of(fixed_point, one) for one in told], axis=0, dtype=np.uint32)
    found = decode_tail(fixed_point, total).scores
    assert found is not None
    assert found.questions == sum(one.questions for one in told)
    assert found.loss == sum(one.loss for one in told)


def test_the_tail_is_weight_cut_questions_right_executed_right_loss() -> None:
    fixed_point = FixedPoint.of(cohort=3, ranges=RANGES)
    told = Scores(questions=50, exact_matches=40, executed=30, execution_matches=20, loss=10)
    assert tail_of(fixed_point, told)[1:].tolist() == [0, 50, 40, 30, 20, 10]
    assert EXTRA_WORDS == 2 + SCORE_WORDS == 7


def test_who_tells_nothing_adds_zeros() -> None:
    fixed_point = FixedPoint.of(cohort=3, ranges=RANGES)
    assert tail_of(fixed_point, NO_SCORES)[2:].tolist() == [0] * SCORE_WORDS


def test_what_one_silo_told_stands_nowhere_but_in_the_sum() -> None:
    """Its words leave under masks like those of its delta, and are in no message."""
    federation = Federation(4).run()
    for name, silo in federation.silos.items():
        assert silo.masked is not None
        told = silo.masked[-SCORE_WORDS:].tolist()
        assert all(masked != own for masked, own in zip(told, scores_of(name).words, strict=True))
    sums = decode_tail(federation.unmask.fixed_point, federation.sum()[-EXTRA_WORDS:]).scores  # type: ignore[union-attr]
    assert sums is not None
    assert sums.questions == sum(scores_of(name).questions for name in federation.names)


@pytest.mark.parametrize(
    "changes",
    [
        {"exact_matches": 11},
        {"executed": 11},
        {"execution_matches": 6},
        {"questions": -1},
        {"questions": 0, "exact_matches": 0, "executed": 0, "execution_matches": 0},
    ],
)
def test_counts_that_contradict_each_other_are_no_scores(changes: dict[str, Any]) -> None:
    sound = Scores(questions=10, exact_matches=3, executed=5, execution_matches=2, loss=7)
    with pytest.raises(MalformedMessage):
        replace(sound, **changes)
    words = {**{name: getattr(sound, name) for name in sound.__dataclass_fields__}, **changes}
    if min(words.values()) >= 0:  # a liar's words in a sum
        tail = np.array([0, 0, *words.values()], dtype="<u4")
        assert decode_tail(FixedPoint.of(cohort=3, ranges=RANGES), tail).scores is None


def test_the_loss_travels_in_whole_units_over_all_questions() -> None:
    told = Scores.told(questions=8, exact_matches=0, executed=0, execution_matches=0, loss_per_token=1.3)
    assert told.loss_per_token == pytest.approx(1.3, abs=0.5 / LOSS_UNITS / 8)
    assert math.isnan(NO_SCORES.loss_per_token)
    with pytest.raises(MalformedMessage):
        Scores.told(questions=8, exact_matches=0, executed=0, execution_matches=0, loss_per_token=math.inf)
