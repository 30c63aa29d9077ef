"""Evaluating: silos score the model until all have reported or declined, or the deadline has passed."""

from dataclasses import replace

from lorica_coordinator.rounds.cohorts.cohort import outstanding
from lorica_coordinator.rounds.effects import EvaluationAccepted, EvaluationClosed, RetainModels, Step
from lorica_coordinator.rounds.events import DeadlinePassed, EvaluationReported, SiloDeclined
from lorica_coordinator.rounds.phases.checks import check_deadline, check_in_cohort, check_key, declined_by, unready
from lorica_coordinator.rounds.phases.gathering import next_round
from lorica_coordinator.rounds.scores import BestModel, macro_average
from lorica_coordinator.rounds.states import Evaluating, Report
from lorica_security.errors import Conflict, WrongTime


def take_report(state: Evaluating, event: EvaluationReported) -> Step:
    """Take a silo's scores of the model."""
    check_key(state, event.key)
    check_in_cohort(state, event.silo)
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
    after, effects = settle_evaluating(replace(state, reports=reports), event.now)
    return after, (accepted, *effects)


def decline_evaluation(state: Evaluating, event: SiloDeclined) -> Step:
    """Take a silo out of the evaluation at its own word."""
    check_key(state, event.key)
    check_in_cohort(state, event.silo)
    if any(item.silo == event.silo for item in state.declined):
        return state, ()
    if any(item.silo == event.silo for item in state.reports):
        raise Conflict(f"silo {event.silo} has reported its evaluation of round {state.round}: it cannot decline it")
    declined = (*state.declined, declined_by(event))
    return settle_evaluating(replace(state, course=unready(state.course, event.silo), declined=declined), event.now)


def settle_evaluating(state: Evaluating, now: float) -> Step:
    """Stay, or close once all have reported or declined."""
    missing = outstanding(state.cohort, (item.silo for item in state.reports), (item.silo for item in state.declined))
    return (state, ()) if missing else _close_evaluation(state, now)


def evaluating_deadline(state: Evaluating, event: DeadlinePassed) -> Step:
    """Close with the reports that came."""
    check_deadline(state, event)
    return _close_evaluation(state, event.now)


def _close_evaluation(state: Evaluating, now: float) -> Step:
    course = state.course
    evaluations = [report.evaluation for report in state.reports]
    score = BestModel.scored(course.model, state.round, evaluations) if evaluations else None
    counted = len(evaluations) >= course.terms.least_scores
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
    after, effects = next_round(course, state.round, now)
    return after, (closed, *((RetainModels.of(course),) if is_best else ()), *effects)
