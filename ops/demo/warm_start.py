"""The private demo's public model: trained on the textbooks alone (query_log.py), without privacy, since nobody's records are in them.

Differential privacy pays for each thing that is learnt. What can be had from public text is had there, and the silos' budget is
left for what only they know.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from coordinator import model_file
from coordinator.model_file import MODEL_FILE
from coordinator.plans.model_source import SizedModel
from coordinator.plans.plan_folder import create_plan
from ops.demo.silos import Record
from silo_agent.training.device import DeviceSettings
from silo_agent.training.schema import Schema
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.text_to_sql_data import Example, SiloData
from silo_wire.plan import LAYOUT_FILE

EPOCHS = 25
_VALUES = {
    "schedule.rounds": 1,
    "schedule.min_silos": 1,
    "training.epochs": EPOCHS,
    "training.batch_size": 32,
    "training.learning_rate": 2.5e-3,
    "training.learning_rate_schedule": "linear",
    "training.dropout": 0.0,
    "training.schema_in_input": False,
    "training.max_input_tokens": 64,
    "training.max_output_tokens": 64,
}


def write_warm_start(folder: Path, textbook: Sequence[Record], *, size: str, seed: int, threads: int = 1) -> None:
    """Train a T5 of `size` from scratch on `textbook` and write it to the new `folder`, as Hugging Face has models.

    A model as small as the demo's is trained fastest in one thread.
    """
    with TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        bundle = create_plan(
            work, name="textbook", federation="public", source=SizedModel(size), seed=seed, overrides=_VALUES
        )
        origin, initial = work / "textbook", work / "initial"
        offset = model_file.check(origin / MODEL_FILE, bundle.layout)
        initial.write_bytes(b"".join(model_file.blocks(origin / MODEL_FILE, offset)))
        trainer = SiloTrainer(bundle, _data(textbook), "public", DeviceSettings(threads=threads))
        trainer.train(
            round_number=1,
            model_path=initial,
            model=model_file.manifest_of_file(origin / MODEL_FILE, bundle.layout),
            update_path=work / "update",
        )
        trained = np.fromfile(initial, dtype="<f4") + np.fromfile(work / "update", dtype="<f4")
        model_file.write(origin / MODEL_FILE, bundle.layout, [trained.data.cast("B")])
        folder.mkdir()
        for file in (*bundle.files, MODEL_FILE):
            if file != LAYOUT_FILE:
                shutil.copy(origin / file, folder / file)


def _data(textbook: Sequence[Record]) -> SiloData:
    examples = tuple(Example(record.id, record.question, record.query, record.db_id) for record in textbook)
    return SiloData(train=examples, dev=(), test=(), schema=Schema("textbook", "", ()), database=None, bad_lines=())
