"""What every task says of itself: how a folder of examples is read, what the model is told, and what of an answer is
right.

Trainer and evaluation read what they need from these values, so that a new task is one file here, its name in named.py
and in silo_wire/plans/sections/task.py.
"""

from collections.abc import Set
from pathlib import Path
from typing import Protocol

from silo_agent.training.data.schema import Schema
from silo_agent.training.data.text_to_sql_data import DataLimits, SiloData


class Task(Protocol):
    """One thing that a plan may train a model for."""

    @property
    def name(self) -> str:
        """As `[task] kind` of a plan has it."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of what is right of an answer. The first is the plan's score, which alone leaves a silo, summed
        and rounded, as `exact_matches`; the others are the silo's own."""

    @property
    def shows_schema(self) -> bool:
        """Whether an input holds what `shown` gives, where the plan has schemas in inputs."""

    @property
    def masks_loss(self) -> bool:
        """Whether examples say which characters of a target count in the loss (`Example.counted`)."""

    @property
    def label(self) -> str:
        """The key of a line that is not read of silos without labels."""

    def marked_by(self, keys: Set[str]) -> bool:
        """Whether a line with these keys is of this task, as far as keys tell."""

    def data(
        self,
        folder: Path,
        limits: DataLimits | None = None,
        *,
        unit_field: str = "",
        private: bool = False,
        labelled: bool = True,
    ) -> SiloData:
        """The examples in `folder`, whose `query` is what the model is to answer; keywords and errors as of
        `load_silo_data`."""

    def shown(self, schema: Schema) -> str:
        """What of a schema stands behind the question."""

    def right(self, predicted: str, gold: str, schema: Schema) -> tuple[float, ...]:
        """Of a model's answer, which is untrusted, how much is right by each of `metrics`, from 0 to 1. `gold` is an
        example's `query`, `schema` that of its table or database."""
