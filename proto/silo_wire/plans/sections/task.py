"""`[task]`: what the model is trained for, and which score chooses the best one."""

from collections.abc import Mapping
from typing import Final, Literal

from pydantic import model_validator

from lorica_security.console.strict_toml import Section

TaskName = Literal["sql", "wikisql", "text-to-text"]
ScoreName = Literal["exact_match", "token_f1", "rouge_l", "chrf", "bleu"]

SCORE_LABELS: Final[Mapping[ScoreName, str]] = {
    "exact_match": "exact match",
    "token_f1": "token F1",
    "rouge_l": "ROUGE-L",
    "chrf": "chrF",
    "bleu": "BLEU",
}
"""As people are shown them."""


class TaskSection(Section):
    """What a silo's lines are, and what the model is to answer; silo_agent/training/tasks has a file for each.

    `score` is what a silo tells of its held-out answers: from 0 to 1 for each, summed, and rounded to a whole number.
    """

    kind: TaskName = "sql"
    score: ScoreName = "exact_match"

    @model_validator(mode="after")
    def _a_query_is_right_or_wrong(self) -> "TaskSection":
        if self.kind != "text-to-text" and self.score != "exact_match":
            raise ValueError(
                f'[task] score = "{self.score}" goes with kind = "text-to-text" alone: a query of kind = "{self.kind}" '
                'is right or wrong; leave score out, or set it to "exact_match"'
            )
        return self

    @property
    def score_label(self) -> str:
        return SCORE_LABELS[self.score]
