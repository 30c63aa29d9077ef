from dataclasses import replace

from lorica_coordinator.rounds.events import PlanStopped, SiloLeft
from lorica_coordinator.rounds.orders import order_for, waiting_for
from lorica_coordinator.rounds.states import Gathering, Idle, State
from lorica_coordinator.rounds.updates import IncludedUpdate
from lorica_security.identifiers import SiloName
from silo_wire.messages import Evaluate, Finished, Prepare, Standby, StandbyReason, Train
from tests.support.rounds import (
    AGGREGATING,
    COLLECTING,
    EVALUATING,
    FINISHED,
    GATHERING,
    IDLE,
    INITIAL,
    MASKING,
    ONE_OF_EACH_STATE,
    PLAN,
    STOPPED,
    T0,
    TRAIN_1,
    A,
    B,
    C,
    after,
    committed,
    course,
    declined,
    key,
    model_after,
    ready,
    reported,
    started,
    terms,
    update,
)


def reason(state: State, silo: SiloName) -> StandbyReason:
    order = order_for(state, silo, T0)
    assert isinstance(order, Standby)
    return order.reason


def test_without_a_plan_silos_wait() -> None:
    assert reason(IDLE, A) is StandbyReason.NO_PLAN


def test_a_silo_prepares_until_it_has_declared_readiness() -> None:
    state = after(IDLE, started())
    assert order_for(state, A, T0) == Prepare(PLAN)
    state = after(state, ready(A))
    assert reason(state, A) is StandbyReason.GATHERING
    assert order_for(after(state, SiloLeft(now=T0, silo=A)), A, T0) == Prepare(PLAN)


def test_the_cohort_trains_until_it_has_committed_or_declined() -> None:
    order = Train(key=key(), model=INITIAL, seconds_left=590.0)
    assert order_for(COLLECTING, A, T0 + 10) == order
    assert reason(after(COLLECTING, committed(A)), A) is StandbyReason.UPDATE_RECEIVED
    three = replace(COLLECTING, cohort=(A, B, C))
    assert order_for(after(three, declined(A)), A, T0) == Prepare(PLAN)


def test_a_silo_that_comes_back_trains_on_whether_or_not_it_is_ready() -> None:
    assert isinstance(order_for(after(COLLECTING, SiloLeft(now=T0, silo=A)), A, T0), Train)


def test_a_train_order_names_the_update_of_this_silo_that_a_model_includes() -> None:
    included = (IncludedUpdate(silo=A, digest=update(A).digest),)
    state = replace(COLLECTING, course=replace(COLLECTING.course, included=included))
    expected = {A: update(A).digest, B: None}
    for silo, digest in expected.items():
        order = order_for(state, silo, T0)
        assert isinstance(order, Train)
        assert order.included_update == digest


def test_time_left_is_never_negative() -> None:
    order = order_for(COLLECTING, A, T0 + 10_000)
    assert isinstance(order, Train)
    assert order.seconds_left == 0.0


def test_a_silo_outside_the_cohort_prepares_and_then_waits_for_the_next_round() -> None:
    assert order_for(COLLECTING, C, T0) == Prepare(PLAN)
    assert reason(after(COLLECTING, ready(C)), C) is StandbyReason.NOT_IN_COHORT


def test_everyone_waits_while_the_coordinator_aggregates() -> None:
    assert reason(AGGREGATING, A) is StandbyReason.AGGREGATING


def test_the_cohort_evaluates_the_new_model_once() -> None:
    assert order_for(EVALUATING, A, T0) == Evaluate(key=key(), model=model_after(1), seconds_left=120.0)
    assert reason(after(EVALUATING, reported(A)), A) is StandbyReason.UPDATE_RECEIVED


def test_stopped_and_finished_are_told_to_everyone() -> None:
    assert reason(after(COLLECTING, PlanStopped(now=T0)), C) is StandbyReason.STOPPED
    assert order_for(FINISHED, C, T0) == Finished(
        plan=PLAN, rounds=2, final_model=model_after(2), best_model=model_after(2)
    )


def test_no_order_tells_a_silo_the_names_of_others() -> None:
    for state in ONE_OF_EACH_STATE.values():
        order = order_for(state, A, T0)
        assert B not in repr(order)
        assert C not in repr(order)


def test_the_operator_reads_what_is_waited_for() -> None:
    assert waiting_for(Idle(population=frozenset({A}))) == "1 silos enrolled; no plan has been started"
    below = after(GATHERING, SiloLeft(now=T0, silo=B))
    assert waiting_for(below) == (
        "1 of 3 enrolled silos ready to train, at least 2 are needed; waiting for bank-b, clinic-c"
    )
    assert waiting_for(GATHERING) == "2 of 3 enrolled silos ready to train; waiting for clinic-c until the deadline"
    assert waiting_for(after(COLLECTING, committed(A))) == "1 of 2 updates in, working: bank-b"
    assert waiting_for(AGGREGATING) == "summing 2 updates"
    assert waiting_for(after(EVALUATING, reported(B))) == "1 of 2 evaluations in, working: bank-a"
    assert waiting_for(STOPPED) == "stopped by the operator; `coordinator plan start` goes on with plan first"
    assert waiting_for(FINISHED) == "all 2 rounds done"


def test_the_closing_round_is_named_where_its_number_is_beyond_the_plans() -> None:
    masked = terms(secure_aggregation=True, masking_deadline_s=30.0)
    for state, says in (
        (replace(GATHERING, course=course(terms=masked), opening=replace(TRAIN_1, round=3)), "2 of 3 enrolled silos"),
        (replace(COLLECTING, course=course(terms=masked), round=3), "0 of 2 silos have trained"),
        (replace(MASKING, round=3), "opening secure aggregation"),
    ):
        assert waiting_for(state).startswith(f"closing round, in which nobody trains: {says}")
        last = replace(state, opening=TRAIN_1) if isinstance(state, Gathering) else replace(state, round=2)
        assert waiting_for(last).startswith(says)
