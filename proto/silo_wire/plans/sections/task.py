"""`[task]`: what the model is trained for, and which score chooses the best one."""

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field, model_validator

from lorica_security.console.strict_toml import Section

BUILT_IN: Final = ("sql", "wikisql", "text-to-text")
TaskName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,39}$")]
ScoreName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]

SCORE_LABELS: Final[Mapping[str, str]] = {
    "exact_match": "exact match",
    "token_f1": "token F1",  # nosec B105  # a score
    "rouge_l": "ROUGE-L",
    "chrf": "chrF",
    "bleu": "BLEU",
}
"""Those of text, as people are shown them."""


def label_of(score: str) -> str:
    """As people are shown it; of a task of one's own the name, in words."""
    return SCORE_LABELS.get(score, score.replace("_", " "))


class TaskSection(Section):
    """What a silo's lines are, and what the model is to answer; silo_agent/training/tasks has a file for each.

    `score` is what a silo tells of its held-out answers: from 0 to 1 for each, summed, and rounded to a whole number. A
    task that Lorica does not bring is named with the version and the digest of the package that silos have installed.
    """

    kind: TaskName = "sql"
    score: ScoreName = "exact_match"
    version: Annotated[str, Field(pattern=r"^[0-9A-Za-z.+!-]{0,40}$")] = ""
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> "TaskSection":
        if self.built_in and (self.version or self.digest):
            raise ValueError(
                f'[task] version and digest are of tasks that Lorica does not bring, and kind is "{self.kind}": leave '
                "them out"
            )
        if not self.built_in and not (self.version and self.digest):
            raise ValueError(
                f'[task] kind = "{self.kind}" is none of {", ".join(BUILT_IN)}: of a task that silos install, add the '
                "version and the digest that `silo-agent tasks` prints there"
            )
        if self.kind in ("sql", "wikisql") and self.score != "exact_match":
            raise ValueError(
                f'[task] score = "{self.score}" goes with kind = "text-to-text" alone: a query of kind = "{self.kind}" '
                'is right or wrong; leave score out, or set it to "exact_match"'
            )
        if self.kind == "text-to-text" and self.score not in SCORE_LABELS:
            raise ValueError(f'[task] score = "{self.score}" is unknown: use {", ".join(SCORE_LABELS)}')
        return self

    @property
    def built_in(self) -> bool:
        return self.kind in BUILT_IN

    @property
    def is_sql(self) -> bool:
        """Whether answers are SQL for a silo's database."""
        return self.kind == "sql"

    @property
    def score_label(self) -> str:
        return label_of(self.score)
