"""A model that is no longer from scratch: trained on public text alone, with the product's own trainer, and written as
Hugging Face has models."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from lorica_coordinator.plans.model_source import ModelSource
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_coordinator.vectors import model_file
from lorica_coordinator.vectors.model_file import MODEL_FILE
from silo_agent.training.data.text_to_sql_data import SiloData
from silo_agent.training.device import DeviceSettings
from silo_agent.training.local_trainer import Progress
from silo_agent.training.silo_trainer import SiloTrainer
from silo_wire.plans.sections.model import LAYOUT_FILE

_ONCE = {"schedule.rounds": 1, "schedule.min_silos": 1}


def write_warm_start(
    folder: Path,
    source: ModelSource,
    data: SiloData,
    values: Mapping[str, object],
    *,
    seed: int,
    device: DeviceSettings,
    on_progress: Progress = lambda fraction, loss: None,
) -> None:
    """Train `source` on the training part of `data` and write it to the new `folder`; `values` are those of a plan,
    by whole keys: of [training], and of the task where it is not "sql".

    Raises what making a plan and training raise; `folder` is there only when all is done.
    """
    with TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        bundle = create_plan(
            work, name="start", federation="public", source=source, seed=seed, overrides={**_ONCE, **values}
        )
        origin, initial = work / "start", work / "initial"
        offset = model_file.check(origin / MODEL_FILE, bundle.layout)
        with initial.open("wb") as file:
            file.writelines(model_file.blocks(origin / MODEL_FILE, offset))
        trainer = SiloTrainer(bundle, data, "public", device)
        trainer.train(
            round_number=1,
            model_path=initial,
            model=model_file.manifest_of_file(origin / MODEL_FILE, bundle.layout),
            update_path=work / "update",
            on_progress=on_progress,
        )
        trained = np.fromfile(initial, dtype="<f4") + np.fromfile(work / "update", dtype="<f4")
        model_file.write(origin / MODEL_FILE, bundle.layout, [trained.data.cast("B")])
        written = work / "written"
        written.mkdir()
        for kept in (*bundle.files, MODEL_FILE):
            if kept != LAYOUT_FILE:
                shutil.copy(origin / kept, written / kept)
        written.rename(folder)
