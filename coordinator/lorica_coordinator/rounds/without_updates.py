"""A state as a backup holds it: the plan stopped, and nothing of updates or masks of the attempt under way.

Updates under way are in no backup: their keys are destroyed when a round is closed, and a copy would keep them. What
silos revealed of a masked attempt goes with them, so that attempt is over here; silos may have answered for it, which
they do once a round, so the next round follows.
"""

from dataclasses import replace

from lorica_coordinator.rounds.effects import Cause, Record, RoundAbandoned, records_of
from lorica_coordinator.rounds.events import PlanStopped
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.states import Finished, Idle, Opening, State, Stopped, Task

REASON = "a backup holds no updates: this one was made while the round was under way"


def without_updates(state: State, now: float) -> tuple[State, tuple[Record, ...]]:
    """`state` stopped, and what is to be recorded of that."""
    if isinstance(state, Idle | Finished):
        return state, ()
    stopped, effects = step(state, PlanStopped(now=now))
    records = records_of(effects)
    if not isinstance(stopped, Stopped) or not (stopped.updates or stopped.masked):
        return stopped, records
    opening, course = stopped.opening, stopped.course
    abandoned = RoundAbandoned(key=course.key(opening.round, opening.attempt), cause=Cause.STOPPED, reason=REASON)
    if stopped.masked is None:
        again = Opening(round=opening.round, attempt=opening.attempt + 1, task=Task.TRAINING)
        return Stopped(course=course, opening=again), (*records, abandoned)
    if opening.round >= course.terms.rounds:
        return Finished(course=replace(course, ready=frozenset())), (*records, abandoned)
    following = Opening(round=opening.round + 1, attempt=1, task=Task.TRAINING)
    return Stopped(course=course, opening=following), (*records, abandoned)
