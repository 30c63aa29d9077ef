"""The coordinator starts again: nobody is connected, and what was left of a deadline goes on."""

from dataclasses import replace

from lorica_coordinator.rounds.effects import RetainModels, Step
from lorica_coordinator.rounds.events import Resumed
from lorica_coordinator.rounds.phases.abandoning import lose
from lorica_coordinator.rounds.phases.entry import aggregation_of, open_masking
from lorica_coordinator.rounds.states import Aggregating, Gathering, Idle, Masking, Running, Stopped


def resume_idle(state: Idle, event: Resumed) -> Step:
    """The records say who is enrolled."""
    return replace(state, population=event.population, groups=event.groups), ()


def resume(state: Running, event: Resumed) -> Step:
    """Nobody is ready; commands that may be lost are given again."""
    course = replace(
        state.course,
        population=event.population,
        groups=event.groups,
        ready=frozenset(),
        unawaited=state.course.unawaited & event.population,
    )
    retained = RetainModels.of(course)
    if event.lost is not None and isinstance(state, Masking | Aggregating | Stopped):
        after, effects = lose(replace(state, course=course), asked=event.lost, now=event.now)
        return after, (retained, *effects)
    match state:
        case Gathering(deadline=float() as deadline):
            return replace(state, course=course, deadline=None, left=max(0.0, deadline - event.now)), (retained,)
        case Masking():
            secure = None if state.secure is None else replace(state.secure, held=state.secure.state)
            masking = replace(state, course=course, secure=secure)
            return masking, (retained, *(() if secure is not None else (open_masking(masking),)))
        case Aggregating():
            resumed = replace(state, course=course)
            return resumed, (retained, aggregation_of(resumed))
        case _:
            return replace(state, course=course), (retained,)
