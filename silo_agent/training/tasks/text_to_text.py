"""Text in, text out: summaries, answers, translations, labels, code.

A line has `id`, `input` and `target`; other keys are not read. What the model is given is the input alone.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from lorica_security.errors import DataError
from silo_agent.training.data.schema import Schema
from silo_agent.training.data.text_to_sql_data import (
    SCHEMA_FILE,
    DataLimits,
    Example,
    SiloData,
    read_splits,
    require_folder,
    text_of,
    unit_of,
)
from silo_agent.training.tasks import similarity
from silo_wire.plans.sections.task import SCORE_LABELS, ScoreName

_NO_SCHEMA: Final = Schema("text", "", ())
_LIBRARIES: Final = ("sacrebleu", "rapidfuzz")


@dataclass(frozen=True, slots=True)
class TextToText:
    """`score` is the one that leaves the silo, and comes first among the metrics."""

    score: ScoreName = "exact_match"
    name: str = "text-to-text"
    executes: bool = False
    shows_schema: bool = False
    label: str = "target"

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.score, *(name for name in SCORE_LABELS if name != self.score))

    def marked_by(self, keys: Set[str]) -> bool:
        return "input" in keys and "question" not in keys

    def data(
        self,
        folder: Path,
        limits: DataLimits | None = None,
        *,
        unit_field: str = "",
        private: bool = False,
        labelled: bool = True,
    ) -> SiloData:
        require_folder(folder)
        if (folder / SCHEMA_FILE).exists():
            raise DataError(
                f"{folder} holds {SCHEMA_FILE}, and a plan with [task] kind = {self.name!r} was to be trained on it: "
                "its lines have an input and a target, and no database; give the folder of such lines"
            )
        if missing := [name for name in _LIBRARIES if find_spec(name) is None]:
            raise DataError(
                f"a plan with [task] kind = {self.name!r} needs {missing[0]}, which is not installed: install Lorica "
                "with the extra text (pip install 'lorica[silo,text]')"
            )

        def example(value: Mapping[str, object], grouped_by: str) -> Example:
            id_, given = text_of(value, "id"), text_of(value, "input")
            target = text_of(value, "target") if labelled else ""
            return Example(id_, given, target, _NO_SCHEMA.db_id, unit_of(value, grouped_by))

        splits = read_splits(
            folder, limits or DataLimits(), example, unit_field=unit_field, private=private, labelled=labelled
        )
        return SiloData(
            train=splits.train,
            dev=splits.dev,
            test=splits.test,
            schema=_NO_SCHEMA,
            database=None,
            bad_lines=splits.bad_lines,
            task=self.name,
            labelled=labelled,
        )

    def shown(self, schema: Schema) -> str:
        return ""

    def right(self, predicted: str, gold: str, schema: Schema) -> tuple[float, ...]:
        return tuple(_MEASURES[name](predicted, gold) for name in self.metrics)


_MEASURES: Final = {
    "exact_match": similarity.exact_match,
    "token_f1": similarity.token_f1,
    "rouge_l": similarity.rouge_l,
    "chrf": similarity.chrf,
    "bleu": similarity.bleu,
}
TEXT_TO_TEXT: Final = TextToText()
