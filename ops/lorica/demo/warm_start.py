"""The private demo's public model: trained on the textbooks alone (query_log.py), without privacy, since nobody's
records are in them.

Differential privacy pays for each thing that is learnt. What can be had from public text is had there, and the silos'
budget is left for what only they know.
"""

from collections.abc import Sequence
from pathlib import Path

from lorica.demo.silos.silos import Record
from lorica.warm_start import write_warm_start
from lorica_coordinator.plans.model_source import SizedModel
from silo_agent.training.data.schema import Schema
from silo_agent.training.data.text_to_sql_data import Example, SiloData
from silo_agent.training.device import DeviceSettings

EPOCHS = 25
_VALUES = {
    "training.epochs": EPOCHS,
    "training.batch_size": 32,
    "training.learning_rate": 2.5e-3,
    "training.learning_rate_schedule": "linear",
    "training.dropout": 0.0,
    "training.schema_in_input": False,
    "training.max_input_tokens": 64,
    "training.max_output_tokens": 64,
}


def write_textbook_start(folder: Path, textbook: Sequence[Record], *, size: str, seed: int, threads: int = 1) -> None:
    """Train a T5 of `size` from scratch on `textbook` and write it to the new `folder`.

    A model as small as the demo's is trained fastest in one thread.
    """
    write_warm_start(
        folder, SizedModel(size), _data(textbook), _VALUES, seed=seed, device=DeviceSettings(threads=threads)
    )


def _data(textbook: Sequence[Record]) -> SiloData:
    examples = tuple(Example(record.id, record.question, record.query, record.db_id) for record in textbook)
    return SiloData(train=examples, dev=(), test=(), schema=Schema("textbook", "", ()), database=None, bad_lines=())
