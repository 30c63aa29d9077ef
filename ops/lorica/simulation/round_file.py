"""A stored model as the file that agents train from: its flat vector, and nothing else."""

from pathlib import Path

from lorica_coordinator.edges.models.model_store import ModelStore
from silo_agent.service.ports import RoundModel
from silo_wire.canonical import Digest


def round_file(models: ModelStore, model: Digest, path: Path) -> RoundModel:
    """Write `model` to `path`; raises StorageError or IntegrityError where it cannot be read."""
    manifest = models.manifest(model)
    with path.open("wb") as file:
        for chunk in range(manifest.chunks):
            file.write(models.read_chunk(model, chunk))
    return RoundModel(file=path, manifest=manifest)
