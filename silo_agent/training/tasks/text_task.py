"""Tasks of lines with a text in and a text out. One of your own is a value of this class, in a package of your own that
names it as an entry point of group `lorica.tasks`."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from lorica_security.errors import DataError
from silo_agent.training.data.schema import Schema
from silo_agent.training.data.text_to_sql_data import (
    DataLimits,
    Example,
    LineFault,
    SiloData,
    read_splits,
    require_no_schema,
    text_of,
    unit_of,
)

Score = Callable[[str, str], float]
"""(the model's answer, the target) -> how much of it is right, from 0 to 1. Answers are untrusted text."""
Text = Callable[[Mapping[str, object]], str]
"""Of a line's object; raises ValueError that says what is wrong with it."""
Counted = Callable[[Mapping[str, object], str], Sequence[tuple[int, int]]]
"""(a line's object, its target) -> where the characters of the target begin and end that count in the loss."""
MOST_SPANS: Final = 1000
MOST_CHARACTERS: Final = 8192
"""Of an answer that is scored; what is behind them counts as not said. A token may be thousands of characters long."""
_NO_SCHEMA: Final = Schema("text", "", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTask:
    """`scores` by name, of which a plan chooses one; without a plan the first. `input` and `target` make a line's
    texts.

    A line with all of `keys` is of this task, as far as keys tell; `label` is the key that is not read of silos without
    labels. `counted` says which characters of a target count in the loss; without it all do. `needs` are modules
    without which data are refused, `remedy` what the error says then.
    """

    name: str
    scores: Mapping[str, Score]
    input: Text = field(default=lambda line: text_of(line, "input"))
    target: Text = field(default=lambda line: text_of(line, "target"))
    keys: Set[str] = frozenset({"input"})
    label: str = "target"
    counted: Counted | None = None
    needs: tuple[str, ...] = ()
    remedy: str = "install it"
    chosen: str = ""

    shows_schema = False

    @property
    def metrics(self) -> tuple[str, ...]:
        first = self.chosen or next(iter(self.scores))
        return (first, *(name for name in self.scores if name != first))

    @property
    def masks_loss(self) -> bool:
        return self.counted is not None

    def by(self, score: str) -> "TextTask":
        """With this score as the one that leaves; raises DataError for one that the task does not have."""
        if score not in self.scores:
            raise DataError(
                f"task {self.name!r} has no score {score!r}: have the operator set [task] score to one of "
                f"{', '.join(self.scores)}"
            )
        return replace(self, chosen=score)

    def marked_by(self, keys: Set[str]) -> bool:
        return self.keys <= keys

    def data(
        self,
        folder: Path,
        limits: DataLimits | None = None,
        *,
        unit_field: str = "",
        private: bool = False,
        labelled: bool = True,
    ) -> SiloData:
        require_no_schema(folder, self.name, lines="a text in and a text out, and no database")
        if missing := [name for name in self.needs if find_spec(name) is None]:
            raise DataError(
                f"a plan with [task] kind = {self.name!r} needs {missing[0]}, which is not installed: {self.remedy}"
            )

        def example(value: Mapping[str, object], grouped_by: str) -> Example:
            if not labelled:
                value = {key: said for key, said in value.items() if key != self.label}
            given, target, spans = self._made(self.input, value, "input"), "", None
            if labelled:
                target = self._made(self.target, value, "target")
                spans = self._spans(value, target)
            return Example(text_of(value, "id"), given, target, _NO_SCHEMA.db_id, unit_of(value, grouped_by), spans)

        splits = read_splits(
            folder, limits or DataLimits(), example, unit_field=unit_field, private=private, labelled=labelled
        )
        return splits.data(_NO_SCHEMA, task=self.name, labelled=labelled)

    def shown(self, schema: Schema) -> str:
        return ""

    def right(self, predicted: str, gold: str, schema: Schema) -> tuple[float, ...]:
        answer = predicted[:MOST_CHARACTERS]
        return tuple(self._share(name, answer, gold) for name in self.metrics)

    def _made(self, make: Text, line: Mapping[str, object], what: str) -> str:
        try:
            text = make(line)
        except LineFault:
            raise
        except Exception as error:  # of code that is not ours, on a line that may be anything
            raise LineFault(f"makes no {what}: {type(error).__name__}: {error}") from error
        return text_of({what: text}, what)

    def _spans(self, line: Mapping[str, object], target: str) -> tuple[tuple[int, int], ...] | None:
        if self.counted is None:
            return None
        try:
            spans = tuple((begin, end) for begin, end in self.counted(line, target))
        except Exception as error:  # of code that is not ours, on a line that may be anything
            raise LineFault(f"has no tokens that count: {type(error).__name__}: {error}") from error
        if len(spans) > MOST_SPANS:
            raise LineFault(f"has {len(spans)} spans that count: more than {MOST_SPANS}")
        for begin, end in spans:
            if type(begin) is not int or type(end) is not int or not 0 <= begin < end <= len(target):
                raise LineFault(f"counts {begin!r} to {end!r} of a target of {len(target)} characters")
        return spans

    def _share(self, name: str, predicted: str, gold: str) -> float:
        """Errors say nothing of the answer: they may be told to others."""
        try:
            share = float(self.scores[name](predicted, gold))
        except Exception as error:  # of code that is not ours, on an answer that may be anything
            raise DataError(
                f"score {name!r} of task {self.name!r} fails with {type(error).__name__}: correct the package that "
                "brings it"
            ) from error
        if not (math.isfinite(share) and 0.0 <= share <= 1.0):
            raise DataError(
                f"score {name!r} of task {self.name!r} is not from 0 to 1: correct the package that brings it"
            )
        return share
