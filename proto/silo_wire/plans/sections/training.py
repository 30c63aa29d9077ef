"""`[training]`: local training of one round, and what single silos do otherwise."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from lorica_security.console.strict_toml import Section
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import NAME_RULE, silo_name
from silo_wire.drift_correction import DriftCorrectionName
from silo_wire.plans.sections.numbers import MOST_NORM, Count, NonNegative, Rate
from silo_wire.plans.work import COMMON, Work

MOST_MU, MOST_MASKED_MU = 1e3, 10.0
"""Far above either, the pull towards the round model leaves float32's range where a silo makes a second step, and
nowhere else."""
MOST_DROPOUT = 0.9


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

    optimizer: Literal["adafactor", "adamw", "sgd", "adam_corrected"] = "adamw"
    variance_floor: Annotated[float, Field(ge=1e-6, le=1e6)] = 0.1  # of adam_corrected, over the noise's variance
    learning_rate: Rate = 1e-3
    weight_decay: NonNegative = 0.0  # of masked plans 0
    epochs: Count = 1
    steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0  # optimizer steps of every silo; 0: as `epochs` come to
    batch_size: Count = 16
    gradient_accumulation: Count = 1
    max_grad_norm: Annotated[float, Field(ge=0, le=MOST_NORM)] = (
        1.0  # L2 norm of the accumulated gradient; 0: not clipped
    )
    learning_rate_schedule: Literal["constant", "linear"] = "constant"  # linear: to 0 within each round
    fedprox_mu: Annotated[float, Field(ge=0, le=MOST_MU)] = 0.0
    drift_correction: DriftCorrectionName = "none"
    loss_reduction: Literal["evaluated", "logged", "as_published"] = "evaluated"  # how it is measured
    loss_log_steps: Count = 1  # optimizer steps between two logged losses
    precision: Literal["auto", "float32", "bfloat16"] = "float32"  # auto: bfloat16 autocast where a GPU has it
    gradient_checkpointing: bool = False  # layers are computed again on the way back, for less memory
    length_grouping: Annotated[int, Field(ge=1, le=1000)] = 1  # batches whose examples are sorted by length together
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
