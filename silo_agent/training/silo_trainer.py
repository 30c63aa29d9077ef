"""What the silo agent holds for a plan: one model in memory, its data tokenised once, and three verbs: train, evaluate,
answer.

Not for use by several threads at once. A round model is a file that holds its flat vector; it is checked against its
manifest when it is read, unless this process has checked it and the file is still the same. An update is written to a
file the same way.
"""

import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from blake3 import blake3

from lorica_security.errors import DataError
from lorica_security.host.file_mark import FileMark
from lorica_security.noise.random_words import KEY_BYTES, RandomWords
from silo_agent.service.ports import Notice, RoundModel
from silo_agent.training.checkpoint import CheckpointFile, training_identity
from silo_agent.training.data.batches import EncodedExamples, encode_examples
from silo_agent.training.data.serialisation import model_input
from silo_agent.training.data.text_to_sql_data import SiloData, Split
from silo_agent.training.data.tokenizer import TextTokenizer
from silo_agent.training.data.views import View, other_views
from silo_agent.training.device import DeviceSettings
from silo_agent.training.draws import Seed
from silo_agent.training.evaluation import Parts, SameResult, Truths, evaluate
from silo_agent.training.generation import generated
from silo_agent.training.local_trainer import Objective, Progress, train_locally
from silo_agent.training.loss_reduction import MOST_EXAMPLES, averaged, drawn_sample
from silo_agent.training.model.plan_model import PlanModel
from silo_agent.training.model.vector_file import VectorReader
from silo_agent.training.ranks.ranks import ALONE, Ranks
from silo_agent.training.semi_supervised.answer_filter import AnswerFilter
from silo_agent.training.semi_supervised.consistency import Consistency, dropout_of
from silo_agent.training.semi_supervised.span_corruption import Questions, SpanCorruption
from silo_agent.training.tasks.named import task_of
from silo_agent.training.update.client_update import Feedback, write_update
from silo_agent.training.update.control_state import ControlStates
from silo_agent.training.update.masked_vector import own_share
from silo_agent.training.update.parts import part_of
from silo_agent.training.update.residual import Residuals
from silo_agent.training.update.spread import Spread
from silo_wire.canonical import Digest, canonical_json
from silo_wire.manifest import Manifest
from silo_wire.messages import Evaluation, TrainingSummary
from silo_wire.plans.plan import PlanBundle


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUpdate:
    """One round's outcome at one silo: the summary, the manifest of the file that holds the update, the delta's L2
    norm."""

    summary: TrainingSummary
    manifest: Manifest
    delta_norm: float
    mark: FileMark


class SiloTrainer:
    """A plan's model at one silo."""

    def __init__(
        self,
        bundle: PlanBundle,
        data: SiloData,
        silo: str,
        settings: DeviceSettings,
        *,
        base: RoundModel | None = None,
        model: PlanModel | None = None,
        own_entropy: bytes | None = None,
        ranks: Ranks = ALONE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model` is one that silos of one process share; without one it is made here, and raises what PlanModel does.

        `own_entropy`: 32 bytes that only this silo knows, which order of data and dropout come from under masks; None:
        drawn here. `ranks`: the processes that train together, each of which makes the same calls of `train`.

        Raises DataError for data that were read for another task.
        """
        self._plan = bundle.plan
        self._task = task_of(bundle.plan.task)
        if data.task != self._task.name:
            raise DataError(
                f"the data of silo {silo} are of task {data.task}, the plan's is {self._task.name}: give the folder "
                "of such data, or approve no such plan"
            )
        self._layout = bundle.layout
        self._section = bundle.plan.training.for_silo(silo)
        self._data = data
        self._silo = silo
        self._clock = clock
        self._ranks = ranks
        self._own_entropy = own_entropy or secrets.token_bytes(blake3.key_size)
        self._model = model or PlanModel(bundle, settings, base=base, ranks=ranks)
        self._shows_schema = self._section.schema_in_input and self._task.shows_schema
        self._schemas: dict[str, str] | None = None
        if self._shows_schema:
            self._schemas = {schema.db_id: self._task.shown(schema) for schema in data.schemas}
        self._encoded: dict[Split, EncodedExamples] = {}

    def encoded(self, split: Split) -> EncodedExamples:
        """The split's token ids and what the plan's limits cut from them; tokenised on first use."""
        if split not in self._encoded:
            self._encoded[split] = encode_examples(
                self._model.tokenizer,
                self._data.split(split),
                schemas=self._schemas,
                max_input_tokens=self._section.max_input_tokens,
                max_output_tokens=self._section.max_output_tokens,
                other_views=self._other_views() if split == "train" else (),
                spool=self._data.spool,
            )
        return self._encoded[split]

    def _other_views(self) -> list[View]:
        """That private training makes of each record."""
        return other_views(
            self._plan.privacy.augmentations,
            self._data.schemas if self._shows_schema else None,
            shown=self._task.shown,
        )

    def train(
        self,
        *,
        round_number: int,
        model_path: Path,
        model: Manifest,
        model_mark: FileMark | None = None,
        update_path: Path,
        included_update: Digest | None = None,
        told_before: float | None = None,
        checkpoint_path: Path | None = None,
        checkpoint_every_s: float = 0.0,
        answers: AnswerFilter | None = None,
        on_progress: Progress = lambda fraction, loss: None,
        on_notice: Notice = lambda event, detail: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> LocalUpdate:
        """Train from the round model in `model_path` and write the update to `update_path`, in the plan's type for
        updates: the delta, or of a joint step the sum of gradients as joint_gradient.py writes it.

        `included_update` is this silo's newest one that a model includes: in bfloat16, what rounding cut off that one
        is added to this one. Where drift is corrected, its control state is what is gone on with, or none is, and
        the correction begins anew. Both lie beside the update. `told_before`: the loss reduction that this silo told in
        an earlier round, if it did: what a plan that remembers averages this round's with.

        Each epoch but the last leaves a checkpoint in `checkpoint_path`, if one is given; one of this very training
        that is there already is gone on from. It is the caller's to delete once the update counts. With
        `checkpoint_every_s` only an epoch leaves one that ends so many seconds of training after the one before, or
        after the beginning.

        `answers`: what a plan with [semi_supervised] filter has a silo without labels put its teacher's answers
        through.

        The same plan, round, silo, data, residual and thread count, and under masks the same own entropy, give the same
        bytes on a CPU; on a GPU the order of some sums is free. Raises IntegrityError for a damaged round model,
        TrainingDiverged, TrainingStopped, StorageError where the update cannot be written.
        """
        unlabelled = self._plan.semi_supervised.without_labels(self._silo)
        if unlabelled == self._data.labelled:
            raise DataError(
                f"the data of silo {self._silo} were read with{'' if self._data.labelled else 'out'} labels, and the "
                f"plan has it train with{'out' if unlabelled else ''} them: read them as the plan says"
            )
        if unlabelled and self._task.masks_loss:
            raise DataError(
                f"task {self._task.name} says which tokens count, and silo {self._silo} trains on a teacher's answers, "
                "of which nobody says so: label its lines, or have the operator leave it out"
            )
        self._model.load(model_path, model, model_mark)
        trained = self._model.begin_training(round_number)
        parameters = list(trained.values())
        if self._plan.joint:
            return self._gradient_sum(update_path, parameters, on_progress=on_progress, should_stop=should_stop)
        states = self._control_states(update_path.parent)
        if self._plan.privacy.level == "record":
            summary = self._train_privately(parameters, on_progress=on_progress, should_stop=should_stop)
        else:
            correction = None
            if states is not None:
                correction = states.correction(
                    included_update,
                    self._model.reader(model_path, model),
                    names=trained.keys(),
                    device=self._model.device,
                )
            with self._student_of(parameters, answers) if unlabelled else nullcontext() as objective:
                summary = train_locally(
                    self._model.t5,
                    parameters,
                    self.encoded("train"),
                    self._section,
                    seed=self._own_seed("train", round_number),
                    sample=self._loss_sample(round_number),
                    round_parameters=(
                        self._model.mapped(model_path, model, trained) if self._section.fedprox_mu else None
                    ),
                    correction=correction,
                    checkpoint=self._checkpoint(
                        checkpoint_path, checkpoint_every_s, round_number, model, included_update, on_notice
                    )
                    if checkpoint_path
                    else None,
                    on_progress=on_progress,
                    should_stop=should_stop,
                    clock=self._clock,
                    objective=objective,
                    ranks=self._ranks,
                )
            summary = averaged(summary, memory=self._plan.aggregation.reduction_memory, told_before=told_before)
        self._ranks.require_same_model(parameters)
        residuals = Residuals(folder=update_path.parent, plan=self._plan.digest, layout=self._layout, notice=on_notice)
        layout = self._model.bundle.update_layout
        part = part_of(layout, model, self._model.item_bytes(model), self._ranks)
        written = write_update(
            update_path,
            layout,
            parameters=self._model.parameters,
            round_model=self._model.reader(model_path, model, part),
            feedback=Feedback(residuals=residuals, included=included_update),
            spread=self._spread(round_number, summary),
            resting={spec.name for spec in self._model.parameters.specs} - trained.keys(),
            most=self._plan.aggregation.max_delta_norm or math.inf,
            part=part,
            ranks=self._ranks,
        )
        if states is not None:
            states.keep(
                written.manifest.digest,
                delta=VectorReader(update_path, written.manifest, self._layout, written.mark),
                included=included_update,
                round_model=self._model.reader(model_path, model),
            )
        return LocalUpdate(summary=summary, manifest=written.manifest, delta_norm=written.norm, mark=written.mark)

    def _control_states(self, folder: Path) -> ControlStates | None:
        if not self._plan.corrects_drift:
            return None
        return ControlStates(
            folder=folder,
            plan=self._plan.digest,
            layout=self._layout,
            server_rate=self._plan.aggregation.server_learning_rate,
            work=self._section.steps * self._section.learning_rate,
        )

    @contextmanager
    def _student_of(
        self, parameters: Sequence[torch.nn.Parameter], answers: AnswerFilter | None
    ) -> Iterator[Objective]:
        """Of a silo without labels: within, the model has the student's dropout."""
        section, t5, tokenizer = self._plan.semi_supervised, self._model.t5, self._model.tokenizer
        if answers is None and section.filter != "none":
            raise DataError(
                f'plan {self._plan.name} has [semi_supervised] filter = "{section.filter}", and silo {self._silo} '
                "trains without its database: open it first"
            )
        with dropout_of(t5, section.student_dropout):
            if section.teacher == "mlm":
                questions = Questions(tokenizer, self._data.train, self._schemas or {}, self._data.spool)
                yield SpanCorruption(t5, self._model.device, tokenizer, questions, self._section)
                return
            counts = None if answers is None else partial(_counted, answers, tokenizer)
            yield Consistency(t5, parameters, self.encoded("train"), self._section, section, counts)

    def _spread(self, round_number: int, summary: TrainingSummary) -> Spread | None:
        section = self._plan.aggregation
        if not section.secure_aggregation:
            return None
        return Spread(self._own_key("spread", round_number), own_share(section, summary))

    def _train_privately(
        self, parameters: Sequence[torch.nn.Parameter], *, on_progress: Progress, should_stop: Callable[[], bool]
    ) -> TrainingSummary:
        # Here, not above: Opacus takes a second to load, which silos of other plans need not wait for.
        from silo_agent.training.private.private_trainer import schedule_of, train_privately

        weight = train_privately(
            self._model.t5,
            parameters,
            self.encoded("train"),
            self._section,
            schedule_of(self._plan, self._section),
            backend="ghost",
            words=RandomWords(secrets.token_bytes(KEY_BYTES)),
            on_progress=lambda fraction: on_progress(fraction, math.nan),
            should_stop=should_stop,
            ranks=self._ranks,
            own_entropy=self._own_entropy,
        )
        return self._plan.privacy.summary(weight)

    def _gradient_sum(
        self,
        update_path: Path,
        parameters: Sequence[torch.nn.Parameter],
        *,
        on_progress: Progress,
        should_stop: Callable[[], bool],
    ) -> LocalUpdate:
        """What this silo adds to a joint step, without noise: never to leave before it has that and its masks."""
        # Here, not above: as in `_train_privately`.
        from silo_agent.training.private.joint_gradient import sum_gradients, take_sums, write_sum
        from silo_agent.training.private.private_trainer import schedule_of

        privacy = self._plan.privacy
        try:
            sum_gradients(
                self._model.t5,
                parameters,
                self.encoded("train"),
                schedule_of(self._plan, self._section),
                self._section,
                backend="ghost",
                words=RandomWords(secrets.token_bytes(KEY_BYTES)),
                should_stop=should_stop,
            )
        finally:
            sums = take_sums(self._model.parameters.tensors)  # None for those at rest
        written = write_sum(
            update_path,
            self._model.bundle.update_layout,
            sums,
            divisor=privacy.expected_batch_size,
            bound=self._plan.aggregation.delta_bound,
        )
        on_progress(1.0, math.nan)
        return LocalUpdate(
            summary=privacy.summary(None), manifest=written.manifest, delta_norm=written.norm, mark=written.mark
        )

    def largest_parameter(self, *, model_path: Path, model: Manifest, model_mark: FileMark | None = None) -> float:
        """In size, of the round model and what its adapters are for; not a number where one is none. Raises
        IntegrityError."""
        self._model.load(model_path, model, model_mark)
        return self._model.largest_parameter()

    def questions(self, split: Literal["dev", "test"]) -> int:
        """How many an evaluation asks, by the plan's limit."""
        held = len(self._data.split(split))
        return min(self._plan.evaluation.max_examples or held, held)

    def evaluate(
        self,
        *,
        model_path: Path,
        model: Manifest,
        model_mark: FileMark | None = None,
        split: Literal["dev", "test"] = "dev",
        most: int | None = None,
        same_result: SameResult | None = None,
        on_parts: Parts = lambda counts: None,
        on_truths: Truths = lambda truths: None,
        on_progress: Callable[[float], None] = lambda fraction: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Evaluation:
        """Score the model in `model_path` on a held-out split, on at most `most` of it (0: all), else the plan's
        `max_examples`.

        Which examples those are depends on plan and silo alone, so that scores of different rounds compare. Execution
        is counted where `same_result` is given (see evaluation.in_sandbox). `on_parts` and `on_truths` hear
        what is the silo's own (evaluation.py). Raises DataError for an empty split.
        """
        examples = self._data.split(split)
        if not examples:
            raise DataError(f"silo {self._silo} has no {split} examples: add {split}.jsonl to its data folder")
        self._model.load(model_path, model, model_mark)
        section = self._plan.evaluation
        return evaluate(
            self._model.t5,
            self._model.tokenizer,
            examples,
            self.encoded(split),
            self._chosen(split, section.max_examples if most is None else most),
            task=self._task,
            schemas={schema.db_id: schema for schema in self._data.schemas},
            split=split,
            batch_size=section.batch_size,
            beams=section.beams,
            max_output_tokens=self._section.max_output_tokens,
            same_result=same_result if section.execution and self._plan.task.is_sql else None,
            on_parts=on_parts,
            on_truths=on_truths,
            on_progress=on_progress,
            should_stop=should_stop,
            clock=self._clock,
        )

    @torch.inference_mode()
    def answer(self, question: str, *, model_path: Path, model: Manifest) -> str:
        """The SQL that the model in `model_path` answers `question` to the first database with; hostile until the
        sandbox has run it."""
        self._model.load(model_path, model)
        self._model.t5.eval()
        section = self._section
        if not self._plan.task.is_sql and len(self._data.schemas) > 1:
            raise DataError(
                f"a question of task {self._data.task} is asked of one table, and the data of silo {self._silo} have "
                f"{len(self._data.schemas)}: give a data folder with the lines of that table alone"
            )
        (ids,) = self._model.tokenizer.encode(
            [model_input(question, self._schemas[self._data.schema.db_id] if self._schemas else None)]
        )
        input_ids = torch.tensor([self._model.tokenizer.cut(ids, section.max_input_tokens)], device=self._model.device)
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        hidden = self._model.t5.get_encoder()(input_ids=input_ids, attention_mask=mask)[0]
        answers = generated(
            self._model.t5,
            hidden,
            mask,
            beams=self._plan.evaluation.beams,
            max_new_tokens=section.max_output_tokens,
        )
        return self._model.tokenizer.decode(answers)[0]

    def _checkpoint(
        self,
        path: Path,
        every_s: float,
        round_number: int,
        model: Manifest,
        included: Digest | None,
        notice: Notice,
    ) -> CheckpointFile:
        training = training_identity(
            plan=self._plan.digest,
            round_number=round_number,
            silo=self._silo,
            model=model.digest,
            examples=self.encoded("train"),
            device=self._model.device,
            control=included if self._plan.corrects_drift else None,
            ranks=self._ranks,
        )
        update = self._model.bundle.update_layout
        residual_bytes = 0 if update.dtype == self._layout.dtype else self._layout.total_bytes
        control_bytes = self._layout.total_bytes if self._plan.corrects_drift else 0
        return CheckpointFile(
            path,
            training,
            update_bytes=update.total_bytes + residual_bytes + control_bytes,
            notice=notice,
            every_s=every_s,
            ranks=self._ranks,
        )

    def _chosen(self, split: Split, most: int) -> list[int]:
        count = len(self._data.split(split))
        if not 0 < most < count:
            return list(range(count))
        generator = torch.Generator().manual_seed(self._seed(split, 0))
        chosen: list[int] = torch.randperm(count, generator=generator)[:most].tolist()
        return chosen

    def _loss_sample(self, round_number: int) -> list[int] | None:
        """Drawn for the round. Where no loss is evaluated, None."""
        if not self._plan.evaluates_losses:
            return None
        return drawn_sample(len(self.encoded("train")), self._own_seed("loss", round_number))

    @property
    def loss_batches(self) -> int:
        """Batches of one evaluation of the loss in a round's training, of which there are two; 0 without one."""
        if not self._plan.evaluates_losses:
            return 0
        return -(-min(len(self.encoded("train")), MOST_EXAMPLES) // self._section.batch_size)

    def _own_seed(self, purpose: str, round_number: int) -> Seed:
        """Under masks nobody but this silo knows it: who does can try out what a guessed record would change in the
        delta."""
        if not self._plan.aggregation.secure_aggregation:
            return self._seed(purpose, round_number)
        return self._own_key(purpose, round_number)

    def _own_key(self, purpose: str, round_number: int) -> bytes:
        """32 bytes that only this silo knows, and that a training which is done again has again."""
        return blake3(self._seed(purpose, round_number).to_bytes(8, "little"), key=self._own_entropy).digest()

    def _seed(self, purpose: str, round_number: int) -> int:
        """63 bits of BLAKE3 over what the draws may depend on; the plan's digest covers its seed."""
        source = canonical_json([self._plan.digest, self._plan.seed, purpose, round_number, self._silo])
        return int.from_bytes(blake3(source).digest(length=8), "little") >> 1


def _counted(
    answers: AnswerFilter, tokenizer: TextTokenizer, samples: Sequence[list[int]], should_stop: Callable[[], bool]
) -> bool:
    return answers.counts_answer(tokenizer.decode(samples), should_stop)
