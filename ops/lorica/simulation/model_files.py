"""Models of a simulation as the files that agents train from: flat vectors, and nothing else."""

import os
from pathlib import Path

from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.service.records import RoundRow
from lorica_security.errors import StorageError
from silo_agent.service.ports import RoundModel
from silo_wire.canonical import Digest
from silo_wire.manifest import CHUNK_BYTES, Layout, manifest_of


def round_file(models: ModelStore, model: Digest, path: Path) -> RoundModel:
    """Write `model` to `path`; raises StorageError or IntegrityError where it cannot be read."""
    manifest = models.manifest(model)
    with path.open("wb") as file:
        for chunk in range(manifest.chunks):
            file.write(models.read_chunk(model, chunk))
    return RoundModel(file=path, manifest=manifest)


class KeptModel:
    """The best model by MacroAvg on dev, which a coordinator does not keep: its best is by MicroAvg.

    Each model that silos fetch stands in `folder` until its round has been scored; then the best one stays, and the
    initial one where nobody scores it. A simulation that goes on tells all rounds again. With `every`, all of them
    stay.
    """

    def __init__(self, folder: Path, *, every: bool = False) -> None:
        self._folder, self._every = folder, every
        self._best: Digest | None = None
        self._score = 0.0
        self._passed: set[Digest] = set()

    def add(self, model: RoundModel) -> None:
        """A second name for its file; raises StorageError."""
        digest = model.manifest.digest
        if digest in self._passed:
            return
        path = self._path(digest)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            os.link(model.file, path)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}; free some space") from error

    def told(self, row: RoundRow) -> None:
        """That a round has ended, and what its model was scored. Of two as good the later one stays, as with
        MicroAvg."""
        if row.macro_exact_match is not None and row.macro_exact_match >= self._score:
            over, self._best, self._score = self._best, row.model, row.macro_exact_match
        else:
            over = row.model
        if over is not None and over != self._best and not self._every:
            self._passed.add(over)
            self._path(over).unlink(missing_ok=True)

    def best(self, layout: Layout) -> RoundModel | None:
        """A model of `layout`; None where none was scored. Raises StorageError where its file is gone."""
        return None if self._best is None else self.model(self._best, layout)

    def model(self, model: Digest, layout: Layout) -> RoundModel:
        """One that stayed; raises StorageError where its file is gone."""
        path = self._path(model)
        try:
            with path.open("rb") as file:
                return RoundModel(file=path, manifest=manifest_of(layout, iter(lambda: file.read(CHUNK_BYTES), b"")))
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error

    def _path(self, model: Digest) -> Path:
        return self._folder / f"{model}.model"
