"""A start that silos with labels have trained by themselves, in rounds before a study's: for a study of teachers, since
one that begins with hardly a right answer teaches what is wrong."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from lorica.simulation.run import logging_to, simulate
from lorica_coordinator.plans.model_source import ModelSource
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_security.identifiers import SiloName


def write_labelled_start(
    folder: Path,
    source: ModelSource,
    silos: Mapping[SiloName, Path],
    values: Mapping[str, object],
    *,
    seed: int,
    threads: int = 1,
) -> None:
    """Train `source` among `silos`, which all have labels, by a plan with `values`, and write its last model to the new
    `folder`, in the form that Hugging Face has.

    Raises what making a plan, simulating and exporting raise.
    """
    with TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        overrides = {**values, "schedule.min_silos": len(silos)}
        create_plan(work, name="before", federation="public", source=source, seed=seed, overrides=overrides)
        with logging_to(work / "run.log"):
            done = simulate(work / "before", silos, work / "of-before", device="cpu", threads=threads)
        done.coordinator.export(done.plan, done.final, folder)
