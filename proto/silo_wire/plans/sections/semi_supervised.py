"""`[semi_supervised]`: which silos train without labels, and from what (Tarvainen and Valpola 2017)."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from lorica_security.console.strict_toml import Section
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import NAME_RULE, silo_name
from silo_wire.plans.sections.named_silos import ALL_THAT_BEGIN_SO, is_among
from silo_wire.plans.sections.who_trains import Alone, WhoTrains


class SemiSupervisedSection(Section):
    """Silos that train on questions alone: a teacher, which never leaves them, answers, and the student learns that."""

    unlabelled: Annotated[list[str], Field(max_length=10_000)] = Field(default_factory=list)
    order: Literal["alternate", "together"] = "alternate"
    min_labelled: Annotated[int, Field(ge=1, le=10_000)] = 1  # fewest silos of a round of those with labels alone
    teacher: Literal["ema", "round", "none", "mlm"] = "ema"
    ema_decay: Annotated[float, Field(ge=0, le=1)] = 0.99  # per optimizer step
    loss: Literal["probabilities", "answer"] = "probabilities"
    min_confidence: Annotated[float, Field(ge=0, lt=1)] = 0.0  # geometric mean of an answer's token probabilities
    student_dropout: Annotated[float, Field(ge=0, le=0.9)] = 0.1
    # which answers count, by the silo's own database
    filter: Literal["none", "executes", "nonempty", "agrees"] = "none"
    samples: Annotated[int, Field(ge=3, le=16)] = 5  # answers to a question, the greedy one among them

    @field_validator("unlabelled")
    @classmethod
    def _silos(cls, value: list[str]) -> list[str]:
        for one in value:
            # A name goes on behind what begins it, so that it may end in what no name ends in.
            begins = one.endswith(ALL_THAT_BEGIN_SO)
            try:
                silo_name(f"{one[:-1]}0" if begins else one)
            except ConfigurationError as error:
                raise ValueError(
                    f"{one!r} is neither a silo name nor the beginning of one and a '{ALL_THAT_BEGIN_SO}': use "
                    f"{NAME_RULE}"
                ) from error
        if len(set(value)) != len(value):
            raise ValueError("one stands there twice: name each once")
        return value

    def without_labels(self, silo: str) -> bool:
        """Whether the silo of this name trains without labels."""
        return is_among(silo, self.unlabelled)

    @property
    def who_trains(self) -> WhoTrains:
        """In which round."""
        if not self.unlabelled:
            return WhoTrains()
        alone: Alone = "in_turn" if self.order == "alternate" else "never"
        return WhoTrains(
            unlabelled=tuple(self.unlabelled), labelled_alone="always" if self.teacher == "none" else alone
        )
