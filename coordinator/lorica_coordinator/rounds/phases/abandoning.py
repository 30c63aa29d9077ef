"""An attempt without a sum: the same round again, or the next one where silos may have answered for this one."""

from lorica_coordinator.rounds.effects import Cause, DiscardUpdates, Effect, RoundAbandoned, Step
from lorica_coordinator.rounds.phases.gathering import gather
from lorica_coordinator.rounds.states import (
    Aggregating,
    Collecting,
    Finished,
    Masking,
    Opening,
    State,
    Stopped,
    Task,
    round_of,
)
from lorica_security.secure_aggregation.coordinator import states as protocol_states

LOST = "the key of this attempt was lost with what silos had sent for it"


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


def _again(state: Collecting | Masking | Aggregating | Stopped) -> Opening:
    number, attempt = round_of(state)
    return Opening(round=number, attempt=attempt + 1, task=Task.TRAINING)


def lose(state: Masking | Aggregating | Stopped, *, asked: bool, now: float) -> Step:
    """End an attempt of secure aggregation of which the coordinator has nothing left; `asked` as `asked_for_shares`
    would say."""
    opening = next_round(state) if asked else _again(state)
    number, attempt = round_of(state)
    key = state.course.key(number, attempt)
    records: tuple[Effect, ...] = (RoundAbandoned(key=key, cause=Cause.MASKING, reason=LOST), DiscardUpdates(key=key))
    if opening is None:
        return Finished(course=state.course), records
    if isinstance(state, Stopped):
        return Stopped(course=state.course, opening=opening, missing=state.missing), records
    after, effects = gather(state.course, opening, started=True, now=now)
    return after, (*records, *effects)


def after_masking(state: Masking | Aggregating) -> Opening | None:
    """What follows when no sum comes out: the round again, or the next one when silos may have answered for this one.

    None: that was the plan's last round.
    """
    if not asked_for_shares(state):
        return _again(state)
    return next_round(state)


def asked_for_shares(state: State) -> bool:
    """Whether silos may have answered for this round of secure aggregation, and will not do so again."""
    return not isinstance(state, Masking) or (
        state.secure is not None and isinstance(state.secure.state, protocol_states.Unmasking)
    )


def next_round(state: Masking | Aggregating | Stopped) -> Opening | None:
    """None: that was the plan's last round."""
    number, _ = round_of(state)
    if number >= state.course.terms.timetable.last_round:
        return None
    return Opening(round=number + 1, attempt=1, task=Task.TRAINING)
