"""Aggregating: a sum becomes the plan's next model, or the attempt cannot be used."""

from dataclasses import replace
from typing import Final

from lorica_coordinator.rounds.cohorts.corrected import included_by
from lorica_coordinator.rounds.effects import (
    Cause,
    DiscardUpdates,
    Effect,
    EvaluationClosed,
    EvaluationOpened,
    ModelMade,
    RetainModels,
    RoundAbandoned,
    RoundClosed,
    SiloDropped,
    Step,
)
from lorica_coordinator.rounds.events import Aggregated, AggregationFailed, BudgetExhausted
from lorica_coordinator.rounds.phases.abandoning import abandon
from lorica_coordinator.rounds.phases.checks import check_key
from lorica_coordinator.rounds.phases.entry import enter_aggregating, enter_evaluating
from lorica_coordinator.rounds.phases.gathering import gather, next_round
from lorica_coordinator.rounds.scores import BestModel
from lorica_coordinator.rounds.states import Aggregating, Course, Finished, Opening, Task
from lorica_coordinator.rounds.terms import PlanTerms
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome
from lorica_security.errors import WrongTime

UNUSABLE: Final = "it cannot be used"
"""All that is told of an update whose figures are a single silo's, where those are shown to nobody."""

SPENT = "a further round would cost more epsilon than the plan promises"


def sum_made(state: Aggregating, event: Aggregated) -> Step:
    """Close the round with its new model, then evaluate, go on, or finish."""
    check_key(state, event.key)
    result, (course, effects) = event.result, _scored_in_the_sum(state, event)
    if result.outcome is Outcome.APPLIED:
        course = replace(course, included=included_by(course, _in_the_model(course, state, result)))
    if result.outcome is Outcome.APPLIED and result.model != course.model:
        course = replace(course, model=result.model, model_round=state.round)
        made = ModelMade(plan=course.terms.plan, round=state.round, model=result.model, signature=event.signature)
        effects.append(made)
    masked = None if state.masked is None else state.masked.silos
    effects.append(RoundClosed(key=state.key, result=result, updates=state.updates, masked=masked))
    effects.append(DiscardUpdates(key=state.key))
    effects.append(RetainModels.of(course))
    if result.last and state.round < course.terms.rounds:  # of a plan that has no evaluations
        return Finished(course=course, reason=SPENT), tuple(effects)
    due = course.terms.evaluation_due(state.round)
    scored = course.terms.scored(state.silos) if due else ()
    if scored:
        after, further = enter_evaluating(course, state.round, state.attempt, scored, event.now)
    elif due and course.terms.takes_turns:  # nobody of this round has scores, and others of the plan have
        opening = Opening(round=state.round, attempt=state.attempt, task=Task.EVALUATION)
        after, further = gather(course, opening, started=True, now=event.now)
    else:
        after, further = next_round(course, state.round, event.now)
    return after, (*effects, *further)


def _in_the_model(course: Course, state: Aggregating, result: AggregationResult) -> list[CommittedUpdate]:
    """The updates that were summed. Where drift is corrected all were, whatever they weighed: corrections go on with
    all of them or with none."""
    weights = {} if course.terms.corrects_drift else {weight.silo: weight.share for weight in result.weights}
    return [update for update in state.updates if not weights or weights.get(update.silo, 0.0) > 0]


def _scored_in_the_sum(state: Aggregating, event: Aggregated) -> tuple[Course, list[Effect]]:
    """What the silos of a masked sum told of the model that they began with, where it is one to be scored."""
    course, made_in = state.course, state.round - 1
    if state.masked is None or not course.terms.timetable.scores(made_in):
        return course, []
    scores = event.result.scores
    told = scores is not None and scores.questions > 0
    score = BestModel.summed(course.model, made_in, scores) if scores is not None and told else None
    counted = told and len(state.silos) >= course.terms.quorum(state.round)
    is_best = score is not None and counted and score.beats(course.best)
    key, effects = course.key(made_in, 1), list[Effect]()
    if made_in == 0:  # no round of its own had a row for it
        effects.append(EvaluationOpened(key=key, cohort=state.silos, model=course.model))
    closed = EvaluationClosed(
        key=key, reports=(), score=score, macro=None, scores=scores, counted=counted, is_best=is_best
    )
    return replace(course, best=score) if is_best else course, [*effects, closed]


def aggregation_failed(state: Aggregating, event: AggregationFailed) -> Step:
    """Sum again without the silo whose update cannot be used, or abandon the attempt."""
    check_key(state, event.key)
    if event.silo is None and state.masked is not None:
        return abandon(state, Cause.UNUSABLE, event.reason, event.now)
    left = tuple(update for update in state.updates if update.silo != event.silo)
    if event.silo is None or event.silo not in state.silos:
        raise WrongTime(f"silo {event.silo} has no update in round {state.round} attempt {state.attempt}")
    terms = state.course.terms
    reason = told_of_unusable(event.reason, terms)
    refused = SiloDropped(key=state.key, silo=event.silo, outcome="refused", detail=reason)
    if state.masked is None and len(left) >= terms.quorum(state.round):
        after, effects = enter_aggregating(state.course, state.round, state.attempt, left)
    else:
        after, effects = abandon(
            state, Cause.UNUSABLE, f"the update of silo {event.silo} was refused: {reason}", event.now
        )
    return after, (refused, *effects)


def told_of_unusable(reason: str, terms: PlanTerms) -> str:
    """What people are told of it, in records and in logs: the reason has the update's norm, loss or steps in it. What
    came under masks says nothing of a silo."""
    return reason if terms.shows_single_silos or terms.secure_aggregation else UNUSABLE


def budget_exhausted(state: Aggregating, event: BudgetExhausted) -> Step:
    """Finish the plan with the model that it has: another noised sum would cost too much."""
    check_key(state, event.key)
    abandoned = RoundAbandoned(key=state.key, cause=Cause.BUDGET_SPENT, reason=event.reason)
    return Finished(course=state.course, reason=SPENT), (abandoned, DiscardUpdates(key=state.key))
