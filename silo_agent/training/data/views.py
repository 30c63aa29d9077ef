"""Views of a record for private training: its question in other words, and the tables in another order (De et al. 2022,
"augmentation multiplicity").

Which words and which order follow from a view's number alone, the same for every record, step and silo. Nothing is
drawn, so that what a record adds to a sum still follows from the record and the model, and no view tells more of a
record than the record does. The words are public text, made for English questions. The SQL that is asked for stays as
it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from silo_agent.training.data.schema import Schema, serialise
from silo_agent.training.data.serialisation import model_input
from silo_agent.training.data.text_to_sql_data import Example

_One = TypeVar("_One")

WORDINGS: Final = (
    "please tell me : {question}",
    "{question} please",
    "i want to know : {question}",
    "in this database , {question}",
    "can you tell me : {question}",
    "question : {question}",
    "{question} , as far as the tables say",
    "show me the answer : {question}",
    "we need to find out : {question}",
    "{question} thank you",
    "from the tables : {question}",
    "my question is : {question}",
    "{question} , i would like to know",
    "find this for me : {question}",
    "look this up : {question}",
)
"""Of the views beside the record itself, in order."""


@dataclass(frozen=True, slots=True)
class View:
    """`schemas` are those of the databases, by id, as this view's input has them; None where inputs have no schema."""

    wording: str
    schemas: Mapping[str, str] | None

    def input_of(self, example: Example) -> str:
        question = self.wording.format(question=example.question)
        return model_input(question, self.schemas[example.db_id] if self.schemas else None)


def other_views(
    count: int, schemas: Sequence[Schema] | None, *, shown: Callable[[Schema], str] = serialise
) -> list[View]:
    """So many views less the record itself; `count` is at most one more than there are WORDINGS. `shown` is what of a
    schema stands behind the question."""
    return [
        View(wording, None if schemas is None else {one.db_id: shown(_reordered(one, number)) for one in schemas})
        for number, wording in enumerate(WORDINGS[: count - 1], start=1)
    ]


def _reordered(schema: Schema, view: int) -> Schema:
    """As if tables, and the columns of each, stood in a circle, and the view began so much further on."""
    tables = [replace(table, columns=_from(table.columns, view)) for table in schema.tables]
    return replace(schema, tables=_from(tables, view))


def _from(of: Sequence[_One], place: int) -> tuple[_One, ...]:
    start = place % len(of)
    return (*of[start:], *of[:start])
