"""Where the agent stands: its phase, one flat value each, and what outlasts a phase."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from silo_agent.rounds.as_planned import AsPlanned, ModelOf
from silo_agent.rounds.effects import Effect
from silo_agent.rounds.events import SavedUpdate
from silo_wire.canonical import Digest
from silo_wire.messages import DeclineReason, Evaluate, Evaluation, Finished, Mask, Prepare, Standby, Train

PAUSED = "the silo is paused: its people resume it with `silo-agent resume`"
FAILURES_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class Idle:
    """Without a plan."""


@dataclass(frozen=True, slots=True)
class Preparing:
    """A plan is being fetched and checked; `then` is the order that waits for it, `held` the update that was held
    before.
    """

    plan: Digest
    then: Train | Mask | Evaluate | Finished | None = None
    held: SavedUpdate | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The plan is prepared and nothing is asked."""

    plan: Digest


@dataclass(frozen=True, slots=True)
class Holding:
    """This silo's delta is ready to be masked; other silos still train, or have yet to answer."""

    update: SavedUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """`detail` stays in this silo, `told` goes to the coordinator; so in Declined."""

    plan: Digest
    reason: DeclineReason
    detail: str
    told: str


@dataclass(frozen=True, slots=True)
class Fetching:
    """The model of an order is on the way."""

    order: Train | Evaluate


@dataclass(frozen=True, slots=True)
class Training:
    """The local trainer is at work."""

    order: Train


@dataclass(frozen=True, slots=True)
class Uploading:
    """The update is being delivered; `then` is the newest order that came meanwhile."""

    order: Train
    update: SavedUpdate
    then: Prepare | Train | Mask | Evaluate | Finished | None = None


@dataclass(frozen=True, slots=True)
class Answering:
    """A step of secure aggregation is being taken."""

    order: Mask
    update: SavedUpdate
    then: Prepare | Standby | Train | Mask | Evaluate | Finished | None = None


@dataclass(frozen=True, slots=True)
class Evaluating:
    """The model is being scored."""

    order: Evaluate


@dataclass(frozen=True, slots=True)
class Reporting:
    """The scores are being delivered; `then` as in Uploading."""

    order: Evaluate
    evaluation: Evaluation
    then: Prepare | Train | Mask | Evaluate | Finished | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """This silo has delivered its part of the phase; it keeps `evaluation`, which may be asked for again."""

    order: Train | Mask | Evaluate
    evaluation: Evaluation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """An order was declined; `told` is what the coordinator heard."""

    order: Train | Mask | Evaluate
    reason: DeclineReason
    told: str


@dataclass(frozen=True, slots=True)
class Collecting:
    """The plan is finished and its best model is on the way, for `silo-agent ask`."""

    order: Finished


@dataclass(frozen=True, slots=True)
class Complete:
    """The plan is finished; its best model was fetched, or the download failed."""

    order: Finished


@dataclass(frozen=True, slots=True)
class Stopped:
    """The end."""


Phase = (
    Idle
    | Preparing
    | Ready
    | Refused
    | Fetching
    | Training
    | Uploading
    | Holding
    | Answering
    | Evaluating
    | Reporting
    | Done
    | Declined
    | Collecting
    | Complete
    | Stopped
)
ON_AN_ORDER = (Fetching, Training, Uploading, Answering, Evaluating, Reporting)
DELIVERING = (Uploading, Answering, Reporting)
WORKING = (Preparing, Collecting, *ON_AN_ORDER)
COUNTED_ON = (Ready, Done, Declined, Holding)  # the coordinator may open the next round with this silo


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Where the agent stands.

    `prepared` was checked in this process, and `allows` is what may be ordered under it; `saved` is on disk, perhaps
    from an earlier one, and so are the `models` that orders were about; `failures` came since the last work that
    succeeded, `trouble` is what the coordinator was told of the latest.
    """

    phase: Phase = Idle()
    paused: bool = False
    prepared: Digest | None = None
    allows: AsPlanned | None = None
    models: Mapping[ModelOf, Digest] = field(default_factory=dict)
    saved: SavedUpdate | None = None
    failures: int = 0
    trouble: str = ""

    @property
    def unready(self) -> str:
        """Why this silo takes no new round; empty when it does."""
        if self.paused:
            return PAUSED
        if self.failures >= FAILURES_IN_A_ROW:
            return (
                f"{self.failures} pieces of work failed here in a row, the last: {self.trouble}; mend it, then restart"
            )
        return ""


Step = tuple[Agent, tuple[Effect, ...]]
