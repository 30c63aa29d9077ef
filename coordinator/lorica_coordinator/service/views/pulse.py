"""What a monitoring system wants to know of a federation at any moment, told whenever it may have changed."""

from collections.abc import Mapping
from dataclasses import dataclass

from lorica_coordinator.rounds.cohorts.whole_groups import awaited_groups
from lorica_coordinator.rounds.states import (
    Aggregating,
    Collecting,
    Evaluating,
    Gathering,
    Masking,
    State,
    course_of,
    population_of,
)
from lorica_coordinator.rounds.terms import KindOfRound, PlanTerms
from lorica_coordinator.service.attendance import Attendance
from lorica_security.identifiers import SiloName


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """`least`: the fewest silos of a round of one kind, 0 without a plan. `enrolled` and `connected` count the silos
    that such a round is for."""

    least: int
    enrolled: int
    connected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """`silos`: by state, those connected among the enrolled, those ready among the connected.

    `quorums`: by whose the rounds are, "all" without a plan. `running`: the plan waits for no operator and has not
    ended. `seconds_left`: of the phase, None where it has no deadline. `last_seen_unix_s` has every enrolled silo, 0
    for one that never connected. `groups_unsigned`: signatures that proposed release groups still want.
    `groups_absent`: silos of release groups that lack some, while no masked sum can come out of a quorum that is ready.
    `score`: by what answers count, as people are shown it; "" without a plan.
    """

    silos: Mapping[str, int]
    quorums: Mapping[KindOfRound, Quorum]
    running: bool
    seconds_left: float | None
    single_silos: bool
    connected: frozenset[SiloName]
    last_seen_unix_s: Mapping[SiloName, float]
    groups_unsigned: int = 0
    groups_absent: int = 0
    score: str = ""


def pulse(
    state: State,
    attendance: Attendance,
    last_seen: Mapping[SiloName, float],
    *,
    seconds_left: float | None,
    groups_unsigned: int = 0,
) -> Pulse:
    course, population = course_of(state), population_of(state)
    connected = attendance.connected & population
    return Pulse(
        silos={
            "enrolled": len(population),
            "connected": len(connected),
            "ready": 0 if course is None else len(course.ready),
        },
        quorums=_quorums(None if course is None else course.terms, population, connected),
        running=_running(state),
        seconds_left=seconds_left,
        single_silos=course is not None and course.terms.shows_single_silos,
        connected=connected,
        last_seen_unix_s={silo: last_seen.get(silo, 0.0) for silo in population},
        groups_unsigned=groups_unsigned,
        score="" if course is None else course.terms.score,
        groups_absent=0 if (lacking := awaited_groups(state)) is None else max(1, len(lacking.absent)),
    )


def _quorums(
    terms: PlanTerms | None, population: frozenset[SiloName], connected: frozenset[SiloName]
) -> Mapping[KindOfRound, Quorum]:
    if terms is None:
        return {"all": Quorum(least=0, enrolled=len(population), connected=len(connected))}
    return {
        kind: Quorum(
            least=terms.quorum(number),
            enrolled=len(terms.taking_part(population, number, training=True)),
            connected=len(terms.taking_part(connected, number, training=True)),
        )
        for kind, number in terms.kinds_of_rounds.items()
    }


def _running(state: State) -> bool:
    if isinstance(state, Gathering):
        return state.started and not state.course.paused
    return isinstance(state, Collecting | Masking | Aggregating | Evaluating)
