"""How a phase is entered that has its silos: evaluating, masking, aggregating."""

from lorica_coordinator.rounds.effects import Aggregate, EvaluationOpened, OpenMasking, Step
from lorica_coordinator.rounds.secure_attempt import MaskedSum
from lorica_coordinator.rounds.states import Aggregating, Collecting, Course, Evaluating, Masking
from lorica_coordinator.rounds.updates import CommittedUpdate
from lorica_security.identifiers import SiloName


def enter_masking(state: Collecting, now: float) -> Step:
    """Those who have trained mask their deltas; a new attempt of secure aggregation is asked for."""
    after = Masking(
        course=state.course,
        round=state.round,
        attempt=state.attempt,
        silos=state.trained,
        deadline=now + state.course.terms.masking_deadline_s,
    )
    return after, (open_masking(after),)


def open_masking(state: Masking) -> OpenMasking:
    """The command that draws what secure aggregation begins with."""
    closing = state.course.terms.timetable.is_closing(state.round)
    return OpenMasking(key=state.key, model=state.course.model, silos=state.silos, closing=closing)


def enter_aggregating(course: Course, round_number: int, attempt: int, updates: tuple[CommittedUpdate, ...]) -> Step:
    """The updates are summed."""
    state = Aggregating(course=course, round=round_number, attempt=attempt, updates=updates)
    return state, (aggregation_of(state),)


def enter_aggregating_masked(course: Course, round_number: int, attempt: int, masked: MaskedSum) -> Step:
    """The masked vectors are summed and unmasked."""
    state = Aggregating(course=course, round=round_number, attempt=attempt, masked=masked)
    return state, (aggregation_of(state),)


def aggregation_of(state: Aggregating) -> Aggregate:
    """The command that makes the sum of this state."""
    return Aggregate(
        key=state.key,
        base_model=state.course.model,
        updates=state.updates,
        masked=state.masked,
        closing=state.course.terms.timetable.is_closing(state.round),
    )


def enter_evaluating(course: Course, round_number: int, attempt: int, cohort: tuple[SiloName, ...], now: float) -> Step:
    """The cohort is asked to score the newest model."""
    state = Evaluating(
        course=course,
        round=round_number,
        attempt=attempt,
        cohort=cohort,
        deadline=now + course.terms.evaluation_deadline_s,
    )
    return state, (EvaluationOpened(key=state.key, cohort=cohort, model=course.model),)
