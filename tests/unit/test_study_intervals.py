"""Paired bootstrap intervals: hand-made cases first, then what must hold for every pair of rows."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica.experiments.reports.intervals import Difference, paired, right_of


def found(*pairs: tuple[dict[str, str], dict[str, str]], average: str = "macro") -> Difference:
    difference = paired(pairs, average=average)  # type: ignore[arg-type]
    assert difference is not None
    return difference


def test_each_average_by_hand() -> None:
    """a: 1 of 2 more, b: 1 of 8 fewer."""
    one, other = {"a": "11", "b": "00000000"}, {"a": "10", "b": "10000000"}
    assert found((one, other)).mean == pytest.approx(100 * (1 / 2 - 1 / 8) / 2)
    assert found((one, other), average="micro").mean == pytest.approx(0.0)


def test_one_seed_of_one_silo_has_the_interval_of_the_normal_distribution() -> None:
    """400 questions, of which 100 were gained: 25 +- 1.96 x sqrt(0.25 x 0.75 / 400) = 4.24 points."""
    gained = found(({"a": "1" * 100 + "0" * 300}, {"a": "0" * 400}))
    assert (gained.least, gained.most) == (pytest.approx(25 - 4.24, abs=0.5), pytest.approx(25 + 4.24, abs=0.5))


def test_seeds_that_answer_alike_say_no_more_than_one_of_them() -> None:
    """The same questions are hard for each seed: four copies of a run are no four times as many questions."""
    pair = {"a": "1" * 100 + "0" * 300}, {"a": "0" * 400}
    one, four = found(pair), found(*[pair] * 4)
    assert four.most - four.least == pytest.approx(one.most - one.least, abs=0.6)


def test_seeds_that_differ_are_drawn_as_well() -> None:
    """Two seeds, all questions right in one and none in the other: draws have 0, 50 or 100 points."""
    assert found(({"a": "1" * 50}, {"a": "0" * 50}), ({"a": "0" * 50}, {"a": "0" * 50})) == Difference(50.0, 0.0, 100.0)


def test_only_silos_that_all_runs_have_count_and_without_one_there_is_nothing_to_say() -> None:
    assert found(({"a": "1", "b": "0"}, {"a": "0", "c": "1"})).mean == 100.0
    assert paired([]) is None
    assert paired([({"a": "1"}, {"b": "1"})]) is None
    assert right_of({"a": {"right": "10", "exact_match": 0.5}, "b": {"exact_match": 0.5}}) == {"a": "10"}


def test_answers_to_different_questions_are_no_pair() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        paired([({"a": "10"}, {"a": "1"})])


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[dict[str, str], dict[str, str]]]:
    sizes = draw(st.dictionaries(st.sampled_from("abc"), st.integers(1, 12), min_size=1))
    answers = st.fixed_dictionaries({silo: st.text("01", min_size=size, max_size=size) for silo, size in sizes.items()})
    return draw(st.lists(st.tuples(answers, answers), min_size=1, max_size=4))


@given(rows(), st.sampled_from(["macro", "micro"]))
@settings(max_examples=60, deadline=None)
def test_the_interval_turns_around_with_the_rows_and_none_is_wider_than_all_there_is(
    pairs: list[tuple[dict[str, str], dict[str, str]]], average: str
) -> None:
    there = found(*pairs, average=average)
    back = found(*[(other, one) for one, other in pairs], average=average)
    for value, mirrored in ((there.mean, back.mean), (there.least, back.most), (there.most, back.least)):
        assert value == pytest.approx(-mirrored, abs=1e-9)
    assert -100.0 - 1e-9 <= there.least <= there.most <= 100.0 + 1e-9
    silos = sorted(pairs[0][0])
    by_silo = {silo: [one[silo].count("1") - other[silo].count("1") for one, other in pairs] for silo in silos}
    asked = {silo: len(pairs[0][0][silo]) for silo in silos}
    of_all = {
        "macro": sum(math.fsum(by_silo[silo]) / asked[silo] for silo in silos) / len(silos),
        "micro": sum(math.fsum(by_silo[silo]) for silo in silos) / sum(asked.values()),
    }
    assert there.mean == pytest.approx(100 * of_all[average] / len(pairs), abs=1e-9)
    assert str(found(*[(one, one) for one, _ in pairs], average=average)) == "+0.0 [+0.0, +0.0]"
