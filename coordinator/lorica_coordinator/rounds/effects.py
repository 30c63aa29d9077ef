"""What follows from a transition: records, persisted in one transaction with the state, and commands, done after it.

Whoever persists a record knows when it was made. A command may be lost with the process and is given again by Resumed;
doing one twice does no harm.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from lorica_coordinator.rounds.scores import BestModel
from lorica_coordinator.rounds.secure_attempt import MaskedSum, MaskedVector
from lorica_coordinator.rounds.states import Course, Report, State
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.masked_vectors.scores import Scores
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBegun:
    plan: Digest
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMade:
    """Round `round` made this model (0: the initial one); `signature` over its model statement."""

    plan: Digest
    round: int
    model: Digest
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOpened:
    key: RoundKey
    cohort: tuple[SiloName, ...]
    model: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateAccepted:
    key: RoundKey
    update: CommittedUpdate
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedAccepted:
    """A masked vector with the silo's signature over its announcement; nobody can see what it holds."""

    key: RoundKey
    vector: MaskedVector
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloDropped:
    """`outcome`: declined, late, or refused (its update, or what it sent in secure aggregation, could
    not be used)."""

    key: RoundKey
    silo: SiloName
    outcome: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClosed:
    """`masked` holds the silos of a masked sum; None where `updates` were summed."""

    key: RoundKey
    result: AggregationResult
    updates: tuple[CommittedUpdate, ...]
    masked: tuple[SiloName, ...] | None = None


class Cause(Enum):
    """Why an attempt at a round made no model."""

    STOPPED = "stopped"
    MODEL_MISSING = "model_missing"
    REPLACED = "replaced"
    REVOKED = "revoked"
    DECLINED = "declined"
    LATE = "late"
    MASKING = "masking"
    UNUSABLE = "unusable"
    BUDGET_SPENT = "budget_spent"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAbandoned:
    """`cause` is for counting, `reason` for people."""

    key: RoundKey
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOpened:
    key: RoundKey
    cohort: tuple[SiloName, ...]
    model: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAccepted:
    key: RoundKey
    model: Digest
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationClosed:
    """`score` and `macro` are None when nobody reported; `counted`: a quorum did, so that the model can become the
    best.

    Under masks there are no `reports`, hence no `macro`, but `scores`, the sum of all.
    """

    key: RoundKey
    reports: tuple[Report, ...]
    score: BestModel | None
    macro: float | None
    scores: Scores | None = None
    counted: bool
    is_best: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAbandoned:
    key: RoundKey
    reason: str


Record = (
    PlanBegun
    | ModelMade
    | RoundOpened
    | UpdateAccepted
    | MaskedAccepted
    | SiloDropped
    | RoundClosed
    | RoundAbandoned
    | EvaluationOpened
    | EvaluationAccepted
    | EvaluationClosed
    | EvaluationAbandoned
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDeadline:
    """Send DeadlinePassed at this instant. There is one deadline at most: this one replaces the one before."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DisarmDeadline:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMasking:
    """Draw what an attempt of secure aggregation among `silos` begins with: gives MaskingOpened.

    `closing`: nobody has trained, and only scores are summed. Aggregate has the same key.
    """

    key: RoundKey
    model: Digest
    silos: tuple[SiloName, ...]
    closing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """Make the next model of `updates`, or of the masked vectors in `masked`: gives the result as an event."""

    key: RoundKey
    base_model: Digest
    updates: tuple[CommittedUpdate, ...]
    masked: MaskedSum | None = None
    closing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardUpdates:
    """Delete the bytes of this attempt's updates: nobody needs them any more."""

    key: RoundKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainModels:
    """Keep these models of the plan, and delete its others."""

    plan: Digest
    models: frozenset[Digest]

    @classmethod
    def of(cls, course: Course) -> "RetainModels":
        """The newest model of a plan, and its best."""
        return cls(plan=course.terms.plan, models=frozenset({course.model, course.best_model}))


Command = ArmDeadline | DisarmDeadline | OpenMasking | Aggregate | DiscardUpdates | RetainModels
Effect = Record | Command
COMMANDS = (ArmDeadline, DisarmDeadline, OpenMasking, Aggregate, DiscardUpdates, RetainModels)

Step = tuple[State, tuple[Effect, ...]]
"""What a handler of the machine returns."""


def records_of(effects: Iterable[Effect]) -> tuple[Record, ...]:
    """What is saved with the state, in order; commands are for after that."""
    return tuple(effect for effect in effects if not isinstance(effect, COMMANDS))
