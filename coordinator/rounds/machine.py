"""The round machine: `step(state, event) -> (state, effects)`, by one table.

One rule for time: each phase has one deadline and one quorum, `min_silos`.

- Gathering opens when it is started and the whole population is ready, or when its deadline has passed, which runs from
  the moment a quorum is ready. Below the quorum it waits. The cohort is whoever is ready at the opening. Who was absent at such a
  deadline is waited for no more until it has declared readiness: a silo that never starts costs a plan one deadline, not one a round.
- Under secure aggregation a quorum is ready when a masked sum can come out of who is: of whole release groups, with silos enough.
  So it waits for silos of a group that is not whole, for other groups, or for a silo that was left out and may take part again.
- Collecting ends when everyone in the cohort has committed or declined, or at its deadline: with a quorum of updates
  they are aggregated, else the attempt is abandoned and the same round gathers again, from the same model. It is also
  abandoned as soon as so many have declined that no quorum, or no masked sum, can come together. Leaving drops nobody: a silo may return
  and commit until the deadline. A late silo is dropped for the round, not for good.
- Under secure aggregation Collecting ends the same way, with silos that have trained in place of updates, and Masking
  follows: each phase of the protocol has the deadline anew, and its own quorum (security/lorica_security/secure_aggregation). An attempt
  that ends before a share was asked for is tried again, like any other. Later, silos have answered for this round and will
  not do so again: the plan goes on with the next round. Who spoilt an attempt by more than silence is left out of the
  rest of that round and of the next one; of a dispute in which one of two must have lied, one of the two is.
- A silo that declines must declare readiness anew before it is in a cohort, so that a refusal cannot spin the rounds.
- Aggregation that fails on one silo's update goes on without it, or the attempt is abandoned if no quorum is left.
- Under silo-level privacy the plan is finished, with the model that it has, when another sum would cost more than it promises.
- Under secure aggregation nobody evaluates in a phase of its own: the scores of the model that a round begins with are in the sum that
  ends it. Where the last model is to be scored, a closing round follows the plan's last one, in which nobody trains.
- Evaluating ends when everyone in the cohort has reported or declined, or at its deadline. The cohort is those whose
  updates were summed (before round 1: whoever is ready). Below a quorum of reports the model cannot become the best.
- While the operator has paused the plan, no attempt opens; the one under way goes on to its end.
- A silo that the operator revokes is in no cohort any more. What it sent for the attempt under way is dropped, as if it had declined;
  under masks it is a drop-out. A sum that is being made is finished; one that a stop put off is made without that silo, unless masks
  forbid it.
- A restart empties `ready`. Of the running phase's deadline what was left goes on: time during which no silo could reach the
  coordinator is not held against any of them, and restarts, however many, put no deadline off.

A handler checks everything, then returns; it raises and nothing has changed. WrongTime: the event does not fit this
phase, round or attempt. Conflict: it contradicts what this silo has done before. The same again is acknowledged: the
state stays, without effects.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from coordinator.rounds.cohort import cohort_of, everyone_is_ready, named, outstanding
from coordinator.rounds.effects import (
    Aggregate,
    ArmDeadline,
    Cause,
    DisarmDeadline,
    DiscardUpdates,
    Effect,
    EvaluationAbandoned,
    EvaluationAccepted,
    EvaluationClosed,
    EvaluationOpened,
    MaskedAccepted,
    ModelMade,
    OpenMasking,
    PlanBegun,
    RetainModels,
    RoundAbandoned,
    RoundClosed,
    RoundOpened,
    SiloDropped,
    SiloLastSeen,
    UpdateAccepted,
)
from coordinator.rounds.events import (
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
from coordinator.rounds.scores import BestModel, macro_average
from coordinator.rounds.secure_attempt import MaskedSum, MaskedVector, SecureAttempt, opened
from coordinator.rounds.states import (
    Aggregating,
    Barred,
    Collecting,
    Course,
    Declined,
    Dispute,
    Evaluating,
    Finished,
    Gathering,
    Idle,
    Masking,
    Opening,
    Report,
    State,
    Stopped,
    Task,
    deadline_of,
    groups_of,
    population_of,
)
from coordinator.rounds.updates import CommittedUpdate, IncludedUpdate, Outcome
from coordinator.rounds.which_plan import check_start
from coordinator.rounds.whole_groups import wanting
from lorica_security.errors import AuthorisationError, Conflict, MalformedMessage, StateError, WrongTime
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator import effects as protocol_effects
from lorica_security.secure_aggregation.coordinator import events as protocol_events
from lorica_security.secure_aggregation.coordinator import requests as protocol_requests
from lorica_security.secure_aggregation.coordinator import states as protocol_states
from lorica_security.secure_aggregation.messages import Complaint, MaskedInput, Reveal
from silo_wire.canonical import Digest
from silo_wire.messages import DeclineReason, RoundKey

Step = tuple[State, tuple[Effect, ...]]
Running = Gathering | Collecting | Masking | Aggregating | Evaluating | Stopped | Finished

STOP_REASON = "the operator stopped the plan"
SPENT = "a further round would cost more epsilon than the plan promises"


def step(state: State, event: Event) -> Step:
    """The state after `event`, and what follows from it; raises WrongTime, Conflict, StateError or AuthorisationError."""
    handler = TABLE.get((type(state), type(event)))
    if handler is None:
        raise WrongTime(f"{type(event).__name__} does not fit the phase {state.phase}: nothing was changed")
    after, effects = handler(state, event)
    at = deadline_of(after)
    if at != deadline_of(state) or isinstance(event, Resumed):
        effects = (*effects, DisarmDeadline() if at is None else ArmDeadline(at=at))
    return after, effects


# --- the plan begins, stops, goes on ------------------------------------------------------------------------------


def _begin(before: State, event: PlanOffered | PlanStarted, *, started: bool) -> Step:
    """With the silos and the release groups that there were `before`."""
    terms = event.terms
    course = Course(terms=terms, population=population_of(before), groups=groups_of(before), model=event.model)
    if terms.evaluation_due(0):
        opening = Opening(round=0, attempt=1, task=Task.EVALUATION)
    else:
        opening = Opening(round=1, attempt=1, task=Task.TRAINING)
    begun = PlanBegun(plan=terms.plan, name=terms.name)
    made = ModelMade(plan=terms.plan, round=0, model=event.model, signature=event.signature)
    after, effects = _gather(course, opening, started=started, now=event.now)
    return after, (begun, made, *effects)


def _offer(state: Idle, event: PlanOffered) -> Step:
    return _begin(state, event, started=event.terms.start_when_ready)


def _start_idle(state: Idle, event: PlanStarted) -> Step:
    return _begin(state, event, started=True)


def _start_gathering(state: Gathering, event: PlanStarted) -> Step:
    if not _is_same_plan(state, event):
        _check_start(state, event)
        return _begin(state, event, started=True)
    if state.started and _unbarred(state.course) == state.course:
        return state, ()
    return _gather(_unbarred(state.course), state.opening, started=True, now=event.now)


def _start_running(state: Collecting | Masking | Aggregating | Evaluating, event: PlanStarted) -> Step:
    _check_start(state, event)
    return replace(state, course=replace(state.course, paused=False)), ()


def _start_stopped(state: Stopped, event: PlanStarted) -> Step:
    _check_start(state, event)
    if not _is_same_plan(state, event):
        after, effects = _begin(state, event, started=True)
        return after, (*_given_up(state, event.now), *effects)
    course, opening = _unbarred(state.course), state.opening
    if state.masked is not None:
        return _unmask(course, opening.round, opening.attempt, state.masked)
    if state.updates:
        return _aggregate(course, opening.round, opening.attempt, state.updates)
    return _gather(course, opening, started=True, now=event.now)


def _unbarred(course: Course) -> Course:
    """The operator's word is that all take part again, and now."""
    return replace(course, barred=(), disputes=(), unawaited=frozenset(), paused=False)


def _given_up(state: Stopped, now: float) -> tuple[Effect, ...]:
    """The attempt whose updates were kept through the stop, when another plan takes its place."""
    if not state.updates and state.masked is None:
        return ()
    key = state.course.key(state.opening.round, state.opening.attempt)
    return RoundAbandoned(key=key, cause=Cause.REPLACED, reason="another plan was started"), DiscardUpdates(key=key)


def _start_finished(state: Finished, event: PlanStarted) -> Step:
    if _is_same_plan(state, event):
        raise StateError(
            f"plan {event.terms.name} is finished: `coordinator plan start NAME` starts another; change its seed or its name to run it again "
            "from the beginning"
        )
    return _begin(state, event, started=True)


def _is_same_plan(state: Running, event: PlanStarted) -> bool:
    return state.course.terms.plan == event.terms.plan


def _check_start(state: Running, event: PlanStarted) -> None:
    check_start(state, plan=event.terms.plan, name=event.terms.name, leave=event.leave)


def _stop_gathering(state: Gathering, event: PlanStopped) -> Step:
    return Stopped(course=state.course, opening=state.opening), ()


def _stop_collecting(state: Collecting, event: PlanStopped) -> Step:
    opening = Opening(round=state.round, attempt=state.attempt + 1, task=Task.TRAINING)
    abandoned = RoundAbandoned(key=state.key, cause=Cause.STOPPED, reason=STOP_REASON)
    return Stopped(course=state.course, opening=opening), (abandoned, DiscardUpdates(key=state.key))


def _stop_masking(state: Masking, event: PlanStopped) -> Step:
    abandoned = RoundAbandoned(key=state.key, cause=Cause.STOPPED, reason=STOP_REASON)
    opening = _after_masking(state)
    after = Finished(course=state.course) if opening is None else Stopped(course=state.course, opening=opening)
    return after, (abandoned, DiscardUpdates(key=state.key))


def _stop_aggregating(state: Aggregating, event: PlanStopped) -> Step:
    opening = Opening(round=state.round, attempt=state.attempt, task=Task.TRAINING)
    return Stopped(course=state.course, opening=opening, updates=state.updates, masked=state.masked), ()


def _stop_evaluating(state: Evaluating, event: PlanStopped) -> Step:
    opening = Opening(round=state.round, attempt=state.attempt + 1, task=Task.EVALUATION)
    abandoned = EvaluationAbandoned(key=state.key, reason=STOP_REASON)
    return Stopped(course=state.course, opening=opening), (abandoned,)


def _stop_stopped(state: Stopped, event: PlanStopped) -> Step:
    return state, ()


def _pause(state: Running, event: PlanPaused) -> Step:
    if isinstance(state, Stopped | Finished):
        raise StateError(f"plan {state.course.terms.name} is {state.phase}: there is nothing to pause")
    return _with_course(state, replace(state.course, paused=True), event.now)


def _go_on(state: Running, event: PlanResumed) -> Step:
    if not state.course.paused:
        raise StateError(
            f"plan {state.course.terms.name} is not paused; after a stop, `coordinator plan start` goes on with it"
        )
    return _with_course(state, replace(state.course, paused=False), event.now)


# --- silos come and go --------------------------------------------------------------------------------------------


def _enrol_idle(state: Idle, event: SiloEnrolled) -> Step:
    return replace(state, population=state.population | {event.silo}), ()


def _enrol(state: Running, event: SiloEnrolled) -> Step:
    return _with_course(state, replace(state.course, population=state.course.population | {event.silo}), event.now)


def _regroup_idle(state: Idle, event: GroupsChanged) -> Step:
    return replace(state, groups=event.groups), ()


def _regroup(state: Running, event: GroupsChanged) -> Step:
    return _with_course(state, replace(state.course, groups=event.groups), event.now)


def _revoke_idle(state: Idle, event: SiloRevoked) -> Step:
    return replace(state, population=state.population - {event.silo}), ()


def _revoke(state: Running, event: SiloRevoked) -> Step:
    course = state.course
    left = replace(
        course,
        population=course.population - {event.silo},
        ready=course.ready - {event.silo},
        unawaited=course.unawaited - {event.silo},
    )
    if isinstance(state, Collecting | Masking | Evaluating):
        return _without(replace(state, course=left), event)
    if isinstance(state, Stopped):
        return _without_in_what_was_stopped(replace(state, course=left), event)
    return _with_course(state, left, event.now)


def _without_in_what_was_stopped(state: Stopped, event: SiloRevoked) -> Step:
    """The sum that a stop put off is made without this silo, or given up where no quorum is left."""
    updates = tuple(update for update in state.updates if update.silo != event.silo)
    if updates == state.updates:
        return state, ()
    opening = state.opening
    key = state.course.key(opening.round, opening.attempt)
    dropped = SiloDropped(key=key, silo=event.silo, outcome="refused", detail=event.reason)
    if len(updates) >= state.course.terms.min_silos:
        return replace(state, updates=updates), (dropped,)
    abandoned = RoundAbandoned(key=key, cause=Cause.REVOKED, reason=f"silo {event.silo} was {event.reason}")
    after = Stopped(course=state.course, opening=replace(opening, attempt=opening.attempt + 1))
    return after, (dropped, abandoned, DiscardUpdates(key=key))


def _without(state: Collecting | Masking | Evaluating, event: SiloRevoked) -> Step:
    """The attempt goes on without this silo, if it was in it."""
    silo = event.silo
    cohort = state.silos if isinstance(state, Masking) else state.cohort
    if silo not in cohort or any(item.silo == silo for item in state.declined):
        return state, ()
    declined = (*state.declined, Declined(silo=silo, reason=DeclineReason.REVOKED, detail=event.reason))
    dropped = SiloDropped(key=state.key, silo=silo, outcome="refused", detail=event.reason)
    after: State
    match state:
        case Collecting():
            updates = tuple(update for update in state.updates if update.silo != silo)
            trained = tuple(name for name in state.trained if name != silo)
            after, effects = _settle_collecting(
                replace(state, updates=updates, trained=trained, declined=declined), event.now
            )
        case Masking(secure=None):
            after, effects = replace(state, declined=declined), ()
        case Masking(secure=SecureAttempt() as secure):
            after, effects = replace(state, declined=declined), ()
            if protocol_requests.takes_part(secure.state, silo):
                after, effects = _protocol_step(
                    after, protocol_events.SiloDropped(silo, "revoked"), event.now, told=silo
                )
        case Evaluating():
            reports = tuple(report for report in state.reports if report.silo != silo)
            return _settle_evaluating(replace(state, reports=reports, declined=declined), event.now)
    return after, (dropped, *effects)


def _declare(state: Running, event: ReadinessDeclared) -> Step:
    _check_enrolled(state, event.silo)
    course, silo = state.course, frozenset({event.silo})
    if event.ready:
        course = replace(course, ready=course.ready | silo, unawaited=course.unawaited - silo)
    else:
        course = replace(course, ready=course.ready - silo)
    return _with_course(state, course, event.now)


def _leave_idle(state: Idle, event: SiloLeft) -> Step:
    return state, (SiloLastSeen(silo=event.silo),)


def _leave(state: Running, event: SiloLeft) -> Step:
    course = replace(state.course, ready=state.course.ready - {event.silo})
    after, effects = _with_course(state, course, event.now)
    return after, (SiloLastSeen(silo=event.silo), *effects)


def _with_course(state: Running, course: Course, now: float) -> Step:
    if isinstance(state, Gathering):
        return _gather(course, state.opening, started=state.started, deadline=state.deadline, left=state.left, now=now)
    return replace(state, course=course), ()


# --- gathering ----------------------------------------------------------------------------------------------------


def _gather(
    course: Course,
    opening: Opening,
    *,
    started: bool,
    now: float,
    deadline: float | None = None,
    left: float | None = None,
) -> Step:
    """Wait for silos, or open at once when all are there; `deadline` is the one that runs already, `left` as in Gathering."""
    left_out = _left_out(course, opening)
    if not started or course.paused or not _suffice(course, opening.task, course.ready - left_out):
        deadline = None
    elif everyone_is_ready(population=course.population - course.unawaited - left_out, ready=course.ready - left_out):
        return _open(course, opening, now)
    elif deadline is None:
        deadline, left = now + (course.terms.gathering_deadline_s if left is None else left), None
    return Gathering(course=course, opening=opening, started=started, deadline=deadline, left=left), ()


def _suffice(course: Course, task: Task, silos: frozenset[SiloName]) -> bool:
    """Whether a quorum is among `silos`, and what is asked of them can come to something."""
    if len(silos) < course.terms.min_silos:
        return False
    return task is not Task.TRAINING or wanting(course, silos) is None


def _left_out(course: Course, opening: Opening) -> frozenset[SiloName]:
    return course.barred_in(opening.round) if opening.task is Task.TRAINING else frozenset()


def _gathering_deadline(state: Gathering, event: DeadlinePassed) -> Step:
    _check_deadline(state, event)
    course = state.course
    absent = course.population - course.ready - _left_out(course, state.opening)
    return _open(replace(course, unawaited=course.unawaited | absent), state.opening, event.now)


def _open(course: Course, opening: Opening, now: float) -> Step:
    cohort = cohort_of(course.ready - _left_out(course, opening))
    if opening.task is Task.EVALUATION:
        return _evaluate(course, opening.round, opening.attempt, cohort, now)
    state = Collecting(
        course=course,
        round=opening.round,
        attempt=opening.attempt,
        cohort=cohort,
        deadline=now + course.terms.training_deadline_s,
    )
    return state, (RoundOpened(key=state.key, cohort=cohort, model=course.model),)


# --- collecting ---------------------------------------------------------------------------------------------------


def check_may_commit(state: State, key: RoundKey, silo: SiloName) -> None:
    """Raise unless an update of `silo` for `key` would be taken now: WrongTime, or Conflict after a decline."""
    if not isinstance(state, Collecting):
        raise WrongTime(
            f"an update for round {key.round} attempt {key.attempt} does not fit the phase {state.phase}: "
            "wait for the next order"
        )
    _check_key(state, key)
    if state.course.terms.secure_aggregation:
        raise WrongTime(f"round {key.round} takes masked vectors alone: an update in the clear is not wanted")
    _check_may_work(state, silo)


def check_may_send_masked(state: State, key: RoundKey, silo: SiloName) -> SecureAttempt:
    """The attempt of secure aggregation in which a masked vector of `silo` would be taken now; raises WrongTime."""
    if not isinstance(state, Masking):
        raise WrongTime(
            f"a masked vector for round {key.round} attempt {key.attempt} does not fit the phase {state.phase}: "
            "wait for the next order"
        )
    _check_key(state, key)
    # Not isinstance: the protocol's later phases are kinds of this one.
    if state.secure is None or type(state.secure.state) is not protocol_states.Masking:
        raise WrongTime(f"a masked vector of silo {silo} does not fit the present phase of secure aggregation")
    if not protocol_requests.is_awaited(state.secure.state, silo):
        raise WrongTime(f"no masked vector of silo {silo} is waited for in round {key.round} attempt {key.attempt}")
    return state.secure


def _check_may_work(state: Collecting, silo: SiloName) -> None:
    _check_in_cohort(state, silo)
    if any(item.silo == silo for item in state.declined):
        raise Conflict(f"silo {silo} has declined round {state.round} attempt {state.attempt}: wait for the next order")


def _commit(state: Collecting, event: UpdateCommitted) -> Step:
    update = event.update
    check_may_commit(state, event.key, update.silo)
    if _is_repeated(state.updates, update):
        return state, ()
    updates = tuple(sorted((*state.updates, update), key=lambda item: item.silo))
    accepted = UpdateAccepted(key=state.key, update=update, signature=event.signature)
    after, effects = _settle_collecting(replace(state, updates=updates), event.now)
    return after, (accepted, *effects)


def _commit_again(state: Aggregating, event: UpdateCommitted) -> Step:
    _check_key(state, event.key)
    if not _is_repeated(state.updates, event.update):
        raise WrongTime(f"round {state.round} is closed: an update of silo {event.update.silo} came late")
    return state, ()


def _is_repeated(updates: tuple[CommittedUpdate, ...], update: CommittedUpdate) -> bool:
    for held in updates:
        if held.silo == update.silo:
            if held.digest != update.digest:
                raise Conflict(f"silo {update.silo} has committed update {held.digest} and sends {update.digest}")
            return True
    return False


def _trained(state: Collecting, event: SiloTrained) -> Step:
    _check_key(state, event.key)
    if not state.course.terms.secure_aggregation:
        raise WrongTime(f"round {state.round} takes updates in the clear: nothing is masked in it")
    _check_may_work(state, event.silo)
    if event.model != state.course.model:
        raise WrongTime(f"silo {event.silo} trained from model {event.model}, the round's is {state.course.model}")
    if event.silo in state.trained:
        return state, ()
    return _settle_collecting(replace(state, trained=tuple(sorted((*state.trained, event.silo)))), event.now)


def _trained_again(state: Masking, event: SiloTrained) -> Step:
    _check_key(state, event.key)
    if event.silo not in state.silos:
        raise WrongTime(f"round {state.round} masks already: silo {event.silo} has trained too late for it")
    return state, ()


def _decline_training(state: Collecting, event: SiloDeclined) -> Step:
    _check_key(state, event.key)
    _check_in_cohort(state, event.silo)
    if any(item.silo == event.silo for item in state.declined):
        return state, ()
    if any(item.silo == event.silo for item in state.updates):
        raise Conflict(f"silo {event.silo} has committed its update for round {state.round}: it cannot decline it")
    after, effects = _settle_collecting(
        replace(
            state,
            course=_unready(state.course, event.silo),
            trained=tuple(silo for silo in state.trained if silo != event.silo),
            declined=(*state.declined, _declined(event)),
        ),
        event.now,
    )
    return after, (_dropped(event), *effects)


def _settle_collecting(state: Collecting, now: float) -> Step:
    least = state.course.terms.min_silos
    left = frozenset(outstanding(state.cohort, (item.silo for item in state.declined)))
    lacking = wanting(state.course, left) if state.declined else None
    if len(left) < least or lacking is not None:
        says = f"fewer than {least} silos are left" if lacking is None else lacking.in_words
        reasons = "; ".join(f"{item.silo}: {item.reason.value} {item.detail}".rstrip() for item in state.declined)
        return _abandon(state, Cause.DECLINED, f"{says}, declined have {reasons}", now)
    if _missing(state):
        return state, ()
    return _collected(state, now)


def _collected(state: Collecting, now: float) -> Step:
    if state.course.terms.secure_aggregation:
        return _mask(state, now)
    return _aggregate(state.course, state.round, state.attempt, state.updates)


def _missing(state: Collecting) -> tuple[SiloName, ...]:
    done = (*state.trained, *(item.silo for item in state.updates))
    return outstanding(state.cohort, done, (item.silo for item in state.declined))


def _collecting_deadline(state: Collecting, event: DeadlinePassed) -> Step:
    _check_deadline(state, event)
    late = _missing(state)
    dropped = tuple(
        SiloDropped(key=state.key, silo=silo, outcome="late", detail="no update before the deadline") for silo in late
    )
    least, done = state.course.terms.min_silos, len(state.updates) + len(state.trained)
    if done >= least:
        after, effects = _collected(state, event.now)
    else:
        after, effects = _abandon(
            state, Cause.LATE, f"{done} of at least {least} updates at the deadline, late: {named(late)}", event.now
        )
    return after, (*dropped, *effects)


def _abandon(state: Collecting | Masking | Aggregating, cause: Cause, reason: str, now: float) -> Step:
    if isinstance(state, Masking) or (isinstance(state, Aggregating) and state.masked is not None):
        opening = _after_masking(state)
    else:
        opening = _again(state)
    after: State
    effects: tuple[Effect, ...] = ()
    if opening is None:
        after = Finished(course=state.course)
    else:
        after, effects = _gather(state.course, opening, started=True, now=now)
    abandoned = RoundAbandoned(key=state.key, cause=cause, reason=reason)
    return after, (abandoned, DiscardUpdates(key=state.key), *effects)


def _again(state: Collecting | Masking | Aggregating) -> Opening:
    return Opening(round=state.round, attempt=state.attempt + 1, task=Task.TRAINING)


# --- masking ------------------------------------------------------------------------------------------------------


def _mask(state: Collecting, now: float) -> Step:
    after = Masking(
        course=state.course,
        round=state.round,
        attempt=state.attempt,
        silos=state.trained,
        deadline=now + state.course.terms.masking_deadline_s,
    )
    return after, (_opening(after),)


def _opening(state: Masking) -> OpenMasking:
    closing = state.course.terms.timetable.is_closing(state.round)
    return OpenMasking(key=state.key, model=state.course.model, silos=state.silos, closing=closing)


def _masking_opened(state: Masking, event: MaskingOpened) -> Step:
    _check_key(state, event.key)
    if state.secure is not None:
        raise WrongTime(f"secure aggregation of round {state.round} attempt {state.attempt} is open already")
    try:
        secure, _ = opened(event.opening, event.identities, event.successions)
    except MalformedMessage as error:
        return _abandon(state, Cause.MASKING, str(error), event.now)
    after: Step = replace(state, secure=secure, deadline=event.now + state.course.terms.masking_deadline_s), ()
    for silo in (item.silo for item in state.declined):  # before there was anything to drop them from
        current, effects = after
        if isinstance(current, Masking):
            further, more = _protocol_step(current, protocol_events.SiloDropped(silo, "declined"), event.now, told=silo)
            after = further, (*effects, *more)
    return after


def _answered(state: Masking, event: MaskAnswered) -> Step:
    _check_key(state, event.key)
    if state.secure is None:
        raise WrongTime(f"secure aggregation of round {state.round} attempt {state.attempt} is not open yet")
    after, effects = _protocol_step(state, event.answer, event.now)
    answer = event.answer
    if isinstance(answer, MaskedInput) and not any(isinstance(it, SiloDropped) for it in effects):
        vector = MaskedVector(silo=answer.silo, digest=Digest(answer.vector.hex()))
        accepted = MaskedAccepted(key=state.key, vector=vector, signature=answer.signature)
        return after, (accepted, *effects) if after != state else ()
    return after, effects


def _answered_late(state: Aggregating, event: MaskAnswered) -> Step:
    """More shares than were needed to unmask; nobody's fault."""
    _check_key(state, event.key)
    if state.masked is None or not isinstance(event.answer, Reveal):
        raise WrongTime(f"round {state.round} is closed: the answer of silo {_sender(event)} came late")
    return state, ()


def _sender(event: MaskAnswered) -> SiloName:
    return event.answer.silo


def _decline_masking(state: Masking, event: SiloDeclined) -> Step:
    _check_key(state, event.key)
    if event.silo not in state.silos:
        raise WrongTime(f"silo {event.silo} is not in the cohort of round {state.round} attempt {state.attempt}")
    if any(item.silo == event.silo for item in state.declined):
        return state, ()
    state = replace(state, course=_unready(state.course, event.silo), declined=(*state.declined, _declined(event)))
    if state.secure is None:
        return state, (_dropped(event),)
    if not protocol_requests.takes_part(state.secure.state, event.silo):
        return state, ()  # was dropped before, and is on record for that
    dropped = protocol_events.SiloDropped(event.silo, "declined")
    after, effects = _protocol_step(state, dropped, event.now, told=event.silo)
    return after, (_dropped(event), *effects)


def _masking_deadline(state: Masking, event: DeadlinePassed) -> Step:
    _check_deadline(state, event)
    if state.secure is None:  # the coordinator itself could not open it; it keeps trying
        return replace(state, deadline=event.now + state.course.terms.masking_deadline_s), ()
    return _protocol_step(state, protocol_events.PhaseClosed(state.secure.state.phase), event.now)


def _protocol_step(state: Masking, event: protocol_events.Event, now: float, *, told: SiloName | None = None) -> Step:
    """`told`: whose silence is on record already."""
    assert state.secure is not None
    before = state.secure.state
    secure, effects = state.secure.stepped(event)
    course, records = state.course, list[Effect]()
    for blame in (effect for effect in effects if isinstance(effect, protocol_effects.Blame)):
        silent = blame.offence is protocol_effects.Offence.SILENCE
        if blame.offence is protocol_effects.Offence.DISPUTED:
            course = _disputing(course, event, state.round)
        elif not silent:
            course = _barring(course, blame.silo, state.round)
        if blame.silo != told:
            detail = blame.detail if silent else f"{blame.offence.value}: {blame.detail}"
            outcome = "late" if silent else "refused"
            records.append(SiloDropped(key=state.key, silo=blame.silo, outcome=outcome, detail=detail))
    after: State
    then = replace(state, course=course)
    match secure.state:
        case protocol_states.Abandoned(reason=reason):
            after, further = _abandon(then, Cause.MASKING, reason, now)
        case protocol_states.Unmasked():
            assert isinstance(before, protocol_states.Unmasking)
            vectors = tuple(
                MaskedVector(silo=item.silo, digest=Digest(item.vector.hex()))
                for item in before.inputs
                if item.silo in before.survivors.silos
            )
            masked = MaskedSum(vectors=vectors, attempt=secure)
            after, further = _unmask(course, state.round, state.attempt, masked)
        case _:
            deadline = state.deadline
            if secure.state.phase != before.phase:
                deadline = now + course.terms.masking_deadline_s
            after, further = replace(then, secure=secure, deadline=deadline), ()
    return after, (*records, *further)


def _barring(course: Course, silo: SiloName, round_number: int) -> Course:
    others = tuple(item for item in course.barred if item.silo != silo and item.round >= round_number)
    return replace(course, barred=(*others, Barred(silo=silo, round=round_number + 1)))


def _disputing(course: Course, complaint: protocol_events.Event, round_number: int) -> Course:
    assert isinstance(complaint, Complaint), "nothing else can be in dispute"
    dispute = Dispute(accuser=complaint.silo, dealer=complaint.dealer, round=round_number + 1)
    others = (it for it in course.disputes if it.round >= round_number and set(it.silos) != set(dispute.silos))
    return replace(course, disputes=(*others, dispute))


def _after_masking(state: Masking | Aggregating) -> Opening | None:
    """What follows when no sum comes out: the round again, or the next one when silos may have answered for this one.

    None: that was the plan's last round.
    """
    if isinstance(state, Masking) and not (
        state.secure is not None and isinstance(state.secure.state, protocol_states.Unmasking)
    ):
        return _again(state)
    if state.round >= state.course.terms.timetable.last_round:
        return None
    return Opening(round=state.round + 1, attempt=1, task=Task.TRAINING)


# --- aggregating --------------------------------------------------------------------------------------------------


def _aggregate(course: Course, round_number: int, attempt: int, updates: tuple[CommittedUpdate, ...]) -> Step:
    state = Aggregating(course=course, round=round_number, attempt=attempt, updates=updates)
    return state, (_aggregation(state),)


def _unmask(course: Course, round_number: int, attempt: int, masked: MaskedSum) -> Step:
    state = Aggregating(course=course, round=round_number, attempt=attempt, masked=masked)
    return state, (_aggregation(state),)


def _aggregation(state: Aggregating) -> Aggregate:
    return Aggregate(
        key=state.key,
        base_model=state.course.model,
        updates=state.updates,
        masked=state.masked,
        closing=state.course.terms.timetable.is_closing(state.round),
    )


def _aggregated(state: Aggregating, event: Aggregated) -> Step:
    _check_key(state, event.key)
    result, (course, effects) = event.result, _scored_in_the_sum(state, event)
    if result.outcome is Outcome.APPLIED:
        course = replace(course, included=_included(course, state.updates))
    if result.outcome is Outcome.APPLIED and result.model != course.model:
        course = replace(course, model=result.model, model_round=state.round)
        made = ModelMade(plan=course.terms.plan, round=state.round, model=result.model, signature=event.signature)
        effects.append(made)
    masked = None if state.masked is None else state.masked.silos
    effects.append(RoundClosed(key=state.key, result=result, updates=state.updates, masked=masked))
    effects.append(DiscardUpdates(key=state.key))
    effects.append(_retained(course))
    if result.last and state.round < course.terms.rounds:  # of a plan that has no evaluations
        return Finished(course=course, reason=SPENT), tuple(effects)
    if course.terms.evaluation_due(state.round):
        after, further = _evaluate(course, state.round, state.attempt, state.silos, event.now)
    else:
        after, further = _next(course, state.round, event.now)
    return after, (*effects, *further)


def _scored_in_the_sum(state: Aggregating, event: Aggregated) -> tuple[Course, list[Effect]]:
    """What the silos of a masked sum told of the model that they began with, where it is one to be scored."""
    course, made_in = state.course, state.round - 1
    if state.masked is None or not course.terms.timetable.scores(made_in):
        return course, []
    scores = event.result.scores
    told = scores is not None and scores.questions > 0
    score = BestModel.summed(course.model, made_in, scores) if scores is not None and told else None
    counted = told and len(state.silos) >= course.terms.min_silos
    is_best = score is not None and counted and score.beats(course.best)
    key, effects = course.key(made_in, 1), list[Effect]()
    if made_in == 0:  # no round of its own had a row for it
        effects.append(EvaluationOpened(key=key, cohort=state.silos, model=course.model))
    closed = EvaluationClosed(
        key=key, reports=(), score=score, macro=None, scores=scores, counted=counted, is_best=is_best
    )
    return replace(course, best=score) if is_best else course, [*effects, closed]


def _included(course: Course, updates: tuple[CommittedUpdate, ...]) -> tuple[IncludedUpdate, ...]:
    newest = {one.silo: one for one in course.included}
    newest.update((update.silo, IncludedUpdate(silo=update.silo, digest=update.digest)) for update in updates)
    return tuple(newest[silo] for silo in sorted(newest))


def _aggregation_failed(state: Aggregating, event: AggregationFailed) -> Step:
    _check_key(state, event.key)
    if event.silo is None and state.masked is not None:
        return _abandon(state, Cause.UNUSABLE, event.reason, event.now)
    left = tuple(update for update in state.updates if update.silo != event.silo)
    if event.silo is None or event.silo not in state.silos:
        raise WrongTime(f"silo {event.silo} has no update in round {state.round} attempt {state.attempt}")
    refused = SiloDropped(key=state.key, silo=event.silo, outcome="refused", detail=event.reason)
    if state.masked is None and len(left) >= state.course.terms.min_silos:
        after, effects = _aggregate(state.course, state.round, state.attempt, left)
    else:
        after, effects = _abandon(
            state, Cause.UNUSABLE, f"the update of silo {event.silo} was refused: {event.reason}", event.now
        )
    return after, (refused, *effects)


def _budget_exhausted(state: Aggregating, event: BudgetExhausted) -> Step:
    _check_key(state, event.key)
    abandoned = RoundAbandoned(key=state.key, cause=Cause.BUDGET_SPENT, reason=event.reason)
    return Finished(course=state.course, reason=SPENT), (abandoned, DiscardUpdates(key=state.key))


def _retained(course: Course) -> RetainModels:
    return RetainModels(plan=course.terms.plan, models=frozenset({course.model, course.best_model}))


# --- evaluating ---------------------------------------------------------------------------------------------------


def _evaluate(course: Course, round_number: int, attempt: int, cohort: tuple[SiloName, ...], now: float) -> Step:
    state = Evaluating(
        course=course,
        round=round_number,
        attempt=attempt,
        cohort=cohort,
        deadline=now + course.terms.evaluation_deadline_s,
    )
    return state, (EvaluationOpened(key=state.key, cohort=cohort, model=course.model),)


def _report(state: Evaluating, event: EvaluationReported) -> Step:
    _check_key(state, event.key)
    _check_in_cohort(state, event.silo)
    if event.model != state.course.model:
        raise WrongTime(f"silo {event.silo} reports on model {event.model}, asked for was {state.course.model}")
    for held in state.reports:
        if held.silo == event.silo:
            if held.evaluation != event.evaluation:
                raise Conflict(f"silo {event.silo} has reported another evaluation of round {state.round}")
            return state, ()
    if any(item.silo == event.silo for item in state.declined):
        raise Conflict(f"silo {event.silo} has declined the evaluation of round {state.round}")
    report = Report(silo=event.silo, evaluation=event.evaluation)
    reports = tuple(sorted((*state.reports, report), key=lambda item: item.silo))
    accepted = EvaluationAccepted(key=state.key, model=event.model, report=report)
    after, effects = _settle_evaluating(replace(state, reports=reports), event.now)
    return after, (accepted, *effects)


def _decline_evaluation(state: Evaluating, event: SiloDeclined) -> Step:
    _check_key(state, event.key)
    _check_in_cohort(state, event.silo)
    if any(item.silo == event.silo for item in state.declined):
        return state, ()
    if any(item.silo == event.silo for item in state.reports):
        raise Conflict(f"silo {event.silo} has reported its evaluation of round {state.round}: it cannot decline it")
    declined = (*state.declined, _declined(event))
    return _settle_evaluating(replace(state, course=_unready(state.course, event.silo), declined=declined), event.now)


def _settle_evaluating(state: Evaluating, now: float) -> Step:
    missing = outstanding(state.cohort, (item.silo for item in state.reports), (item.silo for item in state.declined))
    return (state, ()) if missing else _close_evaluation(state, now)


def _evaluating_deadline(state: Evaluating, event: DeadlinePassed) -> Step:
    _check_deadline(state, event)
    return _close_evaluation(state, event.now)


def _close_evaluation(state: Evaluating, now: float) -> Step:
    course = state.course
    evaluations = [report.evaluation for report in state.reports]
    score = BestModel.scored(course.model, state.round, evaluations) if evaluations else None
    counted = len(evaluations) >= course.terms.min_silos
    is_best = score is not None and counted and score.beats(course.best)
    if is_best:
        course = replace(course, best=score)
    closed = EvaluationClosed(
        key=state.key,
        reports=state.reports,
        score=score,
        macro=macro_average(evaluations) if evaluations else None,
        counted=counted,
        is_best=is_best,
    )
    after, effects = _next(course, state.round, now)
    return after, (closed, *((_retained(course),) if is_best else ()), *effects)


def _next(course: Course, done: int, now: float) -> Step:
    if done >= course.terms.timetable.last_round:
        return Finished(course=course), ()
    return _gather(course, Opening(round=done + 1, attempt=1, task=Task.TRAINING), started=True, now=now)


# --- the coordinator starts again ---------------------------------------------------------------------------------


def _resume_idle(state: Idle, event: Resumed) -> Step:
    return replace(state, population=event.population, groups=event.groups), ()


def _resume(state: Running, event: Resumed) -> Step:
    course = replace(
        state.course,
        population=event.population,
        groups=event.groups,
        ready=frozenset(),
        unawaited=state.course.unawaited & event.population,
    )
    retained = _retained(course)
    match state:
        case Gathering(deadline=float() as deadline):
            return replace(state, course=course, deadline=None, left=max(0.0, deadline - event.now)), (retained,)
        case Masking():
            secure = None if state.secure is None else replace(state.secure, held=state.secure.state)
            masking = replace(state, course=course, secure=secure)
            return masking, (retained, *(() if secure is not None else (_opening(masking),)))
        case Aggregating():
            resumed = replace(state, course=course)
            return resumed, (retained, _aggregation(resumed))
        case _:
            return replace(state, course=course), (retained,)


# --- checks -------------------------------------------------------------------------------------------------------


def _check_key(state: Collecting | Masking | Aggregating | Evaluating, key: RoundKey) -> None:
    if key != state.key:
        raise WrongTime(
            f"message for plan {key.plan[:12]} round {key.round} attempt {key.attempt}, "
            f"now is plan {state.key.plan[:12]} round {state.round} attempt {state.attempt}: wait for the next order"
        )


def _check_in_cohort(state: Collecting | Evaluating, silo: SiloName) -> None:
    if silo not in state.cohort:
        raise WrongTime(f"silo {silo} is not in the cohort of round {state.round} attempt {state.attempt}")


def _check_enrolled(state: State, silo: SiloName) -> None:
    if silo not in population_of(state):
        raise AuthorisationError(f"silo {silo} is not enrolled in this federation: enrol it with a new invitation")


def _check_deadline(state: Gathering | Collecting | Masking | Evaluating, event: DeadlinePassed) -> None:
    if event.deadline != state.deadline or event.now < event.deadline:
        raise WrongTime(f"deadline {event.deadline} is not the one of phase {state.phase}, or has not passed")


def _unready(course: Course, silo: SiloName) -> Course:
    return replace(course, ready=course.ready - {silo})


def _declined(event: SiloDeclined) -> Declined:
    return Declined(silo=event.silo, reason=event.reason, detail=event.detail)


def _dropped(event: SiloDeclined) -> SiloDropped:
    detail = f"{event.reason.value}: {event.detail}" if event.detail else event.reason.value
    return SiloDropped(key=event.key, silo=event.silo, outcome="declined", detail=detail)


# --- the table ----------------------------------------------------------------------------------------------------

TABLE: dict[tuple[type[State], type[Event]], Callable[[Any, Any], Step]] = {
    (Idle, PlanOffered): _offer,
    (Idle, PlanStarted): _start_idle,
    (Gathering, PlanStarted): _start_gathering,
    (Collecting, PlanStarted): _start_running,
    (Masking, PlanStarted): _start_running,
    (Aggregating, PlanStarted): _start_running,
    (Evaluating, PlanStarted): _start_running,
    (Stopped, PlanStarted): _start_stopped,
    (Finished, PlanStarted): _start_finished,
    (Gathering, PlanStopped): _stop_gathering,
    (Collecting, PlanStopped): _stop_collecting,
    (Masking, PlanStopped): _stop_masking,
    (Aggregating, PlanStopped): _stop_aggregating,
    (Evaluating, PlanStopped): _stop_evaluating,
    (Stopped, PlanStopped): _stop_stopped,
    (Gathering, PlanPaused): _pause,
    (Collecting, PlanPaused): _pause,
    (Masking, PlanPaused): _pause,
    (Aggregating, PlanPaused): _pause,
    (Evaluating, PlanPaused): _pause,
    (Stopped, PlanPaused): _pause,
    (Finished, PlanPaused): _pause,
    (Gathering, PlanResumed): _go_on,
    (Collecting, PlanResumed): _go_on,
    (Masking, PlanResumed): _go_on,
    (Aggregating, PlanResumed): _go_on,
    (Evaluating, PlanResumed): _go_on,
    (Stopped, PlanResumed): _go_on,
    (Finished, PlanResumed): _go_on,
    (Idle, GroupsChanged): _regroup_idle,
    (Gathering, GroupsChanged): _regroup,
    (Collecting, GroupsChanged): _regroup,
    (Masking, GroupsChanged): _regroup,
    (Aggregating, GroupsChanged): _regroup,
    (Evaluating, GroupsChanged): _regroup,
    (Stopped, GroupsChanged): _regroup,
    (Finished, GroupsChanged): _regroup,
    (Idle, SiloRevoked): _revoke_idle,
    (Gathering, SiloRevoked): _revoke,
    (Collecting, SiloRevoked): _revoke,
    (Masking, SiloRevoked): _revoke,
    (Aggregating, SiloRevoked): _revoke,
    (Evaluating, SiloRevoked): _revoke,
    (Stopped, SiloRevoked): _revoke,
    (Finished, SiloRevoked): _revoke,
    (Idle, SiloEnrolled): _enrol_idle,
    (Gathering, SiloEnrolled): _enrol,
    (Collecting, SiloEnrolled): _enrol,
    (Masking, SiloEnrolled): _enrol,
    (Aggregating, SiloEnrolled): _enrol,
    (Evaluating, SiloEnrolled): _enrol,
    (Stopped, SiloEnrolled): _enrol,
    (Finished, SiloEnrolled): _enrol,
    (Gathering, ReadinessDeclared): _declare,
    (Collecting, ReadinessDeclared): _declare,
    (Masking, ReadinessDeclared): _declare,
    (Aggregating, ReadinessDeclared): _declare,
    (Evaluating, ReadinessDeclared): _declare,
    (Stopped, ReadinessDeclared): _declare,
    (Finished, ReadinessDeclared): _declare,
    (Idle, SiloLeft): _leave_idle,
    (Gathering, SiloLeft): _leave,
    (Collecting, SiloLeft): _leave,
    (Masking, SiloLeft): _leave,
    (Aggregating, SiloLeft): _leave,
    (Evaluating, SiloLeft): _leave,
    (Stopped, SiloLeft): _leave,
    (Finished, SiloLeft): _leave,
    (Gathering, DeadlinePassed): _gathering_deadline,
    (Collecting, DeadlinePassed): _collecting_deadline,
    (Masking, DeadlinePassed): _masking_deadline,
    (Evaluating, DeadlinePassed): _evaluating_deadline,
    (Collecting, UpdateCommitted): _commit,
    (Aggregating, UpdateCommitted): _commit_again,
    (Collecting, SiloTrained): _trained,
    (Masking, SiloTrained): _trained_again,
    (Masking, MaskingOpened): _masking_opened,
    (Masking, MaskAnswered): _answered,
    (Aggregating, MaskAnswered): _answered_late,
    (Collecting, SiloDeclined): _decline_training,
    (Masking, SiloDeclined): _decline_masking,
    (Evaluating, SiloDeclined): _decline_evaluation,
    (Aggregating, Aggregated): _aggregated,
    (Aggregating, AggregationFailed): _aggregation_failed,
    (Aggregating, BudgetExhausted): _budget_exhausted,
    (Evaluating, EvaluationReported): _report,
    (Idle, Resumed): _resume_idle,
    (Gathering, Resumed): _resume,
    (Collecting, Resumed): _resume,
    (Masking, Resumed): _resume,
    (Aggregating, Resumed): _resume,
    (Evaluating, Resumed): _resume,
    (Stopped, Resumed): _resume,
    (Finished, Resumed): _resume,
}
