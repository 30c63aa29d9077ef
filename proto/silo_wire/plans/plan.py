"""The plan: what the operator asks of a federation, and what a silo approves. Identified by its digest.

A plan is values alone: no code, no paths, no secrets. The operator edits it as TOML (`plan.toml`); it travels inside a
plan bundle as canonical JSON, whose BLAKE3 digest is the plan's name everywhere. The digests of the model's
configuration, tokenizer, parameter layout and initial parameters are part of it, so the one digest covers them all.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Literal, Self

from google.protobuf.message import DecodeError
from pydantic import Field, ValidationError, field_validator, model_validator

from lorica_security.console.strict_toml import NameText, Section, ShownText, describe, parse_toml
from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage
from lorica_security.identifiers import NAME_RULE, silo_name
from silo_wire.algorithm import Number
from silo_wire.canonical import Digest, canonical_json, digest_of
from silo_wire.manifest import Layout, ParameterDtype, masked_layout
from silo_wire.plans.adapters import AdaptersSection, adapter_layout
from silo_wire.plans.model_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    MOST_BYTES,
    PIECES_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    parsed,
    refuse_code,
)
from silo_wire.plans.privacy import LEAST_BOUND, MOST_BOUND, PrivacySection, Release
from silo_wire.plans.timetable import Timetable
from silo_wire.plans.work import COMMON, MOST_SETTINGS, MOST_WORK_RATIO, Work, widest_gap
from silo_wire.v1 import federation_pb2
from silo_wire.weightings.named import WeightingName, named_for, weighting_named
from silo_wire.weightings.weighting import Weighting

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Rate = Annotated[float, Field(ge=1e-7, le=10, allow_inf_nan=False)]
"""Of local training. Below it a step is lost in float32's rounding, and the silo stands still; above it no model learns."""
ServerRate = Annotated[float, Field(ge=1e-4, le=10, allow_inf_nan=False)]
"""Below it two round models are almost one, and two sums over them almost two sums over one model."""
Bound = Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]
"""Of what a masked round can express."""
LEAST_SGD_RATE = 0.01
LEAST_MAX_WEIGHT, MOST_MAX_WEIGHT = 1e-9, 1e12
LEAST_DELTA_NORM, MOST_NORM = 1e-3, 1e9
LEAST_GRAD_NORM = 1e-3
"""Under masks. With less, an optimizer's own small constants decide what a step is, and float32's rounding whether there is one."""
MOST_MU, MOST_MASKED_MU = 1e3, 10.0
"""Far above either, the pull towards the round model leaves float32's range where a silo makes a second step, and nowhere else."""
LEAST_ADAPTER_EPOCHS = 2
"""Under masks. B begins at 0, and the gradient of A is 0 in the first step: a silo that makes no other adds nothing to any A."""
MOST_DROPOUT = 0.9
DigestText = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]

MAX_BUNDLE_BYTES = 64 << 20
LAYOUT_FILE = "layout.json"
BASE_LAYOUT_FILE = "base_layout.json"
_MOST_LAYOUT_BYTES = 32 << 20
"""Of a layout; one of 100,000 tensors has some 6 million."""
BUNDLE_FILES = frozenset(
    {
        BASE_LAYOUT_FILE,
        CONFIG_FILE,
        GENERATION_FILE,
        LAYOUT_FILE,
        SPECIAL_TOKENS_FILE,
        PIECES_FILE,
        TOKENIZER_FILE,
        TOKENIZER_CONFIG_FILE,
    }
)
"""The only files a bundle may hold. Each is data; those in JSON may not name code."""


class ScheduleSection(Section):
    """When rounds open and close. Each phase has one deadline; `min_silos` is the quorum of every one of them."""

    rounds: Count
    min_silos: Annotated[int, Field(ge=1, le=10_000)]
    start_when_ready: bool = False
    gathering_deadline_s: Positive = 60.0
    training_deadline_s: Positive = 3600.0
    masking_deadline_s: Positive = 600.0  # each phase of secure aggregation
    evaluation_deadline_s: Positive = 900.0


class AggregationSection(Section):
    """How updates become a new model (DESIGN sections 3 and 4). A cap of 0 means none.

    Under secure aggregation the coordinator sees only sums: each silo itself applies `max_weight` and `max_delta_norm`.
    """

    weighting: WeightingName = "lorar"
    server_optimizer: Literal["sgd", "adam", "yogi", "adagrad"] = "sgd"
    server_learning_rate: ServerRate = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta1: Annotated[float, Field(ge=0, le=0.99)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1e-3
    max_weight: Annotated[float, Field(ge=0, le=MOST_MAX_WEIGHT)] = 0.0
    max_weight_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_delta_norm: Annotated[float, Field(ge=0, le=MOST_NORM)] = (
        1000.0  # far above what training gives, far below what ruins a model for good
    )
    secure_aggregation: bool = False
    threshold: Annotated[int, Field(ge=0, le=10_000)] = 0  # shares that open a secret; 0: the cohort's default
    colluders: Annotated[int, Field(ge=0, le=10_000)] = 0
    min_survivors: Annotated[int, Field(ge=3, le=10_000)] = 3
    delta_bound: Bound = 1.0  # largest coordinate of a delta that a masked sum can express
    max_weight_ratio: Annotated[float, Field(ge=1, le=900, allow_inf_nan=False)] = 100.0  # of two silos in a masked sum

    @model_validator(mode="after")
    def _no_value_near_zero(self) -> Self:
        """What would leave the model as it was, or all weights at nothing, without being zero, which means "none"."""
        for key, value, least in (
            ("max_weight", self.max_weight, LEAST_MAX_WEIGHT),
            ("max_delta_norm", self.max_delta_norm, LEAST_DELTA_NORM),
        ):
            if 0 < value < least:
                raise ValueError(
                    f"[aggregation] {key} = {value:g} is next to nothing: set 0 for none, or at least {least:g}"
                )
        if self.server_optimizer == "sgd" and self.server_learning_rate < LEAST_SGD_RATE:
            raise ValueError(
                f'[aggregation] server_learning_rate = {self.server_learning_rate:g} of server_optimizer = "sgd" leaves the '
                f"model almost as it was: set at least {LEAST_SGD_RATE:g}"
            )
        return self

    @property
    def weighs(self) -> Weighting:
        """The weighting as a value."""
        return weighting_named(self.weighting)

    @property
    def weight_cap(self) -> float:
        """What a silo's weight is bounded by where it is taken as a share of that: in masked sums, under silo-level privacy."""
        return self.max_weight if self.weighs.only_weight is None else self.weighs.only_weight

    @property
    def least_weight(self) -> float:
        """What a silo weighs at least in a masked sum, so that nobody's delta counts `max_weight_ratio` times another's."""
        return self.weight_cap / self.max_weight_ratio


class WireSection(Section):
    """The types in which parameters travel. Coordinator and silos compute in float32 whatever they are."""

    model: ParameterDtype = "float32"
    update: ParameterDtype = "float32"  # bfloat16: the silo keeps what rounding cut off and adds it to its next update


class SiloTraining(Section):
    """What a single silo may have differently; None keeps the plan's common value.

    Each key is one of those that `work` counts: whatever else changes what a silo does is the same for all.
    """

    learning_rate: Rate | None = None
    epochs: Count | None = None
    batch_size: Count | None = None
    gradient_accumulation: Count | None = None


class TrainingSection(Section):
    """Local training of one round at every silo; `overrides` names silos that differ."""

    optimizer: Literal["adafactor", "adamw", "adam_corrected"] = "adamw"
    variance_floor: Annotated[float, Field(ge=1e-6, le=1e6)] = 0.1  # of adam_corrected, over the noise's variance
    learning_rate: Rate = 1e-3
    weight_decay: NonNegative = 0.0  # of masked plans 0
    epochs: Count = 1
    batch_size: Count = 16
    gradient_accumulation: Count = 1
    max_grad_norm: Annotated[float, Field(ge=0, le=MOST_NORM)] = (
        1.0  # L2 norm of the accumulated gradient; 0: not clipped
    )
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: to 0 within each round
    fedprox_mu: Annotated[float, Field(ge=0, le=MOST_MU)] = 0.0
    loss_log_steps: Count = 1  # optimizer steps between the losses whose max - min is the loss reduction
    precision: Literal["auto", "float32", "bfloat16"] = "float32"  # auto: bfloat16 autocast where a GPU has it
    dropout: Annotated[float, Field(ge=0, le=MOST_DROPOUT)] | None = None  # None keeps the model's own
    max_input_tokens: Count = 512
    max_output_tokens: Count = 256
    schema_in_input: bool = True
    overrides: Annotated[dict[str, SiloTraining], Field(max_length=10_000)] = Field(default_factory=dict)

    @field_validator("overrides")
    @classmethod
    def _silo_names(cls, value: dict[str, SiloTraining]) -> dict[str, SiloTraining]:
        for name in value:
            try:
                silo_name(name)
            except ConfigurationError as error:
                raise ValueError(f"{name!r} is not a silo name: use {NAME_RULE}") from error
        return value

    def for_silo(self, name: str) -> "TrainingSection":
        """The section as it stands for one silo, its override applied."""
        override = self.overrides.get(name, SiloTraining())
        changed = {key: value for key, value in override.model_dump().items() if value is not None}
        return self.model_copy(update={**changed, "overrides": {}})

    @property
    def works(self) -> dict[str, Work]:
        """What is compared under masks: the common values, and each override as it stands for its silo."""
        of_silos = {f"[training.overrides.{silo}]": Work.of(self.for_silo(silo)) for silo in self.overrides}
        return {COMMON: Work.of(self), **of_silos}


class EvaluationSection(Section):
    """When silos score the global model on their dev sets, and how much of them."""

    every: Annotated[int, Field(ge=0, le=1_000_000)] = 1  # rounds; 0: never
    initial: bool = True  # also before the first round
    last: bool = True  # also after the last round, whatever `every` says
    max_examples: Annotated[int, Field(ge=0)] = 0  # 0: the whole split
    batch_size: Count = 32
    beams: Annotated[int, Field(ge=1, le=64)] = 1
    execution: bool = True  # where a silo has a database and its policy allows it


class ModelSection(Section):
    """Which model, by digest of everything that makes it; written by `coordinator plan new`, not by hand.

    `source`, `revision` and `weights` are the operator's word, for people who fetch a copy of their own; `initial` and `base` are
    what that copy is compared with.
    """

    source: Annotated[
        ShownText, Field(min_length=1, max_length=300)
    ]  # for people: "size:small", "folder:NAME", "hub:NAME"
    revision: Annotated[ShownText, Field(max_length=100)] = ""  # of a model from the Hub: the commit that was fetched
    weights: Annotated[dict[FileName, DigestText], Field(max_length=1000)] = Field(default_factory=dict)
    """SHA-256 of each file of parameters, as it was at the source; of a model from a size there is none."""
    parameters: Annotated[int, Field(ge=1)]  # that are trained; tied ones counted once
    layout: DigestText
    initial: DigestText  # manifest digest of the initial parameters, as float32
    initial_bfloat16: DigestText | None = (
        None  # the same, as bfloat16: what silos are handed where [wire] model says so
    )
    base: DigestText | None = None  # manifest digest of the parameters that stay, where adapters are trained
    files: dict[str, DigestText]

    @field_validator("files")
    @classmethod
    def _only_known_files(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name not in BUNDLE_FILES:
                raise ValueError(f"{name!r} is not a file that a plan bundle may hold")
        for name in ("config.json", LAYOUT_FILE):
            if name not in value:
                raise ValueError(f"{name} is missing")
        return value


class Plan(Section):
    version: Literal[1] = 1
    name: NameText
    federation: NameText
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    model: ModelSection
    schedule: ScheduleSection
    aggregation: AggregationSection = AggregationSection()
    wire: WireSection = WireSection()
    adapters: AdaptersSection = AdaptersSection()
    training: TrainingSection = TrainingSection()
    privacy: PrivacySection = PrivacySection()
    evaluation: EvaluationSection = EvaluationSection()

    @model_validator(mode="after")
    def _sections_go_together(self) -> Self:
        """Whatever does not is named at once: who mends one finds no next."""
        if wrong := "; ".join(self._contradictions()):
            raise ValueError(wrong)
        return self

    def _contradictions(self) -> Iterator[str]:
        yield from self._of_the_share_cap()
        yield from self._of_the_initial_model()
        yield from self._of_adapters()
        yield from self._of_the_weighting()
        if self.aggregation.secure_aggregation:
            yield from self._of_sums_alone()
            yield from self._of_steps_that_tell()
            yield from self._of_cohorts_that_do_not_hold()
        yield from self._of_what_is_not_private()

    def _of_the_share_cap(self) -> Iterator[str]:
        cap = self.aggregation.max_weight_share
        if cap and cap * self.schedule.min_silos < 1:
            yield (
                f"[aggregation] max_weight_share = {cap} cannot hold with min_silos = {self.schedule.min_silos}: "
                f"raise it to at least {1 / self.schedule.min_silos:.3f}"
            )

    def _of_the_initial_model(self) -> Iterator[str]:
        if self.wire.model == "bfloat16" and self.model.initial_bfloat16 is None:
            yield (
                '[wire] model = "bfloat16" without [model] initial_bfloat16, by which silos know the initial model: make a '
                "new plan with coordinator plan new"
            )

    def _of_the_weighting(self) -> Iterator[str]:
        weighting = self.aggregation.weighs
        if self.aggregation.secure_aggregation and not weighting.masks:
            yield (
                f'[aggregation] weighting = "{weighting.name}" does not go with secure_aggregation, under which the coordinator '
                "knows the sum of weights alone: set another one, or turn secure_aggregation off"
            )
        for it in weighting.clashes(self.training):
            yield (
                f'{it.key} = {it.value} does not go with [aggregation] weighting = "{weighting.name}", {it.why}: set it to '
                f"{it.needed}"
            )

    def _of_adapters(self) -> Iterator[str]:
        """They have a base, and nothing else has."""
        named = {"base": self.model.base is not None, BASE_LAYOUT_FILE: BASE_LAYOUT_FILE in self.model.files}
        for what, is_there in named.items():
            if is_there != bool(self.adapters.rank):
                yield (
                    f"[model] {'has' if is_there else 'lacks'} {what}, [adapters] rank = {self.adapters.rank}: make a new plan "
                    "with coordinator plan new, where a rank is for good"
                )

    def _of_sums_alone(self) -> Iterator[str]:
        """What a coordinator that sees nothing but a sum cannot do."""
        if not self.aggregation.weight_cap:
            yield (
                f'[aggregation] max_weight = 0 with secure_aggregation = true and weighting = "{self.aggregation.weighting}": a '
                "masked sum has one cap on weights for the whole plan; set max_weight to what the largest silo may weigh, to begin with "
                f'{self.aggregation.weighs.first_cap}, or weighting to "equal"'
            )
        if self.aggregation.max_weight_share:
            yield (
                f"[aggregation] max_weight_share = {self.aggregation.max_weight_share} cannot be applied to masked "
                "updates, of which only the sum is seen: set it to 0, or turn secure_aggregation off"
            )
        if self.wire.update != "float32":
            yield (
                f'[wire] update = "{self.wire.update}" does not go with secure_aggregation, under which updates travel as '
                'masked 32-bit integers: use "float32", or turn secure_aggregation off'
            )

    def _of_steps_that_tell(self) -> Iterator[str]:
        """What would make a delta a function of how many optimizer steps its silo made, and that tells how many examples it has."""
        training = self.training
        if training.weight_decay:
            yield (
                f"[training] weight_decay = {training.weight_decay:g} does not go with secure_aggregation: it moves parameters "
                "that no example reaches by a public function of a silo's optimizer steps, and one sum tells the steps of all "
                "silos; set it to 0, or turn secure_aggregation off"
            )
        if training.fedprox_mu > MOST_MASKED_MU:
            yield (
                f"[training] fedprox_mu = {training.fedprox_mu:g} does not go with secure_aggregation, under which it holds a "
                f"silo of many steps still beside one of a single step: set at most {MOST_MASKED_MU:g}"
            )
        if 0 < training.max_grad_norm < LEAST_GRAD_NORM and self.privacy.level != "record":
            yield (
                f"[training] max_grad_norm = {training.max_grad_norm:g} leaves next to nothing of a gradient, which does not go "
                f"with secure_aggregation: set 0 for no clipping, or at least {LEAST_GRAD_NORM:g}"
            )
        yield from self._of_a_single_step_of_adapters()

    def _of_a_single_step_of_adapters(self) -> Iterator[str]:
        """Whatever its batch and its examples, a silo makes a step for each epoch, and may make no other."""
        if not self.adapters.rank or self.privacy.level == "record":  # there all silos make [privacy] steps
            return
        for who, work in self.training.works.items():
            if work.epochs < LEAST_ADAPTER_EPOCHS:
                yield (
                    f"{who} epochs = {work.epochs} with [adapters] rank = {self.adapters.rank} does not go with "
                    "secure_aggregation: a silo that makes a single optimizer step adds nothing to half of the adapters, where "
                    f"the sum is what the other silos add; set at least {LEAST_ADAPTER_EPOCHS}, or turn secure_aggregation off"
                )

    def _of_cohorts_that_do_not_hold(self) -> Iterator[str]:
        """The rules of secure aggregation's parameters, for the smallest cohorts that this plan lets begin."""
        # Here, not above: numpy, which this brings, is for plans with masks alone.
        from lorica_security.secure_aggregation import parameters

        wanted, silos = self.aggregation, self.schedule.min_silos
        colluders, threshold = wanted.colluders, wanted.threshold
        if silos < parameters.LEAST_COHORT:  # what is asked of the others follows from it
            yield (
                f"[schedule] min_silos = {silos} is too few for secure aggregation, since a sum of two shows each the "
                f"other: raise it to at least {parameters.LEAST_COHORT}"
            )
            return
        least = parameters.least_survivors(colluders)
        if not least <= wanted.min_survivors <= silos:
            yield (
                f"[aggregation] min_survivors = {wanted.min_survivors} does not hold with min_silos = {silos} and "
                f"colluders = {colluders}: set it to at least {least}, and min_silos to no less"
            )
        # More is asked of the threshold nowhere: a cohort that needs a higher one has it raised (parameters.Terms).
        if threshold and not parameters.LEAST_COHORT <= threshold <= silos:
            yield (
                f"[aggregation] threshold = {threshold} does not hold with min_silos = {silos}: set "
                f"{parameters.LEAST_COHORT} to {silos}, or 0 for the default of each cohort"
            )

    def _of_what_is_not_private(self) -> Iterator[str]:
        level = self.privacy.level
        if self.training.optimizer == "adam_corrected" and level != "record":
            yield (
                f'[training] optimizer = "adam_corrected" does not go with [privacy] level = "{level}", under which gradients have '
                'no noise to correct for: set it to "adamw", or level to "record"'
            )
        if level != "none":
            unlike = self._unlike_private() if level == "record" else self._unlike_silo_level()
            for key, has, needed, why in (*unlike, *self._scores()):
                yield f'{key} = {has} does not go with [privacy] level = "{level}", {why}: set it to {needed}'
        if self.joint:
            for key, has, needed, why in self._unlike_joint():
                yield f'{key} = {has} does not go with [privacy] noise = "joint", {why}: set it to {needed}'

    def _unlike_joint(self) -> Iterator[tuple[str, object, str, str]]:
        """The same for noise that silos make together, under which a round is one step of the sum of their gradients."""
        aggregation, privacy, training = self.aggregation, self.privacy, self.training
        if not aggregation.secure_aggregation:
            yield "[aggregation] secure_aggregation", "false", "true", "under which no update is covered alone"
        if "joint" not in aggregation.weighs.promises:
            weighting = f'"{aggregation.weighting}"'
            yield "[aggregation] weighting", weighting, named_for("joint"), "under which all silos weigh the same"
        for key, value, needed, why in (
            ("[aggregation] max_delta_norm", aggregation.max_delta_norm, 0.0, "which cuts coordinates to delta_bound"),
            ("[privacy] steps", privacy.steps, 1, "under which a round is one step"),
            ("[privacy] average_decay", privacy.average_decay, 0.0, "under which a round has no iterates"),
            (
                "[privacy] neighbouring_relation",
                privacy.neighbouring_relation,
                "add_or_remove_one",
                "which no proof covers with sampling where a record is replaced",
            ),
        ):
            if value != needed:
                yield key, _shown(value), _shown(needed), why
        if training.optimizer == "adam_corrected":
            yield "[training] optimizer", '"adam_corrected"', '"adamw"', "under which no silo has an optimizer"
        if aggregation.threshold and not aggregation.colluders:
            # Of 5 silos and a threshold of 3 one that signs twice makes two sums, and their difference is one silo's noise.
            yield (
                "[aggregation] threshold",
                str(aggregation.threshold),
                "0, or colluders to at least 1",
                "whose promise holds where one silo of a sum works with the coordinator",
            )
        if not 0 < privacy.answer_after_s < self.schedule.training_deadline_s:
            yield (
                "[privacy] answer_after_s",
                f"{privacy.answer_after_s:g}",
                f"more than any silo's gradients take, and less than [schedule] training_deadline_s = "
                f"{self.schedule.training_deadline_s:g}",
                "since how long a silo takes tells how many records it drew",
            )
        if training.max_grad_norm and self.gradient_reach < 1:
            yield (
                "[aggregation] delta_bound",
                f"{aggregation.delta_bound:g}",
                f"at least max_grad_norm / expected_batch_size = {training.max_grad_norm / privacy.expected_batch_size:g}",
                "whose range has room for one record",
            )
        for silo, override in training.overrides.items():
            if override.learning_rate is not None:
                yield (
                    f"[training.overrides.{silo}]",
                    "learning_rate",
                    "batch_size alone",
                    "under which the server steps",
                )

    def _unlike_private(self) -> Iterator[tuple[str, object, str, str]]:
        """Key, value, what it must be and why, for each key that does not go with record-level privacy."""
        training, weighting = self.training, self.aggregation.weighs
        if "record" not in weighting.promises:
            yield (
                "[aggregation] weighting",
                f'"{weighting.name}"',
                named_for("record"),
                "which releases no number of records",
            )
        if not training.max_grad_norm:
            yield "[training] max_grad_norm", 0, "what one record's gradient may have", "which has noise to match that"
        for key, value, needed, why in (
            ("epochs", training.epochs, 1, "in which [privacy] steps says how long a round is"),
            ("gradient_accumulation", training.gradient_accumulation, 1, "whose batches are as large as memory allows"),
            ("fedprox_mu", training.fedprox_mu, 0, "whose steps have private gradients alone"),
            ("precision", training.precision, "float32", "whose bounds hold for exact sums"),
            # One stream of masks for a batch: a record more would shift those of all that come after it.
            ("dropout", training.dropout, 0.0, "in which no example's gradient may depend on the others of its batch"),
        ):
            if value != needed:
                shown = "the model's own" if value is None else value
                yield f"[training] {key}", shown, str(needed), why
        if training.max_grad_norm and not LEAST_BOUND <= training.max_grad_norm <= MOST_BOUND:
            yield (
                "[training] max_grad_norm",
                training.max_grad_norm,
                f"{LEAST_BOUND:g} to {MOST_BOUND:g}",
                "whose clipping is done in float32",
            )
        for silo, override in training.overrides.items():
            if override.epochs is not None or override.gradient_accumulation is not None:
                yield (
                    f"[training.overrides.{silo}]",
                    "epochs or gradient_accumulation",
                    "neither",
                    "whose schedule is one for all",
                )

    def _unlike_silo_level(self) -> Iterator[tuple[str, object, str, str]]:
        """The same for silo-level privacy, whose noise matches the most that one silo adds to a sum."""
        aggregation = self.aggregation
        if "silo" not in aggregation.weighs.promises:
            yield (
                "[aggregation] weighting",
                f'"{aggregation.weighting}"',
                named_for("silo"),
                "whose weights are shares of a public cap",
            )
        if not aggregation.weight_cap:
            yield (
                "[aggregation] max_weight",
                0,
                'the most that a silo may weigh, or weighting to "equal"',
                "whose noise is made for the largest weight",
            )
        if not aggregation.max_delta_norm:
            yield (
                "[aggregation] max_delta_norm",
                0,
                "the L2 norm that deltas are clipped to",
                "whose noise is made for the longest delta",
            )
        if aggregation.max_weight_share:
            yield (
                "[aggregation] max_weight_share",
                aggregation.max_weight_share,
                "0",
                "whose sum is divided by the public nominal_silos and not by what silos weigh",
            )
        if self.wire.update != "float32":
            yield (
                "[wire] update",
                f'"{self.wire.update}"',
                '"float32"',
                "whose clipping bounds what one round adds: rounding that is made up for later goes beyond it",
            )

    def _scores(self) -> Iterator[tuple[str, object, str, str]]:
        evaluation = self.evaluation
        for key, value, needed in (
            ("every", evaluation.every, "0"),
            ("initial", evaluation.initial, "false"),
            ("last", evaluation.last, "false"),
        ):
            if value:
                yield f"[evaluation] {key}", value, needed, "under which no scores of a silo's records are told"

    @property
    def releases_of_round(self) -> Sequence[Release]:
        """What each silo enters into its own ledger for a round, whose unit is a record; nothing where it is promised nothing.

        A delta that leaves in the clear, for the coordinator to noise, is not covered by anything. In a noised masked sum one record
        more or less can turn a clipped delta into any other, which is twice as far as a silo that is not there: the noise
        counts half.
        """
        privacy = self.privacy
        if privacy.level == "record":
            makers = {"makers": self.noise_makers} if self.joint else {}
            return privacy.releases_of_round(weighted=self.weighted, **makers)
        if self.noise_at == "silos":
            return privacy.releases_of_round(weighted=self.weighted, noise_multiplier=privacy.noise_multiplier / 2)
        return []

    @property
    def noise_at(self) -> Literal["nowhere", "coordinator", "silos"]:
        """Who makes the noise of sums: of deltas, under silo-level privacy, the silos where the coordinator sees nothing but the sum."""
        if self.joint:
            return "silos"
        if self.privacy.level != "silo":
            return "nowhere"
        return "silos" if self.aggregation.secure_aggregation else "coordinator"

    @property
    def joint(self) -> bool:
        """Whether a round is one step of a masked sum of gradients, whose noise the silos make together."""
        return self.privacy.level == "record" and self.privacy.noise == "joint"

    @property
    def noise_makers(self) -> int:
        """Of joint noise: of how many silos it counts. So many of any sum make theirs, and are not among those who look at it.

        As for the smallest cohort that may begin, without release groups; where groups leave fewer silos in a sum, no attempt begins
        (parameters.NoiseTerms). It is 2 at least, by the rules of masks.
        """
        # Here, not above: numpy, which this brings, is for plans with masks alone.
        from lorica_security.secure_aggregation.parameters import threshold_for

        wanted = self.aggregation
        threshold = threshold_for(self.schedule.min_silos, colluders=wanted.colluders, asked=wanted.threshold or None)
        return max(threshold, wanted.min_survivors) - max(wanted.colluders, 1)

    @property
    def gradient_reach(self) -> float:
        """Of joint noise: how many records of the largest gradient the range of a silo's sum has room for."""
        return self.aggregation.delta_bound * self.privacy.expected_batch_size / self.training.max_grad_norm

    @property
    def timetable(self) -> Timetable:
        return Timetable(
            rounds=self.schedule.rounds,
            every=self.evaluation.every,
            initial=self.evaluation.initial,
            last=self.evaluation.last,
            masked=self.aggregation.secure_aggregation,
        )

    @property
    def initial_model(self) -> Digest:
        """The initial model as silos are handed it, by the digest of its manifest."""
        return Digest(str(self.model.initial_bfloat16 if self.wire.model == "bfloat16" else self.model.initial))

    @property
    def weighted(self) -> bool:
        """Whether updates weigh by the loss reduction of their silo."""
        return Number.LOSS_REDUCTION in self.aggregation.weighs.needs

    def to_json(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    @property
    def digest(self) -> Digest:
        return digest_of(self.to_json())

    @classmethod
    def from_json(cls, raw: bytes) -> "Plan":
        """Parse a peer's plan; raises MalformedMessage naming the key, also when the JSON is not canonical."""
        try:
            plan = cls.model_validate(json.loads(raw))
        except ValidationError as error:
            raise MalformedMessage(f"plan: {describe(error)}") from error
        except (ValueError, RecursionError) as error:
            raise MalformedMessage(f"plan is not JSON: {error}") from error
        if plan.to_json() != raw:
            raise MalformedMessage("plan is not in canonical form: its digest would not be unique")
        return plan

    @classmethod
    def from_toml(cls, text: str, where: str) -> "Plan":
        """Parse an operator's plan file; raises ConfigurationError naming `where`, the key, the value and the remedy."""
        plan = parse_toml(cls, text, where)
        plan.require_comparable_work(where)
        return plan

    def require_comparable_work(self, where: str) -> None:
        """Raise ConfigurationError for overrides that no silo takes under masks; the silos look for themselves, whatever comes."""
        if not self.aggregation.secure_aggregation or not self.training.overrides:
            return
        gap = widest_gap(self.training.works)
        if gap is None:
            raise ConfigurationError(
                f"{where}: [training.overrides] have more than {MOST_SETTINGS} different settings, which does not go with "
                "[aggregation] secure_aggregation = true: give silos the same ones, or set secure_aggregation to false"
            )
        if gap.ratio > MOST_WORK_RATIO:
            raise ConfigurationError(
                f"{where}: {gap.first} and {gap.second} differ {float(gap.ratio):.3g}-fold in learning rate x optimizer steps, "
                "which does not go with [aggregation] secure_aggregation = true: where one silo trains so much more than the "
                f"others, the sum is its delta, and no silo allows more than {MOST_WORK_RATIO:g}-fold; bring the overrides "
                "together, or set secure_aggregation to false"
            )


@dataclass(frozen=True)
class PlanBundle:
    """A plan with the files that its digests name: all that a silo needs to know before the model itself."""

    plan: Plan
    files: Mapping[str, bytes]

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", MappingProxyType(dict(self.files)))
        expected = self.plan.model.files
        if set(self.files) != set(expected):
            raise MalformedMessage(f"plan bundle holds {sorted(self.files)}, its plan names {sorted(expected)}")
        for name, content in self.files.items():
            if digest_of(content) != expected[name]:
                raise IntegrityError(f"plan bundle file {name} does not have the digest in the plan: it was changed")
            if name.endswith(".json"):
                refuse_code(name, parsed(content, name, MOST_BYTES.get(name, _MOST_LAYOUT_BYTES)))
        model = self.plan.model
        if self.layout.digest != model.layout or self.layout.parameters != model.parameters:
            raise MalformedMessage(
                "plan bundle layout.json does not agree with [model] layout and parameters of the plan"
            )
        if self.base_layout is not None:
            _require_adapters(self.layout, self.base_layout, self.plan.adapters)

    @cached_property
    def layout(self) -> Layout:
        """The parameters as they are computed with, in float32."""
        return Layout.from_json(self.files[LAYOUT_FILE])

    @cached_property
    def base_layout(self) -> Layout | None:
        """The parameters that stay, in float32, where adapters are trained."""
        return Layout.from_json(self.files[BASE_LAYOUT_FILE]) if BASE_LAYOUT_FILE in self.files else None

    @property
    def whole_layout(self) -> Layout:
        """The parameters of the T5 itself, which config.json makes."""
        return self.base_layout or self.layout

    @property
    def parameters_in_memory(self) -> int:
        """Of the model with its adapters."""
        return self.layout.parameters + (self.base_layout.parameters if self.base_layout else 0)

    @cached_property
    def model_layout(self) -> Layout:
        """The layout of the models that silos are handed."""
        return self.layout.as_type(self.plan.wire.model)

    @cached_property
    def update_layout(self) -> Layout:
        """The layout of the updates that silos send."""
        return self.layout.as_type(self.plan.wire.update)

    @property
    def update_bytes(self) -> int:
        """What one update takes on the wire and in the coordinator's spool: `update_layout`'s numbers, or the masked vector's words."""
        if not self.plan.aggregation.secure_aggregation:
            return self.update_layout.total_bytes
        # Here, not above: numpy, which it brings, is for plans with masks alone.
        from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS

        return masked_layout(self.layout.parameters + EXTRA_WORDS).total_bytes

    def encode(self) -> bytes:
        message = federation_pb2.PlanBundle(plan_json=self.plan.to_json())
        for name in sorted(self.files):
            message.files.add(name=name, content=self.files[name])
        return message.SerializeToString(deterministic=True)

    @classmethod
    def decode(cls, raw: bytes, expected: Digest) -> "PlanBundle":
        """Parse what FetchPlan delivered; raises IntegrityError unless its plan has the digest `expected`."""
        if len(raw) > MAX_BUNDLE_BYTES:
            raise MalformedMessage(f"plan bundle has {len(raw)} bytes, allowed are {MAX_BUNDLE_BYTES}")
        message = federation_pb2.PlanBundle()
        try:
            message.ParseFromString(raw)
        except DecodeError as error:
            raise MalformedMessage(f"plan bundle does not parse: {error}") from error
        if digest_of(message.plan_json) != expected:
            raise IntegrityError("plan bundle does not have the digest that was asked for: it was changed on the way")
        names = [file.name for file in message.files]
        if len(set(names)) != len(names):
            raise MalformedMessage(f"plan bundle names a file twice: {names}")
        return cls(Plan.from_json(message.plan_json), {file.name: file.content for file in message.files})


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _require_adapters(layout: Layout, base: Layout, section: AdaptersSection) -> None:
    if base.dtype != "float32":
        raise MalformedMessage(f"plan bundle {BASE_LAYOUT_FILE} has dtype {base.dtype}: only float32 is taken")
    try:
        expected = adapter_layout(base, section)
    except ConfigurationError as error:
        raise MalformedMessage(str(error)) from error
    if layout != expected:
        raise MalformedMessage(
            f"plan bundle {LAYOUT_FILE} is not that of the [adapters] of a model of {BASE_LAYOUT_FILE}"
        )
