"""Gathering: a round opens when its whole population is ready, or at a deadline that runs from the quorum on."""

from dataclasses import replace

from lorica_coordinator.rounds.cohorts.cohort import cohort_of, everyone_is_ready
from lorica_coordinator.rounds.cohorts.corrected import opened_with
from lorica_coordinator.rounds.cohorts.drawn import drawn
from lorica_coordinator.rounds.cohorts.whole_groups import wanting
from lorica_coordinator.rounds.effects import RoundOpened, Step
from lorica_coordinator.rounds.events import DeadlinePassed
from lorica_coordinator.rounds.phases.checks import check_deadline
from lorica_coordinator.rounds.phases.entry import enter_evaluating
from lorica_coordinator.rounds.states import Collecting, Course, Finished, Gathering, Opening, Running, Task
from lorica_security.identifiers import SiloName


def with_course(state: Running, course: Course, now: float) -> Step:
    """The state with another course; a gathering may open by it, or its deadline begin to run."""
    if isinstance(state, Gathering):
        return gather(course, state.opening, started=state.started, deadline=state.deadline, left=state.left, now=now)
    return replace(state, course=course), ()


def gather(
    course: Course,
    opening: Opening,
    *,
    started: bool,
    now: float,
    deadline: float | None = None,
    left: float | None = None,
) -> Step:
    """Wait for silos, or open at once when all are there; `deadline` is the one that runs already, `left` as in
    Gathering.
    """
    present = _taking_part(course, opening, course.ready)
    awaited = _taking_part(course, opening, course.population - course.unawaited)
    if not started or course.paused or not _suffice(course, opening, present):
        deadline = None
    elif everyone_is_ready(population=awaited, ready=present):
        return _open(course, opening, now)
    elif deadline is None:
        deadline, left = now + (course.terms.gathering_deadline_s if left is None else left), None
    return Gathering(course=course, opening=opening, started=started, deadline=deadline, left=left), ()


def _suffice(course: Course, opening: Opening, silos: frozenset[SiloName]) -> bool:
    """Whether a quorum is among `silos`, and what is asked of them can come to something."""
    training = opening.task is Task.TRAINING
    if len(silos) < course.terms.quorum(opening.round, training=training):
        return False
    return not training or wanting(course, silos, opening.round) is None


def _taking_part(course: Course, opening: Opening, silos: frozenset[SiloName]) -> frozenset[SiloName]:
    """Those of `silos` that the opening is for and that are not left out of it."""
    training = opening.task is Task.TRAINING
    asked = course.terms.taking_part(silos, opening.round, training=training)
    return asked - course.barred_in(opening.round) if training else asked


def gathering_deadline(state: Gathering, event: DeadlinePassed) -> Step:
    """Open without who is absent, and await them no more until they declare readiness."""
    check_deadline(state, event)
    course = state.course
    absent = _taking_part(course, state.opening, course.population - course.ready)
    return _open(replace(course, unawaited=course.unawaited | absent), state.opening, event.now)


def _open(course: Course, opening: Opening, now: float) -> Step:
    present = _taking_part(course, opening, course.ready)
    if opening.task is Task.EVALUATION:
        if scored := course.terms.scored(cohort_of(present)):
            return enter_evaluating(course, opening.round, opening.attempt, scored, now)
        return next_round(course, opening.round, now)
    cohort = cohort_of(drawn(course, opening.round, opening.attempt, present))
    state = Collecting(
        course=opened_with(course, cohort, opening.attempt),
        round=opening.round,
        attempt=opening.attempt,
        cohort=cohort,
        deadline=now + course.terms.training_deadline_s,
    )
    return state, (RoundOpened(key=state.key, cohort=cohort, model=course.model),)


def next_round(course: Course, done: int, now: float) -> Step:
    """Gather for the round after `done`, or finish after the last one."""
    if done >= course.terms.timetable.last_round:
        return Finished(course=course), ()
    return gather(course, Opening(round=done + 1, attempt=1, task=Task.TRAINING), started=True, now=now)
