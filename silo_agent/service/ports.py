"""What the agent's loop needs of the world. Edges and training implement these; nothing here does anything.

Work that takes long gets `progress`, to be called with a fraction from 0 to 1 as often as it likes, and `cancelled`, to
be asked often (each optimizer step, each batch); when that says True the work raises WorkCancelled and leaves no file
behind that a later run would trust, but for a checkpoint that names the work it belongs to.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lorica_security.audit.chain import Head
from lorica_security.host.file_mark import FileMark
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.messages import MaskedInput
from lorica_security.secure_aggregation.silo.effects import MaskVector
from lorica_security.secure_aggregation.silo.events import Event as MaskingEvent
from lorica_security.secure_aggregation.silo.memory import Forgotten, SiloMemory
from silo_agent.rounds.as_planned import ModelOf
from silo_agent.rounds.effects import JournalActivity, JournalEffect, JournalOutcome
from silo_agent.rounds.events import SavedUpdate
from silo_wire.canonical import Digest
from silo_wire.codecs.ledger_receipt import LedgerReceipt
from silo_wire.codecs.update_receipt import UpdateReceipt
from silo_wire.manifest import Layout, Manifest
from silo_wire.messages import AgentPhase, DeclineReason, Evaluation, MaskAnswer, Order, RoundKey, TrainingSummary
from silo_wire.plans.plan import PlanBundle

Progress = Callable[[float], None]
Cancelled = Callable[[], bool]
Notice = Callable[[str, str], None]
"""Something that this silo's people should know of work that goes on all the same: an event and its detail."""


class WorkCancelled(Exception):
    """The work stopped because `cancelled` said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundModel:
    """A round model's flat vector on disk, and the verified manifest of its bytes.

    `mark` is of the file whose bytes this process checked; None where the reader has to.
    """

    file: Path
    manifest: Manifest
    mark: FileMark | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedUpdate:
    """What training leaves: `manifest` describes the flat vector that was written to the update file and fsynced.

    `mark` is of the file that was written; None where whoever sends it has to check it.
    """

    manifest: Manifest
    summary: TrainingSummary
    mark: FileMark | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedFile:
    """A masked vector on disk; `mark` is of the file as it was written."""

    manifest: Manifest
    mark: FileMark


@dataclass(frozen=True, slots=True)
class Answers:
    """Those of a global model to `questions` of this silo: how many each metric of the task holds right, by its name.
    The first alone leaves the silo, as exact matches."""

    model: Digest
    questions: int
    right: Mapping[str, float]


OnAnswers = Callable[[Digest, Answers], None]
"""Hears of a plan, and of the answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """What a silo's data folder holds. `problems` name file, line and reason of each bad line."""

    train_examples: int
    dev_examples: int
    test_examples: int
    bad_lines: int
    problems: Sequence[str]


class TrainerPort(Protocol):
    """The training workshop (silo_agent.training). All calls block and run in one worker thread, never two at once.

    Errors are LoricaErrors alone: DataError for data or database, IntegrityError for a model file that does not fit its
    layout, ConfigurationError for a device that is not there, StorageError for the disk or too little memory,
    StateError for a loss that is not finite.
    """

    def prepare(self, bundle: PlanBundle, base: RoundModel | None, /) -> DataSummary:
        """Read and check the data under this plan, so that a silo declares itself ready only when it can train.

        `base` is the model that the plan's adapters are for, None where the whole model is trained.
        """

    def train(
        self,
        *,
        bundle: PlanBundle,
        key: RoundKey,
        model: RoundModel,
        update_file: Path,
        included_update: Digest | None,
        told_before: float | None,
        checkpoint_file: Path,
        progress: Progress,
        notice: Notice,
        cancelled: Cancelled,
    ) -> TrainedUpdate:
        """Train one round from `model`; write the delta, flat and in the plan's type, to `update_file` and fsync it.

        `included_update` is this silo's newest that a model includes: what rounding cut off that one is made up for.
        `told_before` is the loss reduction that this silo told in an earlier round of the plan, if it did.
        What an earlier process left in `checkpoint_file` of the same training is not done again.
        """

    def mask(
        self,
        *,
        bundle: PlanBundle,
        update: SavedUpdate,
        update_file: Path,
        mark: FileMark | None,
        out: Path,
        work: MaskVector,
        progress: Progress,
        cancelled: Cancelled,
    ) -> MaskedFile:
        """Write what `work` makes of the update in `update_file` to `out`, and fsync it: the same bytes whenever it is
        done.

        `mark` is of the update's file as this process wrote it. The keys in `work` are erased in any case.
        """

    def evaluate(
        self, *, bundle: PlanBundle, model: RoundModel, progress: Progress, cancelled: Cancelled
    ) -> Evaluation:
        """Score the model on this silo's dev set, with execution accuracy where plan and policy allow it.

        Raises PolicyRefusal where so few questions would be asked that scores tell of single ones.
        """

    def no_training(self, *, update_file: Path) -> TrainedUpdate:
        """Write the delta of a closing round to `update_file`, and fsync it: the same for every silo."""


class CountersignPort(Protocol):
    async def countersign_ledger(self, head: Head, *, after: Head) -> LedgerReceipt:
        """The coordinator's receipt, its signature verified: `head` if that follows what it knew, and it knew
        `after`."""


class CoordinatorPort(CountersignPort, Protocol):
    """The coordinator as an agent sees it. A call that finds it unreachable waits and tries again until cancelled, so
    callers see only answers: a result, or an error of `lorica_security.errors` that is the coordinator's word or this
    silo's."""

    def orders(self) -> AsyncIterator[Order]:
        """Every order as it arrives, over as many connections as it takes. Raises only what ends the agent:
        AuthenticationError, AuthorisationError, Conflict."""

    async def fetch_plan(self, plan: Digest, /) -> PlanBundle: ...

    async def declare_readiness(self, plan: Digest, *, ready: bool, reason: str) -> None: ...

    async def fetch_base(self, *, plan: Digest, layout: Layout, model: Digest, progress: Progress) -> RoundModel:
        """The model that the plan's adapters are for; from this silo's disk if it is there."""

    async def fetch_model(
        self,
        *,
        plan: Digest,
        layout: Layout,
        key: RoundKey | None,
        model: Digest,
        latest_round: int,
        progress: Progress,
    ) -> RoundModel:
        """The verified file of a round model that round `latest_round` or an earlier one made, fetched where
        missing."""

    async def upload(
        self, update: SavedUpdate, file: Path, *, mark: FileMark | None = None, progress: Progress
    ) -> UpdateReceipt:
        """Deliver the update; the coordinator's receipt for it, checked. `mark`: of the file as written."""

    async def declare_trained(self, key: RoundKey, model: Digest) -> None:
        """A delta from `model` is here, to be masked."""

    async def answer_mask(self, key: RoundKey, answer: MaskAnswer) -> None: ...

    async def upload_masked(
        self,
        key: RoundKey,
        masked: MaskedInput,
        manifest: Manifest,
        file: Path,
        *,
        mark: FileMark | None,
        progress: Progress,
    ) -> UpdateReceipt:
        """Deliver a masked vector, as `upload` does an update."""

    async def decline(self, key: RoundKey, reason: DeclineReason, detail: str) -> None: ...

    async def report_progress(self, key: RoundKey, phase: AgentPhase, fraction: float) -> None:
        """Tell how far the work is; a report that cannot be delivered is dropped."""

    async def report_evaluation(self, key: RoundKey, model: Digest, evaluation: Evaluation) -> None: ...


class ModelChecksPort(Protocol):
    async def require(self, bundle: PlanBundle, model: Digest, /) -> None:
        """Return once `model` is shown to be what the plan and its masked sums make.

        Raises PolicyRefusal by the rule `verify`, FalseModel where it is shown that it is not, and what the coordinator
        says.
        """


class JournalPort(Protocol):
    """What survives this process. Each call is durable when it returns."""

    def record(self, effect: JournalEffect, /) -> None: ...

    def paused(self) -> bool: ...

    def round_models(self) -> dict[ModelOf, Digest]:
        """Every model that was journalled as the one of its round."""

    def saved_update(self) -> SavedUpdate | None:
        """The newest update whose file is on disk, whole."""

    def told_before(self, key: RoundKey, /) -> float | None:
        """The loss reduction of the latest earlier round of the plan in which an update of this silo was recorded. No
        attempt at `key`'s own round counts, and no later round."""

    def update_file(self, key: RoundKey, /) -> Path:
        """Where the update of this attempt lies or will lie."""

    def new_update_file(self, key: RoundKey, /) -> Path:
        """The same, for one that is to be written. From now on there is no saved update; what the file holds is of no
        use."""

    def erase_update(self, key: RoundKey, /) -> None:
        """Overwrite what the update of this attempt holds, durably: nobody reads or masks it again. It still counts as
        saved."""

    def checkpoint_file(self, model: Digest, /) -> Path:
        """Where the checkpoint of training from `model` lies or will lie, until its update or another model is
        recorded."""


class MaskingJournalPort(Protocol):
    """What survives this process of secure aggregation. Each call is durable when it returns."""

    vector_file: Path
    """Where the masked vector of the attempt lies."""

    def new_vector_file(self) -> Path:
        """The same, for one that is to be written."""

    def memory(self) -> SiloMemory:
        """Raises PolicyRefusal where it was lost or went back: only this silo's people may say that it goes on."""

    def check(self) -> None:
        """Raises as `memory` does, also where the release groups that this silo held were lost or went back."""

    def remember(self, memory: SiloMemory, /) -> None:
        """Raises as `memory` does, and PolicyRefusal for what does not follow what is on disk."""

    def forgot(self, forgotten: Forgotten, /) -> None:
        """Others know of this silo what it does not: `memory` raises from now on."""

    def saw(self, bundle: PlanBundle, model: Digest, number: int | None = None, /) -> None:
        """`model` is one of this plan, which has masks, and the one after round `number`: kept for as long as the
        memory.

        Raises PolicyRefusal where another one was, or for more than the plan can have.
        """

    def events(self) -> tuple[MaskingEvent, ...]:
        """What `append` was given since the last `erase`."""

    def append(self, event: MaskingEvent, /) -> None: ...

    def keep_manifest(self, manifest: Manifest, /) -> None: ...

    def manifest(self) -> Manifest:
        """Of the masked vector; raises IntegrityError when it was damaged."""

    def erase(self) -> None:
        """Everything of the attempt; not the memory."""


class PlanStorePort(Protocol):
    """Plan bundles on disk: they hold everything about a model but its parameters."""

    def load(self, plan: Digest, /) -> PlanBundle | None: ...

    def save(self, bundle: PlanBundle, /) -> None: ...

    def keep_refused(self, bundle: PlanBundle, /) -> None:
        """Keep a plan that the policy refused, so that this silo's people can look at it and approve it."""


class PlanGatePort(Protocol):
    """This silo's policy (silo_agent.policy): raises PolicyRefusal, whatever the coordinator says."""

    @property
    def silo(self) -> SiloName:
        """By which plans name this silo."""

    @property
    def tells_scores(self) -> bool:
        """Whether scores may leave, alone or in a sum."""

    def check_plan(self, bundle: PlanBundle, /) -> None: ...

    def check_model(self, bundle: PlanBundle, model: Digest, /, *, latest_round: int) -> None:
        """`model` is said to be of round `latest_round` or an earlier one."""

    def check_upload(self, manifest: Manifest, /, *, masked: bool = False) -> None: ...


class DisplayPort(Protocol):
    """What a person sees of the agent: a line or a bar, a log record."""

    def activity(self, activity: JournalActivity, /) -> None: ...

    def progress(self, fraction: float, /) -> None: ...

    def note(self, event: str, **fields: object) -> None: ...


class ObserverPort(Protocol):
    """Who has to know what this silo refused and how its rounds end: its people, by journal, log and metrics."""

    def refused(self, rule: str, detail: str, /) -> None:
        """`rule` is one of silo_agent.service.refusals.RULES. Durable when it returns."""

    def round_ended(self, outcome: JournalOutcome, /) -> None: ...

    def activity(self, activity: JournalActivity, /) -> None: ...

    def epsilon(self, *, spent: float, allowed: float) -> None:
        """What this silo's private rounds have cost so far, and the most that they may."""

    def epsilon_alone(self, *, spent: float, allowed: float) -> None:
        """The same towards all others whose noise counts in it, if they worked against this silo; `spent` is 0 without
        such noise."""
