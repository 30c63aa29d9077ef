"""`TrainerPort` over silo_agent.training: this silo's data, database, device and sandbox around one plan's trainer.

The only edge that imports torch, so commands import it when they train or answer and not before.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import structlog
import torch

from lorica_security.errors import DataError, LoricaError, PolicyRefusal, StateError, StorageError
from lorica_security.host.file_mark import FileMark
from lorica_security.secure_aggregation.silo.effects import MaskVector
from silo_agent.edges.workshop.answers_tried import answers_tried, filters_here, required_database
from silo_agent.edges.workshop.silo_sources import Reading, SiloSources
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.rounds.events import SavedUpdate
from silo_agent.rounds.update import TrainingStopped
from silo_agent.service.ports import (
    Answers,
    Cancelled,
    DataSummary,
    MaskedFile,
    Notice,
    OnAnswers,
    Progress,
    RoundModel,
    TrainedUpdate,
    WorkCancelled,
)
from silo_agent.settings import Settings
from silo_agent.sql_sandbox import Rows, run_select
from silo_agent.training.checkpoint import examples_digest
from silo_agent.training.data.text_to_sql_data import SiloData
from silo_agent.training.device import DeviceSettings
from silo_agent.training.evaluation import judged_on
from silo_agent.training.loss_log import require_losses
from silo_agent.training.model.plan_model import PlanModel
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.update.client_update import write_no_delta
from silo_agent.training.update.masked_vector import KeptDelta, own_weight, write_masked_vector
from silo_wire.canonical import Digest
from silo_wire.manifest import SCORES_ALONE
from silo_wire.messages import Evaluation, RoundKey, TrainingSummary
from silo_wire.model_folders.tokenizer_trial import PANIC
from silo_wire.plans.noised_masks import GRADIENT_STEPS, noise_shares
from silo_wire.plans.plan import PlanBundle

_log = structlog.get_logger(__name__)


class Workshop:
    """Not for use by several threads at once."""

    def __init__(
        self,
        *,
        settings: Settings,
        policy: SiloPolicy,
        sources: SiloSources,
        model_of: Callable[[PlanBundle, DeviceSettings, RoundModel | None], PlanModel] | None = None,
        own_entropy: bytes | None = None,
        checkpoint_every_s: float = 0.0,
        on_losses: Callable[[int, Sequence[float]], None] = lambda round_number, losses: None,
        on_private_data: Callable[[SiloData, str], None] = lambda data, unit_field: None,
        on_answers: OnAnswers = lambda plan, evaluated: None,
    ) -> None:
        """`model_of` gives a model that other workshops of this process use in turn; without it each plan's is made
        here.

        `own_entropy`: see SiloTrainer. `checkpoint_every_s`: how many seconds of training a checkpoint must be worth;
        0: every epoch leaves one. `on_private_data` hears of the data that a private plan is prepared on, and by which
        key lines are grouped. `on_losses` hears the loss of each optimizer step of a round when its training has ended;
        NaN where a step has none to tell. `on_answers` hears how many answers of each global model are right, in parts
        that do not leave.
        """
        self._on_answers = on_answers
        self._on_losses = on_losses
        self._on_private_data = on_private_data
        self._settings = settings
        self._model_of = model_of or (lambda bundle, device, base: PlanModel(bundle, device, base=base))
        self._policy = policy
        self._sources = sources
        self._own_entropy = own_entropy
        self._checkpoint_every_s = checkpoint_every_s
        self._bundle: PlanBundle | None = None
        self._trainer: SiloTrainer | None = None

    def prepare(self, bundle: PlanBundle, base: RoundModel | None) -> DataSummary:
        """Data read and tokenised, model built; raises DataError, ConfigurationError, MalformedMessage,
        StorageError."""
        self._bundle = self._trainer = None  # two models need not be in memory
        with on_records():
            privacy = bundle.plan.privacy
            data = self._sources.data_for(Reading.of(bundle.plan, self._policy.silo))
            self._policy.check_epochs(bundle.plan, len(data.train))
            require_losses(bundle.plan, self._policy.silo, len(data.train))
            if bundle.plan.releases_of_round:
                self._on_private_data(data, privacy.unit_field)
            model = self._model_of(bundle, self._device(), base)
            trainer = SiloTrainer(
                bundle, data, self._policy.silo, self._device(), model=model, own_entropy=self._own_entropy
            )
            trainer.encoded("train")
        if filters_here(bundle.plan, self._policy.silo):
            required_database(bundle.plan, self._sources)
        self._bundle, self._trainer = bundle, trainer
        if self._executes(bundle) or filters_here(bundle.plan, self._policy.silo):
            self._sources.check_database()
        return self._sources.summary()

    def examples(self, bundle: PlanBundle) -> Digest:
        """Of what `prepare` read and tokenised for training."""
        return examples_digest(self._of(bundle).encoded("train"))

    def check_private_model(self, bundle: PlanBundle, model: RoundModel) -> None:
        """Raises PolicyRefusal for a round model that this silo does not train under record-level privacy."""
        if bundle.plan.privacy.level == "record":
            largest = self._of(bundle).largest_parameter(
                model_path=model.file, model=model.manifest, model_mark=model.mark
            )
            self._policy.check_private_model(bundle, largest)

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
        trainer = self._of(bundle)
        losses: list[float] = []

        def on_progress(fraction: float, loss: float) -> None:
            losses.append(loss)
            progress(fraction)

        self.check_private_model(bundle, model)
        with (
            on_records(),
            answers_tried(bundle.plan, self._policy.silo, self._sources) as answers,
        ):
            update = trainer.train(
                round_number=key.round,
                model_path=model.file,
                model=model.manifest,
                model_mark=model.mark,
                update_path=update_file,
                included_update=included_update,
                told_before=told_before,
                checkpoint_path=checkpoint_file,
                checkpoint_every_s=self._checkpoint_every_s,
                answers=answers,
                on_progress=on_progress,
                on_notice=notice,
                should_stop=cancelled,
            )
        if answers is not None:
            # To this silo's own log: nobody else hears how many.
            _log.info("answers-tried", round=key.round, **answers.counts)
        self._on_losses(key.round, losses)
        return TrainedUpdate(manifest=update.manifest, summary=update.summary, mark=update.mark)

    def no_training(self, *, update_file: Path) -> TrainedUpdate:
        written = write_no_delta(update_file, SCORES_ALONE)
        nothing = TrainingSummary(
            examples=1, loss_max=0.0, loss_min=0.0, loss_first=0.0, loss_last=0.0, optimizer_steps=0, seconds=0.0
        )
        return TrainedUpdate(manifest=written.manifest, summary=nothing, mark=written.mark)

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
        section = bundle.plan.aggregation
        with _stoppable():
            written = write_masked_vector(
                out,
                work,
                KeptDelta(
                    file=update_file,
                    manifest=update.manifest,
                    mark=mark,
                    unit=section.delta_bound / GRADIENT_STEPS if bundle.plan.joint else None,
                ),
                weight=own_weight(section, update.summary),
                scores=update.scores,
                clipping_norm=section.max_delta_norm,
                noise=noise_shares(bundle, work.parameters),
                progress=progress,
                should_stop=cancelled,
            )
        return MaskedFile(manifest=written.manifest, mark=written.mark)

    def evaluate(
        self, *, bundle: PlanBundle, model: RoundModel, progress: Progress, cancelled: Cancelled
    ) -> Evaluation:
        trainer = self._of(bundle)
        if bundle.plan.semi_supervised.without_labels(self._policy.silo):
            raise PolicyRefusal(
                "labels", "this silo has no labels in this plan: its scores are those of silos that have some"
            )
        self._policy.check_evaluation(trainer.questions("dev"))
        target = self._sources.database() if self._executes(bundle) else None
        counts: dict[str, float] = {}
        with on_records():
            with judged_on(target, self._sources.limits()) as same_result:
                evaluation = trainer.evaluate(
                    model_path=model.file,
                    model=model.manifest,
                    model_mark=model.mark,
                    same_result=same_result,
                    on_parts=counts.update,
                    on_progress=progress,
                    should_stop=cancelled,
                )
            self._on_answers(
                bundle.plan.digest, Answers(model=model.manifest.digest, questions=evaluation.examples, right=counts)
            )
            return evaluation

    def answer(self, *, bundle: PlanBundle, base: RoundModel | None, model: RoundModel, question: str) -> str:
        """The model's answer to one question; SQL is hostile until the sandbox has run it."""
        with enough_memory():
            reading = replace(Reading.of(bundle.plan, self._policy.silo), unit_field="", private=False)
            data = self._sources.data_for(reading)
            trainer = SiloTrainer(bundle, data, self._policy.silo, self._device(), base=base)
            return trainer.answer(question, model_path=model.file, model=model.manifest)

    def run(self, sql: str) -> Rows | None:
        """What the SQL gives on this silo's database, in the sandbox; None without a database.

        Raises PolicyRefusal, UnsafeSql, QueryFailed, DataError.
        """
        target = self._sources.database()
        if target is None:
            return None
        self._policy.check_execution()
        return run_select(target, sql, self._sources.limits())

    def _of(self, bundle: PlanBundle) -> SiloTrainer:
        if self._trainer is None or self._bundle is None or self._bundle.plan.digest != bundle.plan.digest:
            raise StateError(f"plan {bundle.plan.name} is not prepared: nothing was done under it")
        return self._trainer

    def _executes(self, bundle: PlanBundle) -> bool:
        plan = bundle.plan
        return plan.task.is_sql and plan.evaluation.execution and self._policy.rules.allow_execution

    def _device(self) -> DeviceSettings:
        training = self._settings.training
        return DeviceSettings(device=training.device, threads=training.threads)


@contextmanager
def enough_memory() -> Iterator[None]:
    """Raises StorageError where this machine, or its GPU, has too little for what is done inside."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise StorageError(
            "this machine has too little memory for the plan's model and batch size: "
            "have batch_size lowered for this silo ([training.overrides] of the plan), or add memory"
        ) from error


@contextmanager
def on_records() -> Iterator[None]:
    """Work on this silo's records with what a plan or a model is. However that ends it, it ends the work alone.

    Raises DataError for what nobody foresaw: an agent that ended instead would tell of a record too, and be gone.
    """
    with enough_memory(), _stoppable():
        try:
            yield
        except (LoricaError, TrainingStopped, MemoryError, torch.OutOfMemoryError):
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            # Not as exc_info, which may be rendered with the values of variables: records are among them.
            _log.error("defect", traceback="".join(traceback.format_exception(error)))
            raise DataError(
                f"the plan's model or tokenizer could not work on this silo's records ({type(error).__name__}: "
                f"{error}): show this silo's log to whoever made the plan"
            ) from error


@contextmanager
def _stoppable() -> Iterator[None]:
    try:
        yield
    except TrainingStopped as stopped:
        raise WorkCancelled from stopped
