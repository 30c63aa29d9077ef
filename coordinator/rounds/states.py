"""Where a plan stands. Everything that a restarted coordinator needs is in these values, but for who is connected.

    Idle -> Gathering -> Collecting -> Aggregating -> Evaluating -> Gathering ... -> Finished
                 ^------- abandoned ----/                 (or straight on, when no evaluation is due)
    Stopped stands beside all of them but Idle and Finished.

`deadline` is absolute. The states of a plan share a Course: what outlasts a round.
"""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from coordinator.rounds.scores import BestModel
from coordinator.rounds.terms import PlanTerms
from coordinator.rounds.updates import CommittedUpdate, IncludedUpdate
from security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.messages import DeclineReason, Evaluation, RoundKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What outlasts a round: the plan's terms, its silos, its model.

    `population` holds the enrolled silos, `ready` those of them that are connected and have declared readiness for this
    plan since they last connected or declined; a restart empties it. `model_round` is the round that made `model`.
    `included` has, in order of silo name, the newest update of each silo that a model of the plan includes.
    """

    terms: PlanTerms
    population: frozenset[SiloName]
    ready: frozenset[SiloName] = frozenset()
    model: Digest
    model_round: int = 0
    best: BestModel | None = None
    included: tuple[IncludedUpdate, ...] = ()

    @property
    def best_model(self) -> Digest:
        """The best by MicroAvg exact match; the latest while nothing has been evaluated."""
        return self.model if self.best is None else self.best.model

    def key(self, round_number: int, attempt: int) -> RoundKey:
        return RoundKey(federation=self.terms.federation, plan=self.terms.plan, round=round_number, attempt=attempt)


class Task(Enum):
    TRAINING = "training"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the next cohort gathers for. Round 0 is always an evaluation, of the initial model."""

    round: int
    attempt: int
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    silo: SiloName
    reason: DeclineReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    silo: SiloName
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """No plan."""

    phase: ClassVar[str] = "idle"
    population: frozenset[SiloName] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Waiting for silos. `started`: the operator, or start_when_ready, lets the round open.

    The deadline runs while started and a quorum is ready; without a quorum this phase waits as long as it takes.
    """

    phase: ClassVar[str] = "gathering"
    course: Course
    opening: Opening
    started: bool
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collecting:
    """The cohort trains and uploads; `updates` in order of silo name."""

    phase: ClassVar[str] = "collecting"
    course: Course
    round: int
    attempt: int
    cohort: tuple[SiloName, ...]
    updates: tuple[CommittedUpdate, ...] = ()
    declined: tuple[Declined, ...] = ()
    deadline: float

    @property
    def key(self) -> RoundKey:
        return self.course.key(self.round, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregating:
    """The updates become a model. No deadline: only the coordinator works."""

    phase: ClassVar[str] = "aggregating"
    course: Course
    round: int
    attempt: int
    updates: tuple[CommittedUpdate, ...]

    @property
    def key(self) -> RoundKey:
        return self.course.key(self.round, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating:
    """The cohort scores the model; `reports` in order of silo name."""

    phase: ClassVar[str] = "evaluating"
    course: Course
    round: int
    attempt: int
    cohort: tuple[SiloName, ...]
    reports: tuple[Report, ...] = ()
    declined: tuple[Declined, ...] = ()
    deadline: float

    @property
    def key(self) -> RoundKey:
        return self.course.key(self.round, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """By the operator. `updates` are those of an aggregation that was under way: it is done again at the start."""

    phase: ClassVar[str] = "stopped"
    course: Course
    opening: Opening
    updates: tuple[CommittedUpdate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All rounds done."""

    phase: ClassVar[str] = "finished"
    course: Course


State = Idle | Gathering | Collecting | Aggregating | Evaluating | Stopped | Finished
STATES: tuple[type[State], ...] = (Idle, Gathering, Collecting, Aggregating, Evaluating, Stopped, Finished)


def course_of(state: State) -> Course | None:
    return None if isinstance(state, Idle) else state.course


def population_of(state: State) -> frozenset[SiloName]:
    return state.population if isinstance(state, Idle) else state.course.population


def deadline_of(state: State) -> float | None:
    """The one deadline that runs, if any."""
    return state.deadline if isinstance(state, Gathering | Collecting | Evaluating) else None


def round_of(state: State) -> tuple[int, int]:
    """Round and attempt that the state is about; (0, 0) without a plan."""
    match state:
        case Idle():
            return 0, 0
        case Gathering() | Stopped():
            return state.opening.round, state.opening.attempt
        case Finished():
            return state.course.terms.rounds, 0
        case _:
            return state.round, state.attempt
