"""A state as a backup holds it: stopped, and free of what silos sent for the attempt under way."""

from dataclasses import replace

import pytest

from lorica_coordinator.rounds.effects import RoundAbandoned
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.states import Aggregating, Finished, Idle, Opening, State, Stopped, Task
from lorica_coordinator.rounds.without_updates import without_updates
from tests.support.masked_rounds import MaskedRounds
from tests.support.rounds import (
    AGGREGATING,
    COLLECTING,
    MASKING,
    ONE_OF_EACH_STATE,
    T0,
    A,
    after,
    committed,
    started,
    update,
)


@pytest.mark.parametrize("state", ONE_OF_EACH_STATE.values(), ids=lambda state: state.phase)
def test_every_state_comes_to_rest_and_stays_so(state: State) -> None:
    rested, _ = without_updates(state, T0)
    assert isinstance(rested, Idle | Stopped | Finished)
    assert not getattr(rested, "updates", ())
    assert getattr(rested, "masked", None) is None
    assert without_updates(rested, T0) == (rested, ()), "a backup of a restored coordinator is the same"
    if isinstance(rested, Stopped):
        step(rested, started())  # it goes on


def test_an_attempt_with_updates_is_given_up_and_the_next_has_the_next_number() -> None:
    for state in (after(COLLECTING, committed(A)), AGGREGATING):
        rested, records = without_updates(state, T0)
        assert isinstance(rested, Stopped)
        assert rested.opening == Opening(round=state.round, attempt=state.attempt + 1, task=Task.TRAINING)
        assert [record.key for record in records if isinstance(record, RoundAbandoned)] == [state.key]
        assert (rested.course.model, rested.course.best) == (state.course.model, state.course.best)


def test_a_sum_that_a_stop_put_off_is_given_up() -> None:
    put_off = Stopped(
        course=AGGREGATING.course, opening=Opening(round=3, attempt=2, task=Task.TRAINING), updates=(update(A),)
    )
    rested, (abandoned,) = without_updates(put_off, T0)
    assert isinstance(rested, Stopped)
    assert isinstance(abandoned, RoundAbandoned)
    assert (rested.opening.round, rested.opening.attempt) == (3, 3)


def test_a_round_that_silos_unmasked_is_not_asked_for_again() -> None:
    """They answer once a round: it would be declined for ever."""
    rounds = MaskedRounds(rounds=2)
    rounds.train()
    rounds.open()
    rounds.run()
    assert isinstance(rounds.state, Aggregating)
    rested, _ = without_updates(rounds.state, T0)
    assert isinstance(rested, Stopped)
    assert (rested.opening.round, rested.opening.attempt) == (2, 1)
    last = replace(
        rounds.state, course=replace(rounds.state.course, terms=replace(rounds.state.course.terms, rounds=1))
    )
    assert isinstance(without_updates(last, T0)[0], Finished)


def test_a_masked_attempt_that_nobody_answered_for_is_tried_again() -> None:
    rested, _ = without_updates(MASKING, T0)
    assert isinstance(rested, Stopped)
    assert (rested.opening.round, rested.opening.attempt) == (MASKING.round, MASKING.attempt + 1)
