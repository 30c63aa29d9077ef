"""What happens in a round, by name. Two or three silos, min_silos = 2 unless said otherwise."""

from dataclasses import replace

import pytest

from lorica_coordinator.rounds.effects import (
    Aggregate,
    ArmDeadline,
    Cause,
    DisarmDeadline,
    DiscardUpdates,
    EvaluationAbandoned,
    EvaluationClosed,
    ModelMade,
    PlanBegun,
    RetainModels,
    RoundAbandoned,
    RoundClosed,
    RoundOpened,
    SiloDropped,
    UpdateAccepted,
)
from lorica_coordinator.rounds.events import (
    AggregationFailed,
    DeadlinePassed,
    PlanOffered,
    PlanPaused,
    PlanResumed,
    PlanStopped,
    ReadinessDeclared,
    Resumed,
    SiloLeft,
)
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.orders import waiting_for
from lorica_coordinator.rounds.phases.collecting import check_may_commit
from lorica_coordinator.rounds.states import (
    Aggregating,
    Collecting,
    Evaluating,
    Finished,
    Gathering,
    Idle,
    Opening,
    State,
    Stopped,
    Task,
    course_of,
)
from lorica_coordinator.rounds.updates import IncludedUpdate, Outcome
from lorica_security.errors import AuthorisationError, Conflict, StateError, WrongTime
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest, digest_of
from silo_wire.messages import RoundKey
from tests.support.rounds import (
    AGGREGATING,
    COLLECTING,
    EVALUATING,
    FINISHED,
    GATHERING,
    IDLE,
    INITIAL,
    ONE_OF_EACH_STATE,
    PLAN,
    SIGNATURE,
    STOPPED,
    T0,
    TRAIN_1,
    A,
    B,
    C,
    after,
    aggregated,
    committed,
    course,
    declined,
    enrolled,
    key,
    model_after,
    ready,
    reported,
    revoked,
    started,
    terms,
    update,
)

D = SiloName("insurer-d")
OTHER_PLAN = digest_of(b"another plan")
FOURTH = digest_of(b"model four")


# --- gathering


def test_a_round_opens_when_it_is_started_and_everyone_enrolled_is_ready() -> None:
    state = after(IDLE, started(), ready(B))
    assert isinstance(state, Gathering)
    assert state.deadline is None  # below the quorum nothing runs

    opened, effects = step(state, ready(A, T0 + 3))

    assert isinstance(opened, Collecting)
    assert opened.cohort == (A, B)
    assert opened.deadline == T0 + 3 + 600
    assert effects == (
        RoundOpened(key=key(), cohort=(A, B), model=INITIAL),
        ArmDeadline(at=T0 + 603),
    )


def test_the_start_records_the_plan_and_its_signed_initial_model() -> None:
    _, effects = step(IDLE, started())
    assert effects == (
        PlanBegun(plan=PLAN, name="first"),
        ModelMade(plan=PLAN, round=0, model=INITIAL, signature=SIGNATURE),
    )


def test_an_offered_plan_waits_for_the_operator_however_many_are_ready() -> None:
    offered = PlanOffered(now=T0, terms=terms(), model=INITIAL, signature=SIGNATURE)
    state = after(IDLE, offered, ready(A), ready(B))
    assert isinstance(state, Gathering)
    assert state.deadline is None
    assert isinstance(after(state, started()), Collecting)


def test_start_when_ready_needs_no_operator() -> None:
    offered = PlanOffered(now=T0, terms=terms(start_when_ready=True), model=INITIAL, signature=SIGNATURE)
    assert isinstance(after(IDLE, offered, ready(A), ready(B)), Collecting)


def test_an_offered_plan_gives_way_to_the_one_that_the_operator_starts() -> None:
    offered = PlanOffered(now=T0, terms=terms(), model=INITIAL, signature=SIGNATURE)
    state = after(IDLE, offered, ready(A), started(plan=OTHER_PLAN))
    assert isinstance(state, Gathering)
    assert state.course.terms.plan == OTHER_PLAN
    assert state.course.ready == frozenset()  # readiness was for the other plan


def test_the_gathering_deadline_runs_from_the_quorum_and_opens_with_those_who_are_there() -> None:
    state = after(Idle(population=frozenset({A, B, C})), started(), ready(A))
    waiting, effects = step(state, ready(B, T0 + 10))
    assert isinstance(waiting, Gathering)
    assert effects == (ArmDeadline(at=T0 + 70),)

    opened, effects = step(waiting, DeadlinePassed(now=T0 + 70, deadline=T0 + 70))

    assert isinstance(opened, Collecting)
    assert opened.cohort == (A, B)
    assert effects[-1] == ArmDeadline(at=T0 + 670)


def test_a_third_silo_does_not_move_the_gathering_deadline() -> None:
    population = frozenset({A, B, C, D})
    state = after(Idle(population=population), started(), ready(A), ready(B, T0 + 10), ready(C, T0 + 40))
    assert isinstance(state, Gathering)
    assert state.deadline == T0 + 70


def _without_the_third() -> State:
    """A plan of three silos, of which C never came: the first round has opened at the deadline without it."""
    state = after(Idle(population=frozenset({A, B, C})), started(), ready(A), ready(B))
    return after(state, DeadlinePassed(now=T0 + 60, deadline=T0 + 60))


def _gathers_again(state: State) -> State:
    assert isinstance(state, Collecting)
    return after(state, declined(A, state.key), ready(A))


def test_a_silo_that_never_came_is_waited_for_once_and_not_in_every_round() -> None:
    state = _without_the_third()
    for _ in range(3):
        state = _gathers_again(state)
        assert isinstance(state, Collecting), state
        assert state.cohort == (A, B)


def test_a_silo_that_was_seen_since_is_waited_for_again_once() -> None:
    state = after(_without_the_third(), ready(C), SiloLeft(now=T0, silo=C))
    waiting = _gathers_again(state)
    assert isinstance(waiting, Gathering)
    assert waiting.deadline == T0 + 60
    opened = after(waiting, DeadlinePassed(now=T0 + 60, deadline=T0 + 60))
    assert isinstance(_gathers_again(opened), Collecting)


def test_a_silo_that_comes_late_is_in_the_next_round() -> None:
    state = _gathers_again(after(_without_the_third(), ready(C)))
    assert isinstance(state, Collecting)
    assert state.cohort == (A, B, C)


def test_a_restart_waits_for_those_who_were_there_and_not_for_who_never_came() -> None:
    resumed = Resumed(now=T0 + 100, population=frozenset({A, B, C})), ready(B)
    state = _gathers_again(after(_without_the_third(), *resumed))
    assert isinstance(state, Collecting)


def test_a_silo_that_is_enrolled_anew_is_waited_for() -> None:
    state = _gathers_again(after(_without_the_third(), revoked(C), enrolled(C)))
    assert isinstance(state, Gathering)


def test_plan_start_waits_for_everybody_again() -> None:
    state = after(_without_the_third(), PlanStopped(now=T0), started(), ready(A), ready(B))
    assert isinstance(state, Gathering)
    assert state.deadline is not None


def test_losing_the_quorum_disarms_the_gathering_deadline_and_waits_on() -> None:
    state = after(Idle(population=frozenset({A, B, C})), started(), ready(A), ready(B, T0 + 10))
    waiting, effects = step(state, SiloLeft(now=T0 + 20, silo=B))
    assert isinstance(waiting, Gathering)
    assert waiting.deadline is None
    assert effects == (DisarmDeadline(),)
    with pytest.raises(WrongTime):
        step(waiting, DeadlinePassed(now=T0 + 70, deadline=T0 + 70))
    again = after(waiting, ready(B, T0 + 100))
    assert isinstance(again, Gathering)
    assert again.deadline == T0 + 160


def test_a_silo_that_enrols_while_all_others_are_ready_is_waited_for_until_the_deadline() -> None:
    state = after(Idle(population=frozenset({A, B, C})), started(), ready(A), ready(B), enrolled(D), ready(C))
    assert isinstance(state, Gathering)
    assert state.deadline == T0 + 60


def test_readiness_of_a_silo_that_is_not_enrolled_is_refused() -> None:
    with pytest.raises(AuthorisationError, match="clinic-c is not enrolled"):
        step(after(IDLE, started()), ready(C))


def test_not_ready_takes_readiness_back() -> None:
    state = after(IDLE, started(), ready(A), ReadinessDeclared(now=T0, silo=A, ready=False), ready(B))
    assert isinstance(state, Gathering)
    assert state.course.ready == {B}


# --- which updates a model includes


def included(state: State) -> dict[SiloName, Digest]:
    course = course_of(state)
    assert course is not None
    assert [one.silo for one in course.included] == sorted(one.silo for one in course.included)
    return {one.silo: one.digest for one in course.included}


def test_updates_that_were_summed_are_included_from_then_on() -> None:
    state = after(replace(AGGREGATING, updates=(update(A), update(B))), aggregated())
    assert included(state) == {A: update(A).digest, B: update(B).digest}


def test_a_newer_update_takes_the_place_of_an_older_one_and_others_stay() -> None:
    kept = (IncludedUpdate(silo=A, digest=update(A).digest), IncludedUpdate(silo=C, digest=update(C).digest))
    newer = (update(A, content="newer"), update(B, content="newer"))
    state = after(replace(AGGREGATING, course=course(included=kept), updates=newer), aggregated())
    assert included(state) == {A: newer[0].digest, B: newer[1].digest, C: update(C).digest}


def test_a_round_without_a_step_includes_nothing() -> None:
    state = after(AGGREGATING, aggregated(model=INITIAL, outcome=Outcome.ZERO_WEIGHT))
    assert included(state) == {}


def test_an_update_that_could_not_be_used_is_not_included() -> None:
    three = replace(AGGREGATING, updates=(update(A), update(B), update(C)))
    failed = AggregationFailed(now=T0, key=key(), silo=B, reason="spool is damaged")
    state = after(three, failed, aggregated(silos=(A, C)))
    assert included(state) == {A: update(A).digest, C: update(C).digest}


def test_an_update_of_no_weight_is_not_included() -> None:
    """Its silo goes on with what was cut off the update before: no model has this one."""
    kept = (IncludedUpdate(silo=A, digest=update(A).digest),)
    newer = (update(A, content="newer"), update(B, content="newer"))
    made = aggregated()
    weights = tuple(replace(one, share=float(one.silo == B)) for one in made.result.weights)
    weighed = replace(made, result=replace(made.result, weights=weights))
    state = after(replace(AGGREGATING, course=course(included=kept), updates=newer), weighed)
    assert included(state) == {A: update(A).digest, B: newer[1].digest}


def test_an_abandoned_round_includes_nothing() -> None:
    state = after(COLLECTING, committed(A), DeadlinePassed(now=T0 + 600, deadline=T0 + 600))
    assert included(state) == {}


# --- collecting


def test_the_last_update_closes_the_phase_and_asks_for_aggregation_in_order_of_name() -> None:
    state = after(COLLECTING, committed(B))
    assert isinstance(state, Collecting)
    aggregating, effects = step(state, committed(A))
    assert isinstance(aggregating, Aggregating)
    assert effects == (
        UpdateAccepted(key=key(), update=update(A), signature=SIGNATURE),
        Aggregate(key=key(), base_model=INITIAL, updates=(update(A), update(B))),
        DisarmDeadline(),
    )


def test_the_same_update_again_is_acknowledged_and_not_counted_twice() -> None:
    once = after(COLLECTING, committed(A))
    assert step(once, committed(A)) == (once, ())


def test_the_last_silos_repeated_update_is_acknowledged_while_aggregating() -> None:
    assert step(AGGREGATING, committed(B)) == (AGGREGATING, ())


def test_a_second_different_update_of_one_silo_is_a_conflict() -> None:
    once = after(COLLECTING, committed(A))
    with pytest.raises(Conflict, match="bank-a"):
        step(once, committed(A, content="another"))
    with pytest.raises(Conflict, match="bank-a"):
        step(AGGREGATING, committed(A, content="another"))


def test_an_update_of_a_silo_outside_the_cohort_is_wrong_time() -> None:
    with pytest.raises(WrongTime, match="clinic-c is not in the cohort"):
        step(COLLECTING, committed(C))


def test_a_late_update_while_aggregating_is_wrong_time() -> None:
    with pytest.raises(WrongTime, match="came late"):
        step(AGGREGATING, committed(C))


@pytest.mark.parametrize("at", [key(1, 2), key(2, 1), replace(key(), plan=OTHER_PLAN)])
def test_an_update_for_another_round_attempt_or_plan_is_wrong_time(at: RoundKey) -> None:
    with pytest.raises(WrongTime, match="wait for the next order"):
        step(COLLECTING, committed(A, at))


def test_an_update_for_a_closed_round_is_wrong_time() -> None:
    with pytest.raises(WrongTime):
        step(EVALUATING, committed(A))
    with pytest.raises(WrongTime, match="does not fit the phase evaluating"):
        check_may_commit(EVALUATING, key(), A)


def test_at_the_deadline_a_quorum_goes_on_and_the_late_silo_is_named() -> None:
    state = after(replace(COLLECTING, cohort=(A, B, C)), committed(A), committed(C))
    aggregating, effects = step(state, DeadlinePassed(now=T0 + 600, deadline=T0 + 600))
    assert isinstance(aggregating, Aggregating)
    assert [item.silo for item in aggregating.updates] == [A, C]
    assert effects[0] == SiloDropped(key=key(), silo=B, outcome="late", detail="no update before the deadline")


def test_below_the_quorum_at_the_deadline_the_round_is_abandoned_and_gathers_again() -> None:
    state = after(COLLECTING, SiloLeft(now=T0, silo=B), committed(A))
    gathering, effects = step(state, DeadlinePassed(now=T0 + 600, deadline=T0 + 600))
    assert isinstance(gathering, Gathering)
    assert gathering.opening == Opening(round=1, attempt=2, task=Task.TRAINING)
    assert gathering.course.model == INITIAL
    assert [type(effect) for effect in effects] == [SiloDropped, RoundAbandoned, DiscardUpdates, DisarmDeadline]
    assert isinstance(effects[1], RoundAbandoned)
    assert "1 of at least 2 updates" in effects[1].reason


def test_an_abandoned_round_is_tried_again_at_once_with_silos_that_are_still_ready() -> None:
    again, effects = step(COLLECTING, DeadlinePassed(now=T0 + 600, deadline=T0 + 600))
    assert isinstance(again, Gathering)  # the population has a third silo, which is not ready
    two = replace(COLLECTING, course=course(population=frozenset({A, B})))
    again, effects = step(two, DeadlinePassed(now=T0 + 600, deadline=T0 + 600))
    assert isinstance(again, Collecting)
    assert (again.round, again.attempt) == (1, 2)
    assert effects[-1] == ArmDeadline(at=T0 + 1200)


def test_leaving_alone_drops_nobody_and_a_returned_silo_may_commit() -> None:
    state = after(COLLECTING, SiloLeft(now=T0, silo=A), SiloLeft(now=T0, silo=B))
    assert isinstance(state, Collecting)
    assert state.cohort == (A, B)
    assert isinstance(after(state, committed(A), committed(B)), Aggregating)


def test_declines_that_make_the_quorum_impossible_abandon_at_once() -> None:
    gathering, effects = step(COLLECTING, declined(A))
    assert isinstance(gathering, Gathering)
    assert gathering.opening.attempt == 2
    assert [type(effect) for effect in effects] == [SiloDropped, RoundAbandoned, DiscardUpdates, DisarmDeadline]


def test_a_declined_silo_must_declare_readiness_again_so_that_refusals_cannot_spin_rounds() -> None:
    two = replace(COLLECTING, course=course(population=frozenset({A, B})))
    state = after(two, declined(A))
    assert isinstance(state, Gathering)
    assert state.course.ready == {B}
    assert isinstance(after(state, ready(A)), Collecting)


def test_a_decline_that_leaves_a_quorum_ends_the_phase_once_the_others_have_committed() -> None:
    state = after(replace(COLLECTING, cohort=(A, B, C)), committed(A), declined(B))
    assert isinstance(state, Collecting)
    assert isinstance(after(state, committed(C)), Aggregating)


def test_a_repeated_decline_is_acknowledged_and_one_after_the_update_is_a_conflict() -> None:
    state = after(replace(COLLECTING, cohort=(A, B, C)), declined(B), committed(A))
    assert step(state, declined(B)) == (state, ())
    with pytest.raises(Conflict):
        step(state, declined(A))
    with pytest.raises(Conflict):
        step(state, committed(B))


def test_a_stale_or_early_timer_ends_nothing() -> None:
    for event in (
        DeadlinePassed(now=T0 + 600, deadline=T0 + 60),
        DeadlinePassed(now=T0 + 599, deadline=T0 + 600),
    ):
        with pytest.raises(WrongTime):
            step(COLLECTING, event)


# --- what the operator does to silos and to the course of things


def test_a_revoked_silo_is_out_of_the_cohort_and_what_it_sent_is_dropped() -> None:
    three = replace(COLLECTING, cohort=(A, B, C), course=course(ready=frozenset({A, B, C})))
    state, effects = step(after(three, committed(A)), revoked(A, T0 + 1))
    assert isinstance(state, Collecting)
    assert state.updates == ()
    assert state.course.population == state.course.ready == {B, C}
    assert effects == (SiloDropped(key=key(), silo=A, outcome="refused", detail="revoked by the operator"),)
    done = after(state, committed(B), committed(C))
    assert isinstance(done, Aggregating)
    assert done.silos == (B, C)
    with pytest.raises(Conflict):
        step(state, committed(A))


def test_revoking_the_last_one_that_was_waited_for_closes_the_phase() -> None:
    three = replace(COLLECTING, cohort=(A, B, C))
    assert isinstance(after(three, committed(A), committed(B), revoked(C)), Aggregating)


def test_revoking_below_the_quorum_abandons_the_attempt() -> None:
    state, effects = step(COLLECTING, revoked(A))
    assert isinstance(state, Gathering)
    assert [type(effect) for effect in effects] == [SiloDropped, RoundAbandoned, DiscardUpdates, DisarmDeadline]


def test_a_revoked_silo_is_not_waited_for_when_a_round_gathers() -> None:
    waiting = replace(GATHERING, course=course(ready=frozenset({A, B})))
    state = after(waiting, revoked(C))
    assert isinstance(state, Collecting)
    assert state.cohort == (A, B)


def test_a_revoked_silo_has_no_say_on_the_model() -> None:
    three = replace(EVALUATING, cohort=(A, B, C))
    state = after(three, reported(C), revoked(C))
    assert isinstance(state, Evaluating)
    assert state.reports == ()
    assert not isinstance(after(state, reported(A), reported(B)), Evaluating)


def test_a_sum_that_is_being_made_is_finished_though_a_silo_in_it_is_revoked() -> None:
    state, effects = step(AGGREGATING, revoked(A))
    assert isinstance(state, Aggregating)
    assert (state.silos, effects) == ((A, B), ())
    assert A not in state.course.population


def test_revoked_while_stopped_is_not_in_the_sum_after_the_start() -> None:
    three = after(replace(COLLECTING, cohort=(A, B, C)), committed(A), committed(B), committed(C))
    stopped = after(three, PlanStopped(now=T0))
    state, effects = step(stopped, revoked(A, T0 + 1))
    assert isinstance(state, Stopped)
    assert effects == (SiloDropped(key=key(), silo=A, outcome="refused", detail="revoked by the operator"),)
    assert step(state, revoked(A, T0 + 2)) == (state, ())
    again = after(state, started())
    assert isinstance(again, Aggregating)
    assert again.silos == (B, C)


def test_revoked_while_stopped_below_the_quorum_gives_the_attempt_up() -> None:
    stopped = after(AGGREGATING, PlanStopped(now=T0))
    state, effects = step(stopped, revoked(A, T0 + 1))
    assert isinstance(state, Stopped)
    assert (state.updates, state.opening.attempt) == ((), 2)
    assert [type(effect) for effect in effects] == [SiloDropped, RoundAbandoned, DiscardUpdates]


def test_a_revoked_silo_comes_back_by_enrolling_anew() -> None:
    assert after(IDLE, revoked(A), enrolled(A)) == IDLE


def test_a_paused_plan_ends_its_round_and_opens_no_other_until_it_is_resumed() -> None:
    everyone = replace(COLLECTING, course=course(population=frozenset({A, B}), terms=terms(evaluate_every=0, rounds=3)))
    state = after(everyone, PlanPaused(now=T0), committed(A), committed(B), aggregated())
    assert isinstance(state, Gathering)
    assert state.deadline is None
    assert state.opening.round == 2
    assert isinstance(after(state, PlanResumed(now=T0)), Collecting)
    assert isinstance(after(state, started(rounds=3, evaluate_every=0)), Collecting)


def test_what_cannot_be_paused_or_resumed_is_said() -> None:
    with pytest.raises(StateError, match="nothing to pause"):
        step(STOPPED, PlanPaused(now=T0))
    with pytest.raises(StateError, match="is not paused"):
        step(GATHERING, PlanResumed(now=T0))


# --- aggregating


def test_an_applied_aggregation_publishes_the_model_and_asks_for_its_evaluation() -> None:
    evaluating, effects = step(AGGREGATING, aggregated(now=T0 + 9))
    assert isinstance(evaluating, Evaluating)
    assert evaluating.course.model == model_after(1)
    assert evaluating.course.model_round == 1
    assert evaluating.cohort == (A, B)
    assert evaluating.deadline == T0 + 9 + 120
    assert effects[:4] == (
        ModelMade(plan=PLAN, round=1, model=model_after(1), signature=SIGNATURE),
        RoundClosed(key=key(), result=aggregated().result, updates=AGGREGATING.updates),
        DiscardUpdates(key=key()),
        RetainModels(plan=PLAN, models=frozenset({model_after(1)})),
    )


def test_zero_weight_leaves_the_model_and_goes_on() -> None:
    state, effects = step(AGGREGATING, aggregated(model=INITIAL, outcome=Outcome.ZERO_WEIGHT))
    assert isinstance(state, Evaluating)
    assert (state.course.model, state.course.model_round) == (INITIAL, 0)
    assert not any(isinstance(effect, ModelMade) for effect in effects)


def test_without_an_evaluation_due_the_next_round_gathers() -> None:
    state = replace(AGGREGATING, course=course(terms=terms(evaluate_every=0)))
    gathering = after(state, aggregated())
    assert isinstance(gathering, Gathering)
    assert gathering.opening == Opening(round=2, attempt=1, task=Task.TRAINING)
    assert gathering.deadline == T0 + 60


def test_a_result_for_another_attempt_is_wrong_time() -> None:
    with pytest.raises(WrongTime):
        step(AGGREGATING, aggregated(key(1, 2)))


def test_an_unusable_update_is_dropped_and_the_others_are_summed_again() -> None:
    three = replace(AGGREGATING, updates=(update(A), update(B), update(C)))
    again, effects = step(three, AggregationFailed(now=T0, key=key(), silo=B, reason="NaN in chunk 3"))
    assert isinstance(again, Aggregating)
    assert effects == (
        SiloDropped(key=key(), silo=B, outcome="refused", detail="NaN in chunk 3"),
        Aggregate(key=key(), base_model=INITIAL, updates=(update(A), update(C))),
    )


def test_an_unusable_update_that_breaks_the_quorum_abandons_the_round() -> None:
    state, effects = step(AGGREGATING, AggregationFailed(now=T0, key=key(), silo=B, reason="NaN in chunk 3"))
    assert isinstance(state, Gathering)
    assert state.opening.attempt == 2
    assert [type(effect) for effect in effects] == [SiloDropped, RoundAbandoned, DiscardUpdates, ArmDeadline]


@pytest.mark.parametrize("level", ["record_level", "silo_level"])
def test_what_is_wrong_with_one_update_is_told_nobody_where_no_single_silo_is_shown(level: str) -> None:
    private = replace(AGGREGATING, course=replace(AGGREGATING.course, terms=terms(**{level: True})))
    for updates in ((update(A), update(B)), (update(A), update(B), update(C))):
        failed = AggregationFailed(now=T0, key=key(), silo=B, reason="the delta of silo B has norm 4.32")
        after, effects = step(replace(private, updates=updates), failed)
        assert "4.32" not in repr((after, effects))
        assert SiloDropped(key=key(), silo=B, outcome="refused", detail="it cannot be used") in effects


def test_a_failure_that_blames_a_silo_without_an_update_is_wrong_time() -> None:
    with pytest.raises(WrongTime):
        step(AGGREGATING, AggregationFailed(now=T0, key=key(), silo=C, reason="NaN"))


# --- evaluating


def test_the_initial_model_is_evaluated_as_round_0_before_round_1() -> None:
    state = after(IDLE, started(evaluate_initial=True), ready(A), ready(B))
    assert isinstance(state, Evaluating)
    assert (state.round, state.attempt) == (0, 1)
    state = after(state, reported(A, key(0)), reported(B, key(0)))
    assert isinstance(state, Collecting)
    assert (state.round, state.attempt) == (1, 1)
    assert state.course.best is not None
    assert state.course.best.model == INITIAL


def test_averages_over_silos_and_examples() -> None:
    # 4 of 10 and 10 of 10: MicroAvg 14/20 = 0.7, MacroAvg (0.4 + 1.0) / 2 = 0.7; then 1 of 2 for B: 5/12 and 0.45
    _, effects = step(after(EVALUATING, reported(A, exact_matches=4)), reported(B, exact_matches=10))
    closed = next(effect for effect in effects if isinstance(effect, EvaluationClosed))
    assert closed.score is not None
    assert (closed.score.exact_matches, closed.score.examples) == (14, 20)
    small = reported(B)
    small = replace(
        small, evaluation=replace(small.evaluation, examples=2, exact_matches=1, executed=0, execution_matches=0)
    )
    _, effects = step(after(EVALUATING, reported(A, exact_matches=4)), small)
    closed = next(effect for effect in effects if isinstance(effect, EvaluationClosed))
    assert closed.macro == pytest.approx(0.45)
    assert closed.score is not None
    assert closed.score.micro_average == pytest.approx(5 / 12)


def test_the_best_model_is_the_one_with_the_highest_micro_average_and_of_equals_the_later() -> None:
    best = {}
    for matches in (4, 5, 3):
        state = after(EVALUATING, reported(A, exact_matches=4), reported(B, exact_matches=4))
        assert isinstance(state, Gathering | Collecting)
        second = Evaluating(
            course=replace(state.course, model=FOURTH, model_round=2),
            round=2,
            attempt=1,
            cohort=(A, B),
            deadline=T0 + 500,
        )
        finished = after(
            second,
            reported(A, key(2), model=FOURTH, exact_matches=4),
            reported(B, key(2), model=FOURTH, exact_matches=matches),
        )
        assert isinstance(finished, Finished)
        best[matches] = finished.course.best_model
    assert best == {4: FOURTH, 5: FOURTH, 3: model_after(1)}


def test_a_new_best_keeps_both_models_and_a_worse_one_keeps_the_best() -> None:
    state = after(EVALUATING, reported(A), reported(B))
    assert isinstance(state, Gathering)
    third = replace(AGGREGATING, course=replace(state.course), round=2)
    _, effects = step(third, aggregated(key(2)))
    assert RetainModels(plan=PLAN, models=frozenset({model_after(1), model_after(2)})) in effects


def test_evaluation_ends_at_its_deadline_and_below_a_quorum_makes_no_best_model() -> None:
    state = after(EVALUATING, reported(A, exact_matches=10))
    gathering, effects = step(state, DeadlinePassed(now=T0 + 120, deadline=T0 + 120))
    assert isinstance(gathering, Gathering)
    assert gathering.course.best is None
    closed = next(effect for effect in effects if isinstance(effect, EvaluationClosed))
    assert (closed.counted, closed.is_best, closed.macro) == (False, False, 1.0)


def test_evaluation_without_any_report_goes_on() -> None:
    gathering, effects = step(EVALUATING, DeadlinePassed(now=T0 + 120, deadline=T0 + 120))
    assert isinstance(gathering, Gathering)
    closed = next(effect for effect in effects if isinstance(effect, EvaluationClosed))
    assert (closed.score, closed.macro) == (None, None)


def test_a_silo_that_cannot_evaluate_is_not_waited_for() -> None:
    state = after(EVALUATING, reported(A), declined(B))
    assert isinstance(state, Gathering)


def test_reports_repeated_are_acknowledged_changed_ones_conflict_and_strays_are_wrong_time() -> None:
    state = after(EVALUATING, reported(A))
    assert step(state, reported(A)) == (state, ())
    with pytest.raises(Conflict):
        step(state, reported(A, exact_matches=9))
    with pytest.raises(Conflict):
        step(state, declined(A))
    with pytest.raises(WrongTime):
        step(state, reported(C))
    with pytest.raises(WrongTime):
        step(state, reported(B, key(1, 2)))
    with pytest.raises(WrongTime):
        step(state, reported(B, model=INITIAL))
    with pytest.raises(WrongTime):
        step(after(state, reported(B)), reported(B))


def test_the_last_round_finishes_the_plan() -> None:
    last = replace(EVALUATING, round=2, course=course(model=model_after(2), model_round=2))
    finished, effects = step(after(last, reported(A, key(2))), reported(B, key(2)))
    assert isinstance(finished, Finished)
    assert finished.course.best_model == model_after(2)
    assert effects[-1] == DisarmDeadline()


# --- the operator


@pytest.mark.parametrize("phase", ["gathering", "collecting", "masking", "aggregating", "evaluating"])
def test_a_plan_that_is_stopped_for_what_is_missing_says_so_until_it_is_started(phase: str) -> None:
    before = ONE_OF_EACH_STATE[phase]
    stopped, effects = step(before, PlanStopped(now=T0 + 1, missing="model 7 is gone: bring it back"))
    assert isinstance(stopped, Stopped)
    assert waiting_for(stopped).endswith("stopped: model 7 is gone: bring it back")
    told = [one for one in effects if isinstance(one, RoundAbandoned | EvaluationAbandoned)]
    assert len(told) == (phase not in ("gathering", "aggregating"))
    assert {one.reason for one in told} <= {"model 7 is gone: bring it back"}
    assert {one.cause for one in told if isinstance(one, RoundAbandoned)} <= {Cause.MODEL_MISSING}
    assert step(stopped, PlanStopped(now=T0 + 2)) == (stopped, ())


def test_stopping_a_round_that_collects_abandons_it_and_the_start_takes_the_next_attempt() -> None:
    stopped, effects = step(after(COLLECTING, committed(A)), PlanStopped(now=T0 + 1))
    assert isinstance(stopped, Stopped)
    assert effects == (
        RoundAbandoned(key=key(), cause=Cause.STOPPED, reason="the operator stopped the plan"),
        DiscardUpdates(key=key()),
        DisarmDeadline(),
    )
    two = replace(stopped, course=replace(stopped.course, population=frozenset({A, B})))
    again = after(two, started(T0 + 50))
    assert isinstance(again, Collecting)
    assert (again.round, again.attempt, again.deadline) == (1, 2, T0 + 650)


def test_stopping_an_aggregation_keeps_its_updates_and_the_start_does_it_again() -> None:
    stopped = after(AGGREGATING, PlanStopped(now=T0))
    with pytest.raises(WrongTime):
        step(stopped, aggregated())  # the one that was under way
    again, effects = step(stopped, started())
    assert again == AGGREGATING
    assert effects == (Aggregate(key=key(), base_model=INITIAL, updates=AGGREGATING.updates),)


def test_stopping_an_evaluation_repeats_it_after_the_start() -> None:
    state = replace(EVALUATING, course=replace(EVALUATING.course, population=frozenset({A, B})))
    stopped, effects = step(after(state, reported(A)), PlanStopped(now=T0))
    assert isinstance(effects[0], EvaluationAbandoned)
    again = after(stopped, started())
    assert isinstance(again, Evaluating)
    assert (again.round, again.attempt, again.reports) == (1, 2, ())


def test_stop_and_start_may_be_repeated() -> None:
    assert step(STOPPED, PlanStopped(now=T0)) == (STOPPED, ())
    for state in (COLLECTING, AGGREGATING, EVALUATING, GATHERING):
        assert step(state, started()) == (state, ())


def test_another_plan_waits_until_the_running_one_is_stopped_and_then_begins_at_its_beginning() -> None:
    other = started(plan=OTHER_PLAN, name="other")
    for state in (GATHERING, COLLECTING, AGGREGATING, EVALUATING):
        for event in (other, replace(other, leave="first")):
            with pytest.raises(StateError, match="`coordinator plan stop` stops it before another"):
                step(state, event)
    stopped = after(AGGREGATING, PlanStopped(now=T0))
    with pytest.raises(StateError, match="`coordinator plan start other --leave first` leaves it for good"):
        step(stopped, other)
    begun, effects = step(stopped, replace(other, leave="first"))
    assert isinstance(begun, Gathering)
    assert begun.course.terms.plan == OTHER_PLAN
    assert begun.course.population == {A, B, C}
    assert [type(effect) for effect in effects] == [RoundAbandoned, DiscardUpdates, PlanBegun, ModelMade]


def test_a_finished_plan_is_not_run_again_and_another_one_may_follow() -> None:
    with pytest.raises(StateError, match="finished"):
        step(FINISHED, started())
    assert isinstance(after(FINISHED, started(plan=OTHER_PLAN)), Gathering)


# --- restarts


def resumed(now: float) -> Resumed:
    return Resumed(now=now, population=frozenset({A, B, C}))


def test_a_restart_goes_on_with_what_is_left_of_training() -> None:
    state, effects = step(after(COLLECTING, committed(A)), resumed(T0 + 300))
    assert isinstance(state, Collecting)
    assert state.cohort == (A, B)
    assert [item.silo for item in state.updates] == [A]
    assert state.course.ready == frozenset()
    assert effects[-1] == ArmDeadline(at=T0 + 600)


def test_a_restart_does_an_interrupted_aggregation_again() -> None:
    state, effects = step(AGGREGATING, resumed(T0))
    assert isinstance(state, Aggregating)
    assert Aggregate(key=key(), base_model=INITIAL, updates=AGGREGATING.updates) in effects


def test_a_restart_while_gathering_waits_for_silos_to_connect_again() -> None:
    state = after(GATHERING, resumed(T0))
    assert isinstance(state, Gathering)
    assert (state.deadline, state.course.ready) == (None, frozenset())


def test_what_a_restart_found_of_the_gathering_deadline_goes_on_at_the_next_quorum_and_no_longer() -> None:
    waiting = after(GATHERING, resumed(T0 + 20), ready(A, T0 + 25))
    assert (waiting.deadline, waiting.left) == (None, 40.0)  # type: ignore[union-attr]
    again = after(waiting, resumed(T0 + 30), ready(A, T0 + 31), ready(B, T0 + 32))
    assert (again.deadline, again.left) == (T0 + 72, None)  # type: ignore[union-attr]
    lost = after(again, SiloLeft(now=T0 + 33, silo=B), ready(B, T0 + 40))
    assert lost.deadline == T0 + 100, "a quorum that was lost begins anew, as ever"  # type: ignore[union-attr]


def test_a_restart_of_an_evaluation_keeps_its_reports() -> None:
    state, effects = step(after(EVALUATING, reported(A)), resumed(T0 + 100))
    assert isinstance(state, Evaluating)
    assert [item.silo for item in state.reports] == [A]
    assert effects[-1] == ArmDeadline(at=T0 + 120)


def test_a_restart_takes_the_population_from_the_records() -> None:
    state = after(STOPPED, Resumed(now=T0, population=frozenset({A})))
    assert isinstance(state, Stopped)
    assert state.course.population == {A}
    assert after(IDLE, Resumed(now=T0, population=frozenset({C}))) == Idle(population=frozenset({C}))


def test_an_opening_survives_the_stop_of_a_gathering() -> None:
    assert after(GATHERING, PlanStopped(now=T0)) == Stopped(course=GATHERING.course, opening=TRAIN_1)
