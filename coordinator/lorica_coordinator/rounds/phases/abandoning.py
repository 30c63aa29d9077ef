"""An attempt without a sum: the same round again, or the next one where silos may have answered for this one."""

from lorica_coordinator.rounds.effects import Cause, DiscardUpdates, Effect, RoundAbandoned, Step
from lorica_coordinator.rounds.phases.gathering import gather
from lorica_coordinator.rounds.states import Aggregating, Collecting, Finished, Masking, Opening, State, Task
from lorica_security.secure_aggregation.coordinator import states as protocol_states


def abandon(state: Collecting | Masking | Aggregating, cause: Cause, reason: str, now: float) -> Step:
    """End the attempt without a sum, and gather for what follows it; the plan is finished where nothing does."""
    if isinstance(state, Masking) or (isinstance(state, Aggregating) and state.masked is not None):
        opening = after_masking(state)
    else:
        opening = _again(state)
    after: State
    effects: tuple[Effect, ...] = ()
    if opening is None:
        after = Finished(course=state.course)
    else:
        after, effects = gather(state.course, opening, started=True, now=now)
    abandoned = RoundAbandoned(key=state.key, cause=cause, reason=reason)
    return after, (abandoned, DiscardUpdates(key=state.key), *effects)


def _again(state: Collecting | Masking | Aggregating) -> Opening:
    return Opening(round=state.round, attempt=state.attempt + 1, task=Task.TRAINING)


def after_masking(state: Masking | Aggregating) -> Opening | None:
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
