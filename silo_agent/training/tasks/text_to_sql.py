"""Questions to the databases of schema.json, answered in SQL, compared as text (DESIGN section 3)."""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from silo_agent.training.data.schema import Schema, serialise
from silo_agent.training.data.serialisation import exact_match
from silo_agent.training.data.text_to_sql_data import DataLimits, SiloData, load_silo_data


@dataclass(frozen=True, slots=True)
class TextToSql:
    """The task of a plan that names none."""

    name: str = "sql"
    metrics: tuple[str, ...] = ("exact_match",)
    shows_schema: bool = True
    masks_loss: bool = False
    label: str = "query"

    def marked_by(self, keys: Set[str]) -> bool:
        return "db_id" in keys

    def data(
        self,
        folder: Path,
        limits: DataLimits | None = None,
        *,
        unit_field: str = "",
        private: bool = False,
        labelled: bool = True,
    ) -> SiloData:
        return load_silo_data(folder, limits, unit_field=unit_field, private=private, labelled=labelled)

    def shown(self, schema: Schema) -> str:
        return serialise(schema)

    def right(self, predicted: str, gold: str, schema: Schema) -> tuple[bool, ...]:
        return (exact_match(predicted, gold),)


TEXT_TO_SQL: Final = TextToSql()
