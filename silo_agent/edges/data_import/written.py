"""The data folder of an import: made whole or not at all, and read back as the agent reads it before it gets its
name."""

from collections.abc import Sequence
from pathlib import Path

from lorica_security.errors import DataError
from lorica_security.host import files
from silo_agent.edges.data_import.splits import Division
from silo_agent.training.data.schema import Schema
from silo_agent.training.data.text_to_sql_data import SCHEMA_FILE, DataLimits, load_silo_data
from silo_agent.training.tasks.text_to_text import TEXT_TO_TEXT


def write_folder(folder: Path, division: Division, schemas: Sequence[Schema]) -> None:
    """Its owner alone may look into it; without schemas, lines are inputs and targets. Raises ConfigurationError where
    `folder` holds anything, StorageError, and DataError."""
    with files.new_folder(folder, files.PRIVATE_FOLDER_MODE) as work:
        for name, lines in division.splits.items():
            if lines:
                files.write_private(work / f"{name}.jsonl", b"".join(example.line() for example in lines))
        limits = DataLimits(max_bad_fraction=0.0)
        if schemas:
            files.write_private(work / SCHEMA_FILE, _schema_file(schemas))
        data = load_silo_data(work, limits) if schemas else TEXT_TO_TEXT.data(work, limits)
        if {name: len(lines) for name, lines in division.splits.items()} != {
            name: len(data.split(name)) for name in division.splits
        }:
            raise DataError(f"{folder} does not read back as it was written: look at its disk")


def _schema_file(schemas: Sequence[Schema]) -> bytes:
    if len(schemas) == 1:
        return schemas[0].to_json()
    return b"[\n" + b",\n".join(schema.to_json().strip() for schema in schemas) + b"\n]\n"
