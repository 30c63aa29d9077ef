"""Silos without labels train like any other and are never asked for scores."""

from typing import Any

import pytest

from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.states import Collecting, Evaluating, Finished, Idle, State
from lorica_security.errors import LoricaError
from tests.support.rounds import (
    A,
    B,
    C,
    after,
    aggregated,
    committed,
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
