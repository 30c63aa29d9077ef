"""Silos without labels train like any other and are never asked for scores."""

from typing import Any

import pytest

from lorica_coordinator.rounds.events import DeadlinePassed, Resumed, SiloLeft, SiloRevoked
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.orders import waiting_for
from lorica_coordinator.rounds.states import Collecting, Evaluating, Finished, Gathering, Idle, Opening, State, Task
from lorica_security.errors import LoricaError
from lorica_security.identifiers import SiloName
from tests.support.rounds import (
    T0,
    A,
    B,
    C,
    after,
    aggregated,
    committed,
    declined,
    enrolled,
    key,
    model_after,
    ready,
    reported,
    started,
)


def opened(*unlabelled: str, **changes: Any) -> State:
    begun = started(without_labels=unlabelled, min_silos=3, **changes)
    return after(Idle(), *map(enrolled, (A, B, C)), begun, *map(ready, (A, B, C)))


def summed(state: State, round_number: int = 1) -> State:
    at = key(round_number)
    return after(state, *(committed(silo, at) for silo in (A, B, C)), aggregated(at, silos=(A, B, C)))


def test_they_train_and_those_with_labels_alone_are_asked_for_scores() -> None:
    state = opened(B, evaluate_every=1)
    assert isinstance(state, Collecting)
    assert state.cohort == (A, B, C)
    state = summed(state)
    assert isinstance(state, Evaluating)
    assert state.cohort == (A, C)
    with pytest.raises(LoricaError):
        step(state, reported(B, model=model_after(1)))


def test_a_model_is_the_best_by_the_scores_of_one_silo() -> None:
    """With min_silos = 3, which counts who trains."""
    state = summed(opened(B, C, evaluate_every=1))
    state = after(state, reported(A, model=model_after(1)))
    assert isinstance(state, Collecting)
    assert (state.round, state.course.best_model) == (2, model_after(1))


def test_without_anybody_who_has_labels_the_next_round_begins_at_once() -> None:
    """Nobody waits for scores that no one will send, before the first round or after one."""
    state = opened("bank-*", C, evaluate_initial=True, evaluate_every=1)
    assert isinstance(state, Collecting)
    state = summed(state)
    assert isinstance(state, Collecting)
    assert state.round == 2
    assert isinstance(summed(state, 2), Finished)


def test_the_first_model_is_scored_by_those_with_labels() -> None:
    state = opened(B, evaluate_initial=True)
    assert isinstance(state, Evaluating)
    assert state.cohort == (A, C)


TURNS = {"labelled_alone": "in_turn", "min_silos": 2, "min_labelled": 1, "rounds": 4}
"""A has labels; B and C have none."""
RESTART = Resumed(now=T0, population=frozenset((A, B, C)), groups=None)


def in_turn(**changes: Any) -> State:
    begun = started(without_labels=("bank-b", "clinic-*"), **{**TURNS, **changes})
    return after(Idle(), *map(enrolled, (A, B, C)), begun, *map(ready, (A, B, C)))


def closed(state: State, round_number: int, *silos: SiloName, attempt: int = 1) -> State:
    at = key(round_number, attempt)
    return after(state, *(committed(silo, at) for silo in silos), aggregated(at, silos=silos))


def test_those_with_labels_and_those_without_train_in_turn() -> None:
    state = in_turn(evaluate_every=0, evaluate_last=False)
    for number, silos in ((1, (A,)), (2, (B, C)), (3, (A,)), (4, (B, C))):
        assert isinstance(state, Collecting)
        assert (state.round, state.cohort) == (number, silos)
        state = closed(state, number, *silos)
    assert isinstance(state, Finished)
    assert state.course.model == model_after(4)


def test_where_nobody_of_its_kind_is_enrolled_a_round_says_so() -> None:
    """Plans that no kind can have rounds of are not started; who has labels may be revoked later."""
    state = after(in_turn(evaluate_every=0), SiloRevoked(now=T0, silo=A))
    assert isinstance(state, Gathering)
    assert waiting_for(state) == (
        "2 silos are enrolled and none of them with labels, of whom this takes 1 at least; `coordinator invite` brings one"
    )


def test_a_round_waits_for_its_own_kind_alone() -> None:
    """For the absent of the other kind nobody waits, and their being there opens nothing."""
    begun = started(without_labels=("bank-b", "clinic-*"), **TURNS, evaluate_every=0, evaluate_last=False)
    state = after(Idle(), *map(enrolled, (A, B, C)), begun, ready(B), ready(C))
    assert isinstance(state, Gathering)
    assert state.deadline is None, "two silos are ready, and none of them is asked"
    assert waiting_for(state).startswith("0 of 1 enrolled silos with labels ready to train, at least 1 are needed")
    state = after(state, SiloLeft(now=T0, silo=C), ready(A))
    assert isinstance(state, Collecting)
    state = closed(state, 1, A)
    assert isinstance(state, Gathering)
    assert state.deadline is None, "one of two that a round of the others needs"
    assert "1 of 2 enrolled silos without labels ready" in waiting_for(state)
    state = after(state, ready(C))
    assert isinstance(state, Collecting)
    assert state.cohort == (B, C)


def test_at_its_deadline_a_round_goes_on_without_the_absent_of_its_kind() -> None:
    state = after(in_turn(min_silos=1, evaluate_every=0, evaluate_last=False), SiloLeft(now=T0, silo=C))
    state = closed(state, 1, A)
    assert isinstance(state, Gathering)
    assert state.deadline is not None
    state = after(state, DeadlinePassed(now=state.deadline, deadline=state.deadline))
    assert isinstance(state, Collecting)
    assert state.cohort == (B,)
    assert state.course.unawaited == {C}, "and of the other kind nobody is given up"


def test_what_those_without_labels_made_is_scored_by_those_with() -> None:
    state = closed(in_turn(), 1, A)
    assert isinstance(state, Evaluating)
    state = after(state, reported(A, key(1), model=model_after(1)))
    state = closed(state, 2, B, C)
    assert isinstance(state, Evaluating)
    assert (state.round, state.cohort, state.course.model) == (2, (A,), model_after(2))
    state = after(state, reported(A, key(2), model=model_after(2)))
    assert isinstance(state, Collecting)
    assert state.round == 3


def test_scores_wait_for_those_with_labels_over_an_absence_and_a_restart() -> None:
    state = closed(in_turn(), 1, A)
    state = after(state, reported(A, key(1), model=model_after(1)))
    at = key(2)
    state = after(state, *(committed(silo, at) for silo in (B, C)))
    state = after(state, RESTART, aggregated(at, silos=(B, C)))
    assert isinstance(state, Gathering)
    assert state.opening == Opening(round=2, attempt=1, task=Task.EVALUATION)
    assert "silos with labels ready to evaluate" in waiting_for(state)
    state = after(state, RESTART, ready(B), ready(C))
    assert isinstance(state, Gathering), "they have no scores"
    state = after(state, ready(A))
    assert isinstance(state, Evaluating)
    assert (state.cohort, state.key) == ((A,), key(2))


def test_an_abandoned_attempt_is_tried_again_by_its_own_kind() -> None:
    state = in_turn(evaluate_every=0, evaluate_last=False)
    state = closed(state, 1, A)
    state = after(state, declined(B, key(2)))
    assert isinstance(state, Gathering)
    assert (state.opening.round, state.opening.attempt) == (2, 2)
    assert "1 of 2 enrolled silos without labels ready" in waiting_for(state)
    state = after(state, ready(B))
    assert isinstance(state, Collecting)
    assert (state.attempt, state.cohort) == (2, (B, C))


def test_a_silo_of_the_other_kind_is_in_no_attempt() -> None:
    state = in_turn()
    with pytest.raises(LoricaError, match="is not in the cohort"):
        step(state, committed(B))


def test_only_rounds_without_labels_are_drawn() -> None:
    state = in_turn(evaluate_every=0, evaluate_last=False, cohort_size=1, min_silos=1)
    state = closed(state, 1, A)
    assert isinstance(state, Collecting)
    assert len(state.cohort) == 1
    assert state.cohort[0] in (B, C)
    both = started(without_labels=("bank-b",), **{**TURNS, "min_silos": 1, "min_labelled": 2}, cohort_size=1)
    state = after(Idle(), *map(enrolled, (A, B, C)), both, *map(ready, (A, B, C)))
    assert isinstance(state, Collecting)
    assert state.cohort == (A, C)


def test_supervised_alone_asks_silos_without_labels_for_nothing() -> None:
    state = in_turn(labelled_alone="always", min_silos=1, rounds=2)
    for number in (1, 2):
        assert isinstance(state, Collecting)
        assert (state.round, state.cohort) == (number, (A,))
        state = closed(state, number, A)
        assert isinstance(state, Evaluating)
        assert state.cohort == (A,)
        state = after(state, reported(A, key(number), model=model_after(number)))
    assert isinstance(state, Finished)
