"""The round machine: `step(state, event) -> (state, effects)`, by one table.

One rule for time: each phase has one deadline and one quorum, `min_silos`.

- Gathering opens when it is started and the whole population is ready, or when its deadline has passed, which runs from
  the moment a quorum is ready. Below the quorum it waits. The cohort is whoever is ready at the opening. Who was absent
  at such a deadline is waited for no more until it has declared readiness: a silo that never starts costs a plan one
  deadline, not one a round.
- Under secure aggregation a quorum is ready when a masked sum can come out of who is: of whole release groups, with
  silos enough. So it waits for silos of a group that is not whole, for other groups, or for a silo that was left out
  and may take part again.
- Collecting ends when everyone in the cohort has committed or declined, or at its deadline: with a quorum of updates
  they are aggregated, else the attempt is abandoned and the same round gathers again, from the same model. It is also
  abandoned as soon as so many have declined that no quorum, or no masked sum, can come together. Leaving drops nobody:
  a silo may return and commit until the deadline. A late silo is dropped for the round, not for good.
- Under secure aggregation Collecting ends the same way, with silos that have trained in place of updates, and Masking
  follows: each phase of the protocol has the deadline anew, and its own quorum
  (security/lorica_security/secure_aggregation). An attempt that ends before a share was asked for is tried again, like
  any other. Later, silos have answered for this round and will not do so again: the plan goes on with the next round.
  Who spoilt an attempt by more than silence is left out of the rest of that round and of the next one; of a dispute in
  which one of two must have lied, one of the two is.
- Where silos with labels and silos without train in turn, by the round's number, a round is gathered for, opened and
  closed as if its own kind were the whole population; those with labels have a quorum of their own. Only these have
  scores: after a round of the others they are gathered to evaluate, which a restart or a pause puts off as it does any
  opening.
- A silo that declines must declare readiness anew before it is in a cohort, so that a refusal cannot spin the rounds.
- Aggregation that fails on one silo's update goes on without it, or the attempt is abandoned if no quorum is left.
- Under silo-level privacy the plan is finished, with the model that it has, when another sum would cost more than it
  promises.
- Under secure aggregation nobody evaluates in a phase of its own: the scores of the model that a round begins with are
  in the sum that ends it. Where the last model is to be scored, a closing round follows the plan's last one, in which
  nobody trains.
- Evaluating ends when everyone in the cohort has reported or declined, or at its deadline. The cohort is those whose
  updates were summed (before round 1: whoever is ready). Below a quorum of reports the model cannot become the best.
- While the operator has paused the plan, no attempt opens; the one under way goes on to its end.
- A silo that the operator revokes is in no cohort any more. What it sent for the attempt under way is dropped, as if it
  had declined; under masks it is a drop-out. A sum that is being made is finished; one that a stop put off is made
  without that silo, unless masks forbid it.
- A restart empties `ready`. Of the running phase's deadline what was left goes on: time during which no silo could
  reach the coordinator is not held against any of them, and restarts, however many, put no deadline off.

A handler checks everything, then returns; it raises and nothing has changed. WrongTime: the event does not fit this
phase, round or attempt. Conflict: it contradicts what this silo has done before. The same again is acknowledged: the
state stays, without effects.
"""

from collections.abc import Callable
from typing import Any

from lorica_coordinator.rounds.effects import ArmDeadline, DisarmDeadline, Step
from lorica_coordinator.rounds.events import (
    Aggregated,
    AggregationFailed,
    BudgetExhausted,
    DeadlinePassed,
    EvaluationReported,
    Event,
    GroupsChanged,
    MaskAnswered,
    MaskingOpened,
    PlanOffered,
    PlanPaused,
    PlanResumed,
    PlanStarted,
    PlanStopped,
    ReadinessDeclared,
    Resumed,
    SiloDeclined,
    SiloEnrolled,
    SiloLeft,
    SiloRevoked,
    SiloTrained,
    UpdateCommitted,
)
from lorica_coordinator.rounds.phases.aggregating import aggregation_failed, budget_exhausted, sum_made
from lorica_coordinator.rounds.phases.collecting import (
    collecting_deadline,
    commit,
    commit_again,
    decline_training,
    silo_trained,
)
from lorica_coordinator.rounds.phases.evaluating import decline_evaluation, evaluating_deadline, take_report
from lorica_coordinator.rounds.phases.gathering import gathering_deadline
from lorica_coordinator.rounds.phases.lifecycle import (
    go_on,
    offer,
    pause,
    start_finished,
    start_gathering,
    start_idle,
    start_running,
    start_stopped,
    stop_aggregating,
    stop_collecting,
    stop_evaluating,
    stop_gathering,
    stop_masking,
    stop_stopped,
)
from lorica_coordinator.rounds.phases.masking import (
    answered_late,
    decline_masking,
    mask_answered,
    masking_deadline,
    masking_opened,
    trained_again,
)
from lorica_coordinator.rounds.phases.membership import (
    declare,
    enrol,
    enrol_idle,
    leave,
    leave_idle,
    regroup,
    regroup_idle,
    revoke,
    revoke_idle,
)
from lorica_coordinator.rounds.phases.resumption import resume, resume_idle
from lorica_coordinator.rounds.states import (
    Aggregating,
    Collecting,
    Evaluating,
    Finished,
    Gathering,
    Idle,
    Masking,
    State,
    Stopped,
    deadline_of,
)
from lorica_security.errors import WrongTime


def step(state: State, event: Event) -> Step:
    """The state after `event`, and what follows from it; raises WrongTime, Conflict, StateError or
    AuthorisationError.
    """
    handler = TABLE.get((type(state), type(event)))
    if handler is None:
        raise WrongTime(f"{type(event).__name__} does not fit the phase {state.phase}: nothing was changed")
    after, effects = handler(state, event)
    at = deadline_of(after)
    if at != deadline_of(state) or isinstance(event, Resumed):
        effects = (*effects, DisarmDeadline() if at is None else ArmDeadline(at=at))
    return after, effects


TABLE: dict[tuple[type[State], type[Event]], Callable[[Any, Any], Step]] = {
    (Idle, PlanOffered): offer,
    (Idle, PlanStarted): start_idle,
    (Gathering, PlanStarted): start_gathering,
    (Collecting, PlanStarted): start_running,
    (Masking, PlanStarted): start_running,
    (Aggregating, PlanStarted): start_running,
    (Evaluating, PlanStarted): start_running,
    (Stopped, PlanStarted): start_stopped,
    (Finished, PlanStarted): start_finished,
    (Gathering, PlanStopped): stop_gathering,
    (Collecting, PlanStopped): stop_collecting,
    (Masking, PlanStopped): stop_masking,
    (Aggregating, PlanStopped): stop_aggregating,
    (Evaluating, PlanStopped): stop_evaluating,
    (Stopped, PlanStopped): stop_stopped,
    (Gathering, PlanPaused): pause,
    (Collecting, PlanPaused): pause,
    (Masking, PlanPaused): pause,
    (Aggregating, PlanPaused): pause,
    (Evaluating, PlanPaused): pause,
    (Stopped, PlanPaused): pause,
    (Finished, PlanPaused): pause,
    (Gathering, PlanResumed): go_on,
    (Collecting, PlanResumed): go_on,
    (Masking, PlanResumed): go_on,
    (Aggregating, PlanResumed): go_on,
    (Evaluating, PlanResumed): go_on,
    (Stopped, PlanResumed): go_on,
    (Finished, PlanResumed): go_on,
    (Idle, GroupsChanged): regroup_idle,
    (Gathering, GroupsChanged): regroup,
    (Collecting, GroupsChanged): regroup,
    (Masking, GroupsChanged): regroup,
    (Aggregating, GroupsChanged): regroup,
    (Evaluating, GroupsChanged): regroup,
    (Stopped, GroupsChanged): regroup,
    (Finished, GroupsChanged): regroup,
    (Idle, SiloRevoked): revoke_idle,
    (Gathering, SiloRevoked): revoke,
    (Collecting, SiloRevoked): revoke,
    (Masking, SiloRevoked): revoke,
    (Aggregating, SiloRevoked): revoke,
    (Evaluating, SiloRevoked): revoke,
    (Stopped, SiloRevoked): revoke,
    (Finished, SiloRevoked): revoke,
    (Idle, SiloEnrolled): enrol_idle,
    (Gathering, SiloEnrolled): enrol,
    (Collecting, SiloEnrolled): enrol,
    (Masking, SiloEnrolled): enrol,
    (Aggregating, SiloEnrolled): enrol,
    (Evaluating, SiloEnrolled): enrol,
    (Stopped, SiloEnrolled): enrol,
    (Finished, SiloEnrolled): enrol,
    (Gathering, ReadinessDeclared): declare,
    (Collecting, ReadinessDeclared): declare,
    (Masking, ReadinessDeclared): declare,
    (Aggregating, ReadinessDeclared): declare,
    (Evaluating, ReadinessDeclared): declare,
    (Stopped, ReadinessDeclared): declare,
    (Finished, ReadinessDeclared): declare,
    (Idle, SiloLeft): leave_idle,
    (Gathering, SiloLeft): leave,
    (Collecting, SiloLeft): leave,
    (Masking, SiloLeft): leave,
    (Aggregating, SiloLeft): leave,
    (Evaluating, SiloLeft): leave,
    (Stopped, SiloLeft): leave,
    (Finished, SiloLeft): leave,
    (Gathering, DeadlinePassed): gathering_deadline,
    (Collecting, DeadlinePassed): collecting_deadline,
    (Masking, DeadlinePassed): masking_deadline,
    (Evaluating, DeadlinePassed): evaluating_deadline,
    (Collecting, UpdateCommitted): commit,
    (Aggregating, UpdateCommitted): commit_again,
    (Collecting, SiloTrained): silo_trained,
    (Masking, SiloTrained): trained_again,
    (Masking, MaskingOpened): masking_opened,
    (Masking, MaskAnswered): mask_answered,
    (Aggregating, MaskAnswered): answered_late,
    (Collecting, SiloDeclined): decline_training,
    (Masking, SiloDeclined): decline_masking,
    (Evaluating, SiloDeclined): decline_evaluation,
    (Aggregating, Aggregated): sum_made,
    (Aggregating, AggregationFailed): aggregation_failed,
    (Aggregating, BudgetExhausted): budget_exhausted,
    (Evaluating, EvaluationReported): take_report,
    (Idle, Resumed): resume_idle,
    (Gathering, Resumed): resume,
    (Collecting, Resumed): resume,
    (Masking, Resumed): resume,
    (Aggregating, Resumed): resume,
    (Evaluating, Resumed): resume,
    (Stopped, Resumed): resume,
    (Finished, Resumed): resume,
}
