"""Models of this silo's own, by the plan's model, data and settings: none of them leaves.

The local model is trained from the plan's initial model on this silo's records alone, for as many epochs as the whole
plan trains here. The personal model comes from the newest global one: trained on (`finetune`), its output layer alone
(`heads`), a low-rank change of it (`adapters`), or kept over the rounds with the gradient of lambda/2 ||v - w||^2, w
the global model (`ditto`; Li et al., ICML 2021). There is no noise and no bound in any, whatever the plan promises for
what leaves.

The same goal, start and thread count give the same bytes on a CPU, also after a kill: each epoch but the last leaves a
checkpoint.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from lorica_security.errors import ConfigurationError, DataError
from silo_agent.service.ports import Notice, RoundModel
from silo_agent.training.checkpoint import CheckpointFile, examples_digest, training_identity
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.data.text_to_sql_data import SiloData
from silo_agent.training.device import DeviceSettings
from silo_agent.training.evaluation import Parts, SameResult
from silo_agent.training.local_trainer import train_locally
from silo_agent.training.model.low_rank import low_rank_changes
from silo_agent.training.model.model import OUTPUT_LAYER
from silo_agent.training.model.plan_model import PlanModel
from silo_agent.training.model.vector_file import blocks, new_vector_file
from silo_agent.training.silo_trainer import SiloTrainer
from silo_wire.canonical import Digest, canonical_json, digest_of
from silo_wire.manifest import Manifest
from silo_wire.messages import Evaluation
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.sections.training import TrainingSection
from silo_wire.plans.work import epochs_begun

Method = Literal["local", "finetune", "ditto", "heads", "adapters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSettings:
    """What this silo's people chose; a `learning_rate` of 0 is the plan's. With adapters it is of these alone."""

    method: Literal["finetune", "ditto", "heads", "adapters"]
    epochs: int
    learning_rate: float
    ditto_lambda: float
    adapter_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A model of this silo's own that is to be made. `digest` stands for all that it depends on but where it starts.

    `towards` is the global model that it is made of, and the plan's initial one for the local model.
    """

    method: Method
    section: TrainingSection
    towards: Digest
    digest: Digest


class PersonalTrainer:
    """Not for use by several threads at once."""

    def __init__(
        self,
        bundle: PlanBundle,
        data: SiloData,
        silo: str,
        settings: DeviceSettings,
        own: OwnSettings,
        *,
        base: RoundModel | None = None,
    ) -> None:
        """Raises what PlanModel does, and DataError for data that were read without labels."""
        if not data.labelled:
            raise DataError(
                f"silo {silo} has no labels in plan {bundle.plan.name}, and models of its own learn from labels: set "
                '[personal] method = "none" in silo.toml'
            )
        self._bundle, self._silo, self._own = bundle, silo, own
        self._model = PlanModel(bundle, settings, base=base)
        self._trainer = SiloTrainer(bundle, data, silo, settings, model=self._model)

    @property
    def _examples(self) -> EncodedExamples:
        """Of training, without the further views that private training has of each."""
        return self._trainer.encoded("train").plain()

    def questions(self) -> Digest:
        """Stands for the held-out questions that models are scored on."""
        return examples_digest(self._trainer.encoded("dev"))

    def personal(self, towards: Digest) -> Goal:
        """The personal model for the global model `towards`. Raises ConfigurationError for a head that there is not,
        for adapters where the plan has its own, and for a pull where the plan's have other axes in each round."""
        if self._own.method == "heads" and not self._head:
            raise ConfigurationError(
                f'[personal] method = "heads" trains {OUTPUT_LAYER}, which the layout of plan '
                f"{self._bundle.plan.name} does not have, as models do that tie it to their embedding: take "
                '"finetune" or "ditto", or "adapters" where the plan has none'
            )
        if self._own.method == "adapters" and self._bundle.base_layout is not None:
            raise ConfigurationError(
                f'[personal] method = "adapters" and plan {self._bundle.plan.name} trains adapters itself, which '
                '"finetune" trains on: take that'
            )
        if self._own.method == "ditto" and self._bundle.plan.adapters.reprojects:
            raise ConfigurationError(
                f'[personal] method = "ditto" keeps a model and pulls it to each new one, number by number, and plan '
                f'{self._bundle.plan.name} has [adapters] train = "reproject", whose halves are on other axes in each '
                'round: take "finetune"'
            )
        pull = self._own.ditto_lambda if self._own.method == "ditto" else 0.0
        return self._goal(self._own.method, towards, epochs=self._own.epochs, pull=pull)

    @property
    def _head(self) -> list[nn.Parameter]:
        """The output layer, where the plan's layout has one."""
        bound = self._model.parameters
        return [tensor for spec, tensor in zip(bound.specs, bound.tensors, strict=True) if spec.name == OUTPUT_LAYER]

    def local(self) -> Goal:
        return self._goal("local", self._bundle.plan.initial_model, epochs=self._epochs_of_the_plan(), pull=0.0)

    def _epochs_of_the_plan(self) -> int:
        """As often as the whole plan goes over this silo's records."""
        plan = self._bundle.plan
        if plan.privacy.level != "record":
            return plan.schedule.rounds * epochs_begun(len(self._examples), plan.training.for_silo(self._silo))
        drawn = plan.schedule.rounds * plan.privacy.steps * plan.privacy.expected_batch_size
        return max(1, -(-drawn // len(self._examples)))

    def _goal(self, method: Method, towards: Digest, *, epochs: int, pull: float) -> Goal:
        section = self._bundle.plan.training.for_silo(self._silo)
        changes: dict[str, object] = {"epochs": epochs, "steps": 0, "fedprox_mu": pull, "drift_correction": "none"}
        # Of a low-rank change it is one of its own: the local model is trained whole, and to be compared with.
        if self._own.learning_rate and (method, self._own.method) != ("local", "adapters"):
            changes["learning_rate"] = self._own.learning_rate
        own = {"adapter_rank": self._own.adapter_rank} if method == "adapters" else {}
        if section.optimizer == "adam_corrected":  # for noise, and there is none here
            changes["optimizer"] = "adamw"
        section = section.model_copy(update=changes)
        depends_on = {
            "plan": self._bundle.plan.digest,
            "silo": self._silo,
            "method": method,
            "towards": towards,
            # Without what no model of one's own is trained by.
            "section": section.model_dump(mode="json", exclude={"steps", "drift_correction"}),
            "examples": examples_digest(self._examples),
            **own,
        }
        return Goal(method=method, section=section, towards=towards, digest=digest_of(canonical_json(depends_on)))

    def train(
        self,
        goal: Goal,
        *,
        start: RoundModel,
        towards: RoundModel,
        out: Path,
        checkpoint: Path,
        on_notice: Notice = lambda event, detail: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Manifest:
        """Train from `start`, and write the model to `out` in float32, durably.

        `towards` is the file of the goal's model. Raises what SiloTrainer.train does.
        """
        model = self._model
        if goal.section.fedprox_mu:
            model.load(towards.file, towards.manifest)  # which checks the file before it is mapped
        model.load(start.file, start.manifest)
        model.begin_training(None)
        layout, examples = self._bundle.layout, self._examples
        identity = training_identity(
            plan=goal.digest,
            round_number=0,
            silo=self._silo,
            model=start.manifest.digest,
            examples=examples,
            device=model.device,
        )
        with self._trained(goal) as parameters:
            train_locally(
                model.t5,
                parameters,
                examples,
                goal.section,
                seed=_seed(goal),
                sample=None,
                round_parameters=model.mapped(towards.file, towards.manifest) if goal.section.fedprox_mu else None,
                checkpoint=CheckpointFile(checkpoint, identity, update_bytes=layout.total_bytes, notice=on_notice),
                on_progress=lambda fraction, loss: None,
                should_stop=should_stop,
                clock=time.monotonic,
            )
        with new_vector_file(out) as writer:
            for begin, end in blocks(layout.parameters):
                for _, part in model.parameters.slices(begin, end):
                    writer.write(part.cpu().numpy())
            writer.finish()
            manifest = writer.manifest(layout)
            writer.sync()
        return manifest

    @contextmanager
    def _trained(self, goal: Goal) -> Iterator[Sequence[nn.Parameter]]:
        """The parameters that the goal trains; the others are frozen meanwhile."""
        if goal.method == "adapters":
            with low_rank_changes(self._model.t5, rank=self._own.adapter_rank, seed=_seed(goal)) as changes:
                yield changes
            return
        whole, head = self._model.parameters.tensors, self._head
        if goal.method != "heads":
            yield whole
            return
        try:
            for parameter in whole:
                parameter.requires_grad_(False)
            for parameter in head:
                parameter.requires_grad_()
            yield head
        finally:
            for parameter in whole:
                parameter.requires_grad_()

    def evaluate(
        self,
        model: RoundModel,
        *,
        same_result: SameResult | None,
        on_parts: Parts = lambda counts: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Evaluation:
        """The same scores of the same held-out questions as a round's evaluation has; `on_parts` as there."""
        return self._trainer.evaluate(
            model_path=model.file,
            model=model.manifest,
            same_result=same_result,
            on_parts=on_parts,
            should_stop=should_stop,
        )


def _seed(goal: Goal) -> int:
    """63 bits of all that the goal depends on."""
    return int.from_bytes(bytes.fromhex(goal.digest)[:8], "little") >> 1
