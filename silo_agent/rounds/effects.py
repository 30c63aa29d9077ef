"""What the machine asks for.

Journal effects come first and are durable before any other effect of the same step runs.

"""

from dataclasses import dataclass
from enum import Enum

from silo_agent.rounds.events import SavedUpdate
from silo_wire.canonical import Digest
from silo_wire.messages import DeclineReason, Evaluate, Evaluation, Finished, Mask, RoundKey, Train


class Outcome(Enum):
    """How this silo's part of a round ended."""

    UPLOADED = "uploaded"
    EVALUATED = "evaluated"
    DECLINED = "declined"
    CLOSED = "closed"  # the coordinator went on without it


class Activity(Enum):
    """What the agent is doing now, for people."""

    WAITING = "waiting"
    REFUSING = "refusing the plan"
    PREPARING = "preparing"
    FETCHING = "fetching"
    TRAINING = "training"
    UPLOADING = "uploading"
    MASKING = "masking"
    EVALUATING = "evaluating"
    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Fetch the plan, ask the policy, look at the data: gives PlanPrepared or PlanRefused."""

    plan: Digest


@dataclass(frozen=True, slots=True)
class FetchModel:
    """Get the model of an order into the cache: gives ModelFetched or WorkFailed."""

    order: Train | Evaluate | Finished


@dataclass(frozen=True, slots=True)
class RunTraining:
    """Gives Trained or WorkFailed."""

    order: Train


@dataclass(frozen=True, slots=True)
class UploadUpdate:
    """Gives Uploaded, WorkFailed or WorkUnwanted."""

    update: SavedUpdate


@dataclass(frozen=True, slots=True)
class AnswerMask:
    """Take the next step of secure aggregation with this update: gives MaskAnswered, WorkFailed or WorkUnwanted."""

    order: Mask
    update: SavedUpdate


@dataclass(frozen=True, slots=True)
class EndMasking:
    """Erase what secure aggregation of this attempt left: its secrets, its journal, the masked vector."""

    key: RoundKey


@dataclass(frozen=True, slots=True)
class RunEvaluation:
    """Gives Evaluated or WorkFailed."""

    order: Evaluate


@dataclass(frozen=True, slots=True)
class ReportEvaluation:
    """Gives EvaluationDelivered, WorkFailed or WorkUnwanted."""

    order: Evaluate
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class CancelWork:
    """Stop the work under way; its result is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclareReadiness:
    plan: Digest
    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclareTrained:
    """A delta from `model` is here, to be masked."""

    key: RoundKey
    model: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Decline:
    """`detail` leaves the silo."""

    key: RoundKey
    reason: DeclineReason
    detail: str


@dataclass(frozen=True, slots=True)
class JournalPlan:
    """This plan was fetched, allowed and prepared for."""

    plan: Digest


@dataclass(frozen=True, slots=True)
class JournalModel:
    """The model with this digest is whole in the cache; `ask` uses the newest."""

    plan: Digest
    model: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRoundModel:
    """This is the plan's model of that round (0: the initial one), for good: no other is scored, or masked for, in its
    place.
    """

    plan: Digest
    round: int
    model: Digest


@dataclass(frozen=True, slots=True)
class JournalUpdate:
    """The update is recorded before its first byte leaves. `made_for`: the attempt whose file it is, where it was made
    for another one."""

    update: SavedUpdate
    made_for: RoundKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalOutcome:
    key: RoundKey
    evaluation: bool  # of an Evaluate order; else of a Train order
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRefusal:
    """What the coordinator asked breaks a rule of this silo's; what a piece of work refuses is recorded where it
    fails.
    """

    rule: str
    detail: str


@dataclass(frozen=True, slots=True)
class JournalActivity:
    """What `silo-agent status` shows; `key` is None outside a round."""

    activity: Activity
    key: RoundKey | None = None
    detail: str = ""


Work = FetchPlan | FetchModel | RunTraining | UploadUpdate | AnswerMask | RunEvaluation | ReportEvaluation
"""At most one of these is under way; its result comes back as an event."""

Errand = DeclareReadiness | DeclareTrained | Decline
"""Told to the coordinator in order; nothing comes back."""

JournalEffect = JournalPlan | JournalModel | JournalRoundModel | JournalUpdate | JournalOutcome | JournalActivity

Effect = Work | Errand | CancelWork | EndMasking | RecordRefusal | JournalEffect
