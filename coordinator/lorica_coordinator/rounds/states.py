"""Where a plan stands. Everything that a restarted coordinator needs is in these values, but for who is connected.

    Idle -> Gathering -> Collecting -> (Masking) -> Aggregating -> Evaluating -> Gathering ... -> Finished
                 ^------- abandoned ------/                 (or straight on, when no evaluation is due)
    Masking is secure aggregation's, and has phases of its own
    (security/lorica_security/secure_aggregation/coordinator/machine.py). Stopped stands beside all of them but Idle and
    Finished.

`deadline` is an instant of the coordinator's steady clock (events.py), of one process: what is stored is how much is
left until then (coordinator/lorica_coordinator/edges/database/state_json.py). The states of a plan share a Course: what
outlasts a round.
"""

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from lorica_coordinator.rounds.scores import BestModel
from lorica_coordinator.rounds.secure_attempt import MaskedSum, SecureAttempt
from lorica_coordinator.rounds.terms import PlanTerms
from lorica_coordinator.rounds.updates import CommittedUpdate, IncludedUpdate
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.groups.release_groups import Partition
from silo_wire.canonical import Digest
from silo_wire.messages import DeclineReason, Evaluation, RoundKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Barred:
    """A silo that spoilt an attempt of secure aggregation: it is in no cohort up to and including this round."""

    silo: SiloName
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispute:
    """One of the two lied about a box, and nothing can show which: they are in no cohort together up to this round."""

    accuser: SiloName
    dealer: SiloName
    round: int

    @property
    def silos(self) -> tuple[SiloName, SiloName]:
        return self.accuser, self.dealer


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What outlasts a round: the plan's terms, its silos, its model.

    `population` holds the enrolled silos, `ready` those of them that are connected and have declared readiness for this
    plan since they last connected or declined; a restart empties it. `unawaited` holds silos without which a gathering
    ended at its deadline: no further one waits for them until they declare readiness. `model_round` is the round that
    made `model`. `included` has, in order of silo name, the newest update of each silo that a model of the plan
    includes; where drift is corrected, those of the newest round whose silos may go on together. `barred`, `disputes`
    and `unawaited` are lifted by the operator's next `plan start`. While `paused` no attempt opens. `groups` are the
    release groups that the next masked sum is over; None: there are none yet, and which there will be is not known.
    """

    terms: PlanTerms
    population: frozenset[SiloName]
    ready: frozenset[SiloName] = frozenset()
    unawaited: frozenset[SiloName] = frozenset()
    model: Digest
    model_round: int = 0
    best: BestModel | None = None
    included: tuple[IncludedUpdate, ...] = ()
    barred: tuple[Barred, ...] = ()
    disputes: tuple[Dispute, ...] = ()
    paused: bool = False
    groups: Partition | None = None

    def barred_in(self, round_number: int) -> frozenset[SiloName]:
        """Who is left out: those who are barred, and one of each dispute, whoever is in most of them first.

        A liar needs another opponent for each new dispute. After the second it is in more of them than anybody else, is
        left out itself, and those whom it accused or deceived are in again.
        """
        out = {item.silo for item in self.barred if item.round >= round_number}
        disputes = [item for item in self.disputes if item.round >= round_number]
        while still := [item for item in disputes if out.isdisjoint(item.silos)]:
            counts = Counter(silo for item in still for silo in item.silos)
            out.add(max((*(item.accuser for item in still), *(item.dealer for item in still)), key=counts.__getitem__))
        return frozenset(out)

    @property
    def best_model(self) -> Digest:
        """The best by MicroAvg exact match; the latest while nothing has been evaluated."""
        return self.model if self.best is None else self.best.model

    def key(self, round_number: int, attempt: int) -> RoundKey:
        return RoundKey(federation=self.terms.federation, plan=self.terms.plan, round=round_number, attempt=attempt)


class Task(Enum):
    """What silos are asked to do in an attempt."""

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
    """A silo that will not do its part, and why."""

    silo: SiloName
    reason: DeclineReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A silo's scores of the round's model."""

    silo: SiloName
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """No plan. `groups` as in Course."""

    phase: ClassVar[str] = "idle"
    population: frozenset[SiloName] = frozenset()
    groups: Partition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Waiting for silos. `started`: the operator, or start_when_ready, lets the round open.

    The deadline runs while started and a quorum is ready, of which under masks a sum can come out; else this phase
    waits as long as it takes. `left` is what a restart found of a deadline that ran: the next one to run is no longer.
    """

    phase: ClassVar[str] = "gathering"
    course: Course
    opening: Opening
    started: bool
    deadline: float | None = None
    left: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collecting:
    """The cohort trains and uploads; `updates` in order of silo name.

    Under secure aggregation nothing is uploaded yet: `trained` holds those that have a delta to be masked.
    """

    phase: ClassVar[str] = "collecting"
    course: Course
    round: int
    attempt: int
    cohort: tuple[SiloName, ...]
    updates: tuple[CommittedUpdate, ...] = ()
    trained: tuple[SiloName, ...] = ()
    declined: tuple[Declined, ...] = ()
    deadline: float

    @property
    def key(self) -> RoundKey:
        return self.course.key(self.round, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """Secure aggregation among `silos`, who have trained. `secure` is None until it is opened.

    `declined` holds those that refused since. The deadline is that of secure aggregation's present phase.
    """

    phase: ClassVar[str] = "masking"
    course: Course
    round: int
    attempt: int
    silos: tuple[SiloName, ...]
    secure: SecureAttempt | None = None
    declined: tuple[Declined, ...] = ()
    deadline: float

    @property
    def key(self) -> RoundKey:
        return self.course.key(self.round, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregating:
    """The updates, or what is under the masks, become a model. No deadline: only the coordinator works."""

    phase: ClassVar[str] = "aggregating"
    course: Course
    round: int
    attempt: int
    updates: tuple[CommittedUpdate, ...] = ()
    masked: MaskedSum | None = None

    @property
    def silos(self) -> tuple[SiloName, ...]:
        """Whose updates are summed."""
        return tuple(update.silo for update in self.updates) if self.masked is None else self.masked.silos

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
    """By the operator, or for what `missing` says, with the remedy.

    `updates`, or `masked`, are those of an aggregation that was under way: it is done at the start.
    """

    phase: ClassVar[str] = "stopped"
    course: Course
    opening: Opening
    updates: tuple[CommittedUpdate, ...] = ()
    masked: MaskedSum | None = None
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All rounds done; or `reason` says why there will be no further one."""

    phase: ClassVar[str] = "finished"
    course: Course
    reason: str = ""


State = Idle | Gathering | Collecting | Masking | Aggregating | Evaluating | Stopped | Finished
Running = Gathering | Collecting | Masking | Aggregating | Evaluating | Stopped | Finished
"""There is a plan."""
STATES: tuple[type[State], ...] = (
    Idle,
    Gathering,
    Collecting,
    Masking,
    Aggregating,
    Evaluating,
    Stopped,
    Finished,
)


def course_of(state: State) -> Course | None:
    """None without a plan."""
    return None if isinstance(state, Idle) else state.course


def population_of(state: State) -> frozenset[SiloName]:
    """The enrolled silos."""
    return state.population if isinstance(state, Idle) else state.course.population


def groups_of(state: State) -> Partition | None:
    """The release groups of the next masked sum; None: not known yet."""
    return state.groups if isinstance(state, Idle) else state.course.groups


def deadline_of(state: State) -> float | None:
    """The one deadline that runs, if any."""
    return state.deadline if isinstance(state, Gathering | Collecting | Masking | Evaluating) else None


def with_deadline(state: State, at: float) -> State:
    """`state`, which has a deadline, with this one in its place."""
    assert isinstance(state, Gathering | Collecting | Masking | Evaluating)
    return replace(state, deadline=at)


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
