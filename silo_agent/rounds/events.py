"""What can happen to the agent: an order of the coordinator (`silo_wire.messages.Order`), the end of a piece of work,
or a wish of this silo's own people. Orders may come at any time and again; results come only for work that was asked
for.
"""

from dataclasses import dataclass

from lorica_security.secure_aggregation.masked_vectors.scores import NO_SCORES, Scores
from silo_agent.rounds.as_planned import AsPlanned
from silo_wire.canonical import Digest
from silo_wire.manifest import Manifest
from silo_wire.messages import DeclineReason, Evaluation, Order, RoundKey, TrainingSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedUpdate:
    """A client update whose bytes lie on disk, made from `model` for one attempt alone.

    `masked`: it never leaves as it is; what leaves is it encoded, under masks. `private`: it is a release of the
    privacy ledger, which may be sent for a further attempt at its round: what was released once costs nothing again. A
    gradient sum whose noise comes under the masks is not: its sample is for one attempt. `scores` are of `model`, and
    leave under the same masks.
    """

    key: RoundKey
    model: Digest
    manifest: Manifest
    summary: TrainingSummary
    masked: bool = False
    private: bool = False
    scores: Scores = NO_SCORES


@dataclass(frozen=True, slots=True)
class PlanPrepared:
    """The plan is here, this silo's policy allows it, and the data can serve it; `allows` says what may be ordered
    under it.
    """

    plan: Digest
    allows: AsPlanned


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRefused:
    """`detail` stays in this silo, `told` goes to the coordinator."""

    plan: Digest
    reason: DeclineReason
    detail: str
    told: str


@dataclass(frozen=True, slots=True)
class ModelFetched:
    model: Digest


@dataclass(frozen=True, slots=True)
class Trained:
    update: SavedUpdate


@dataclass(frozen=True, slots=True)
class Uploaded:
    key: RoundKey


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskAnswered:
    """The answer to a Mask order is delivered. `revealed`: it held the shares, and nothing more is asked."""

    key: RoundKey
    revealed: bool


@dataclass(frozen=True, slots=True)
class Evaluated:
    key: RoundKey
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class EvaluationDelivered:
    key: RoundKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFailed:
    """The work under way cannot be finished here. `detail` stays in this silo, `told` goes to the coordinator."""

    reason: DeclineReason
    detail: str
    told: str


@dataclass(frozen=True, slots=True)
class WorkUnwanted:
    """The coordinator no longer takes the result of the work under way: its phase is over."""

    detail: str


@dataclass(frozen=True, slots=True)
class PauseAsked:
    pass


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    pass


@dataclass(frozen=True, slots=True)
class StopAsked:
    pass


Result = (
    PlanPrepared
    | PlanRefused
    | ModelFetched
    | Trained
    | Uploaded
    | MaskAnswered
    | Evaluated
    | EvaluationDelivered
    | WorkFailed
    | WorkUnwanted
)
"""How the one piece of work under way ended."""

Wish = PauseAsked | ResumeAsked | StopAsked

Event = Order | Result | Wish
