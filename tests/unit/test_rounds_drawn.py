"""Client sampling: which silos are in a round is a public draw, the same after a restart, another for each attempt."""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica_coordinator.rounds.cohorts.drawn import drawn, place
from lorica_coordinator.rounds.cohorts.whole_groups import wanting
from lorica_coordinator.rounds.events import DeadlinePassed, Resumed
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.states import Collecting, Course, Evaluating, Idle
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.groups.release_groups import Partition
from silo_wire.canonical import digest_of
from tests.support.rounds import T0, after, course, enrolled, ready, started, terms

SILOS = tuple(SiloName(f"silo-{letter}") for letter in "abcdefgh")


def eight(size: int, **changes: object) -> Course:
    return course(terms=terms(cohort_size=size, **changes), population=frozenset(SILOS), ready=frozenset(SILOS))


def in_groups(size: int, groups: list[tuple[SiloName, ...]]) -> Course:
    at = eight(size, secure_aggregation=True, min_silos=3, min_survivors=3)
    return replace(at, groups=Partition.of(groups))


def test_the_places_are_those_that_anybody_computes() -> None:
    """By hand: BLAKE3 of canonical JSON."""
    text = f'["lorica/v1/cohort","{terms().plan}",3,2,["silo-a"]]'
    assert place(terms().plan, 3, 2, SILOS[:1]) == digest_of(text.encode())
    first = sorted(SILOS, key=lambda silo: digest_of(f'["lorica/v1/cohort","{terms().plan}",1,1,["{silo}"]]'.encode()))
    assert drawn(eight(3), 1, 1, frozenset(SILOS)) == set(first[:3])


@given(st.integers(0, 10), st.sets(st.sampled_from(SILOS)), st.integers(1, 2))
def test_so_many_are_drawn_of_those_who_are_there_and_the_absent_give_their_place_to_the_next(
    size: int, there: set[SiloName], round_number: int
) -> None:
    chosen = drawn(eight(size), round_number, 1, frozenset(there))
    assert chosen <= there
    assert len(chosen) == (min(size, len(there)) if size else len(there))
    for absent in chosen:
        others = drawn(eight(size), round_number, 1, frozenset(there - {absent}))
        assert chosen - {absent} <= others


def test_every_silo_is_drawn_as_often_as_any_other_and_every_pair() -> None:
    rounds = 2000
    at = eight(3, rounds=rounds)
    cohorts = [drawn(at, number, 1, frozenset(SILOS)) for number in range(1, rounds + 1)]
    singles = Counter(silo for cohort in cohorts for silo in cohort)
    pairs = Counter(pair for cohort in cohorts for pair in combinations(sorted(cohort), 2))
    for counts, chance in ((singles, 3 / 8), (pairs, 3 / 28)):
        spread = sqrt(rounds * chance * (1 - chance))
        assert all(abs(count - rounds * chance) < 5 * spread for count in counts.values())
    assert len(singles) == 8
    assert len(pairs) == 28


def test_another_plan_draws_otherwise() -> None:
    draws = {drawn(eight(3, plan=digest_of(bytes([number]))), 1, 1, frozenset(SILOS)) for number in range(20)}
    assert len(draws) > 10


def test_a_round_opens_with_those_who_are_drawn_and_evaluations_with_all() -> None:
    state = after(Idle(), *(enrolled(silo) for silo in SILOS), started(cohort_size=3))
    state = after(state, *(ready(silo) for silo in SILOS))
    assert isinstance(state, Collecting)
    assert len(state.cohort) == 3
    first = after(Idle(), *(enrolled(silo) for silo in SILOS), started(cohort_size=3, evaluate_initial=True))
    first = after(first, *(ready(silo) for silo in SILOS))
    assert isinstance(first, Evaluating)
    assert first.cohort == SILOS


def test_a_restart_does_not_draw_anew() -> None:
    state = after(Idle(), *(enrolled(silo) for silo in SILOS), started(cohort_size=3, min_silos=3))
    state = after(state, *(ready(silo) for silo in SILOS))
    assert isinstance(state, Collecting)
    back, _ = step(state, Resumed(now=T0, population=frozenset(SILOS)))
    assert isinstance(back, Collecting)
    assert back.cohort == state.cohort


def test_attack_a_silent_silo_does_not_hold_up_the_round() -> None:
    """It stays connected and ready, and each attempt that it is drawn for ends at its deadline below the quorum."""
    state = after(Idle(), *(enrolled(silo) for silo in SILOS), started(cohort_size=3, min_silos=3))
    state = after(state, *(ready(silo) for silo in SILOS))
    assert isinstance(state, Collecting)
    silent, attempts = state.cohort[0], 0
    while silent in state.cohort:
        attempts += 1
        state = after(state, DeadlinePassed(now=state.deadline, deadline=state.deadline))
        assert isinstance(state, Collecting)
        assert state.attempt == attempts + 1
    assert attempts < 10
    assert state.round == 1


GROUPS = [SILOS[:3], SILOS[3:6], SILOS[6:]]


@given(st.integers(3, 8), st.sets(st.sampled_from(SILOS), min_size=3), st.integers(1, 2))
def test_under_masks_whole_groups_are_drawn(size: int, there: set[SiloName], round_number: int) -> None:
    at = in_groups(size, GROUPS)
    if wanting(at, frozenset(there), round_number) is not None:
        return  # no round opens
    chosen = drawn(at, round_number, 1, frozenset(there))
    assert wanting(at, chosen, round_number) is None
    if chosen != there:
        assert len(chosen) >= size
        assert all(chosen.issuperset(group) or chosen.isdisjoint(group) for group in GROUPS)


def test_under_masks_it_is_not_always_the_same_groups() -> None:
    at = in_groups(3, GROUPS)
    at = replace(at, terms=replace(at.terms, rounds=50))
    cohorts = {drawn(at, number, 1, frozenset(SILOS)) for number in range(1, 51)}
    assert {frozenset(SILOS[:3]), frozenset(SILOS[3:6])} <= cohorts


def test_the_closing_round_of_masks_is_of_all() -> None:
    at = in_groups(3, GROUPS)
    assert drawn(at, at.terms.rounds + 1, 1, frozenset(SILOS)) == frozenset(SILOS)


@pytest.mark.parametrize("size", [0, 8, 9])
def test_all_are_in_it_where_none_is_drawn(size: int) -> None:
    assert drawn(eight(size), 1, 1, frozenset(SILOS)) == frozenset(SILOS)
