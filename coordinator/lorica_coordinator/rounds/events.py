"""What can happen to a plan. Whoever makes an event has checked who sent it.

`now` is in seconds of the coordinator's steady clock, which deadlines go by: nobody can set it, and it has nothing to
do with the date. When something is said to have happened is for people, and none of the machine's business.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_coordinator.rounds.terms import PlanTerms
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate
from lorica_security.identifiers import SiloName
from lorica_security.identity.succession import Succession
from lorica_security.secure_aggregation.coordinator import events as protocol_events
from lorica_security.secure_aggregation.groups.release_groups import Partition
from lorica_security.secure_aggregation.messages import MaskedInput
from silo_wire.canonical import Digest
from silo_wire.messages import DeclineReason, Evaluation, MaskAnswer, RoundKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOffered:
    """A plan is there for silos to prepare; it starts by itself if its terms say so.

    `model` is the initial model, `signature` the coordinator's over its model statement.
    """

    now: float
    terms: PlanTerms
    model: Digest
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStarted:
    """The operator starts this plan, or goes on with it.

    Fields as in PlanOffered; `leave` names the unfinished plan that is left for good.
    """

    now: float
    terms: PlanTerms
    model: Digest
    signature: bytes
    leave: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStopped:
    """The operator stops the plan, or `missing` says what it cannot go on without, and the remedy; what was committed
    for aggregation is kept."""

    now: float
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloEnrolled:
    now: float
    silo: SiloName


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloRevoked:
    """The certificates of a silo are revoked: it leaves every cohort, and what it has sent for the present attempt is
    dropped.

    A sum that has begun is finished with its update. `reason` is for the records.
    """

    now: float
    silo: SiloName
    reason: str = "revoked by the operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsChanged:
    """Which release groups the next masked sum is over: those that stand, else the first ones that were proposed.
    None where there are neither.
    """

    now: float
    groups: Partition | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPaused:
    """No further attempt opens until PlanResumed; the one under way goes on to its end."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResumed:
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessDeclared:
    """A connected silo has checked the present plan and says whether it takes part."""

    now: float
    silo: SiloName
    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloLeft:
    """The connection is gone. That alone drops nobody from a round."""

    now: float
    silo: SiloName


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCommitted:
    """An update is durable, its digests and its silo's `signature` are verified."""

    now: float
    key: RoundKey
    update: CommittedUpdate
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloTrained:
    """A silo holds a delta from `model` and takes part in its masked sum."""

    now: float
    key: RoundKey
    silo: SiloName
    model: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskingOpened:
    """What an attempt of secure aggregation begins with; `identities` holds the identity keys of those invited."""

    now: float
    key: RoundKey
    opening: protocol_events.OpenAttempt
    identities: tuple[tuple[SiloName, Ed25519PublicKey], ...]
    successions: Mapping[SiloName, tuple[Succession, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskAnswered:
    """What a silo sent in secure aggregation.

    Of a MaskedInput the vector is durable, and checked against its manifest.
    """

    now: float
    key: RoundKey
    answer: MaskAnswer | MaskedInput


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloDeclined:
    """A silo of the cohort will not do its part of this attempt."""

    now: float
    key: RoundKey
    silo: SiloName
    reason: DeclineReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregated:
    """`signature` is the coordinator's over the model statement of the result's model and this round."""

    now: float
    key: RoundKey
    result: AggregationResult
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationFailed:
    """The update of `silo` cannot be used; the others can, unless they are masked.

    None: of a masked sum, that cannot be used.
    """

    now: float
    key: RoundKey
    silo: SiloName | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetExhausted:
    """Another noised sum would cost more than the plan promises: `reason` says how much."""

    now: float
    key: RoundKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReported:
    now: float
    key: RoundKey
    silo: SiloName
    model: Digest
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """`deadline` is the one that was armed, so that a timer which comes late ends no later phase."""

    now: float
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The coordinator has started again; nobody is connected. `population` and `groups` are what its records say.

    `lost`: the attempt of secure aggregation under way is lost, and whether its silos were asked for shares; None: it
    is not.
    """

    now: float
    population: frozenset[SiloName]
    groups: Partition | None = None
    lost: bool | None = None


Event = (
    PlanOffered
    | PlanStarted
    | PlanStopped
    | PlanPaused
    | PlanResumed
    | SiloEnrolled
    | SiloRevoked
    | GroupsChanged
    | ReadinessDeclared
    | SiloLeft
    | UpdateCommitted
    | SiloTrained
    | MaskingOpened
    | MaskAnswered
    | SiloDeclined
    | Aggregated
    | AggregationFailed
    | BudgetExhausted
    | EvaluationReported
    | DeadlinePassed
    | Resumed
)
EVENTS: tuple[type[Event], ...] = (
    PlanOffered,
    PlanStarted,
    PlanStopped,
    PlanPaused,
    PlanResumed,
    SiloEnrolled,
    SiloRevoked,
    GroupsChanged,
    ReadinessDeclared,
    SiloLeft,
    UpdateCommitted,
    SiloTrained,
    MaskingOpened,
    MaskAnswered,
    SiloDeclined,
    Aggregated,
    AggregationFailed,
    BudgetExhausted,
    EvaluationReported,
    DeadlinePassed,
    Resumed,
)
