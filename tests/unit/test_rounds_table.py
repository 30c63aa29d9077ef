"""Every pair of state and event: a transition of the table, or WrongTime with nothing changed."""

import copy

import pytest

from lorica_coordinator.rounds.effects import ArmDeadline, DisarmDeadline
from lorica_coordinator.rounds.events import EVENTS, Event
from lorica_coordinator.rounds.machine import TABLE, step
from lorica_coordinator.rounds.states import STATES, State, deadline_of
from lorica_security.errors import LoricaError, WrongTime
from tests.support.rounds import ONE_OF_EACH_EVENT, ONE_OF_EACH_STATE

ACCEPTED = {
    "idle": "PlanOffered PlanStarted SiloEnrolled SiloRevoked GroupsChanged SiloLeft Resumed",
    "gathering": "PlanStarted PlanStopped PlanPaused PlanResumed SiloRevoked GroupsChanged SiloEnrolled "
    "ReadinessDeclared SiloLeft DeadlinePassed Resumed",
    "collecting": "PlanStarted PlanStopped PlanPaused PlanResumed SiloRevoked GroupsChanged SiloEnrolled "
    "ReadinessDeclared SiloLeft UpdateCommitted SiloTrained SiloDeclined DeadlinePassed Resumed",
    "masking": "PlanStarted PlanStopped PlanPaused PlanResumed SiloRevoked GroupsChanged SiloEnrolled "
    "ReadinessDeclared SiloLeft SiloTrained MaskingOpened MaskAnswered "
    "SiloDeclined DeadlinePassed Resumed",
    "aggregating": "PlanStarted PlanStopped PlanPaused PlanResumed SiloRevoked GroupsChanged SiloEnrolled "
    "ReadinessDeclared SiloLeft UpdateCommitted MaskAnswered Aggregated AggregationFailed BudgetExhausted Resumed",
    "evaluating": "PlanStarted PlanStopped PlanPaused PlanResumed SiloRevoked GroupsChanged SiloEnrolled "
    "ReadinessDeclared SiloLeft SiloDeclined EvaluationReported DeadlinePassed Resumed",
    "stopped": "PlanStarted PlanStopped PlanPaused PlanResumed SiloRevoked GroupsChanged SiloEnrolled "
    "ReadinessDeclared SiloLeft Resumed",
    "finished": "PlanStarted PlanPaused PlanResumed SiloRevoked GroupsChanged SiloEnrolled ReadinessDeclared "
    "SiloLeft Resumed",
}
PAIRS = [(state, event) for state in ONE_OF_EACH_STATE.values() for event in ONE_OF_EACH_EVENT.values()]


def test_the_samples_cover_every_state_and_event() -> None:
    assert {type(state) for state in ONE_OF_EACH_STATE.values()} == set(STATES)
    assert {type(event) for event in ONE_OF_EACH_EVENT.values()} == set(EVENTS)


def test_the_table_holds_exactly_the_pairs_listed_here() -> None:
    listed = {(phase, name) for phase, names in ACCEPTED.items() for name in names.split()}
    assert {(state.phase, event.__name__) for state, event in TABLE} == listed


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda value: getattr(value, "phase", type(value).__name__))
def test_a_pair_outside_the_table_is_wrong_time_and_one_inside_keeps_its_argument(state: State, event: Event) -> None:
    before = copy.deepcopy(state)
    if (type(state), type(event)) not in TABLE:
        with pytest.raises(WrongTime, match=state.phase):
            step(state, event)
    else:
        try:
            after, effects = step(state, event)
        except LoricaError:
            pass  # the sample does not fit this state's values; scenarios pin which error it is
        else:
            armed = [effect for effect in effects if isinstance(effect, ArmDeadline | DisarmDeadline)]
            assert len(armed) <= 1
            if deadline_of(after) != deadline_of(state):
                at = deadline_of(after)
                assert armed == [DisarmDeadline() if at is None else ArmDeadline(at=at)]
    assert state == before
