"""What lies in `personal` of a silo's folder: its own models by digest, their scores beside the global model's, and the
plan's initial model, which the cache of round models drops in time.

`scores.json` is written last: what it does not name counts for nothing and is deleted.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lorica_security.errors import StorageError
from lorica_security.host.files import make_private_folder, sync_folder
from silo_agent.edges.disk.model_cache import ModelCache, model_file
from silo_agent.edges.personal.own_scores import OwnScores, Which, own_scores
from silo_agent.service.ports import RoundModel
from silo_wire.canonical import Digest
from silo_wire.manifest import CHUNK_BYTES, Layout, Manifest, manifest_of
from silo_wire.plans.plan import PlanBundle

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What the agent has of the federation: its plan, the newest global model, and what its adapters are for."""

    bundle: PlanBundle
    newest: RoundModel
    base: RoundModel | None


class OwnModels:
    """Below `folder`, which is made with what is first written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.record = own_scores(folder)

    @property
    def lock(self) -> Path:
        """Held by the process that trains."""
        return self._folder / "lock"

    def make(self) -> None:
        make_private_folder(self._folder)

    def checkpoint(self, which: Which) -> Path:
        return self._folder / f"{which}.checkpoint"

    @property
    def draft(self) -> Path:
        """Where a model is written before it has its name."""
        return self._folder / "model.part"

    @property
    def seeded(self) -> Path:
        """Where the plan's initial model lies while it is made again."""
        return self._folder / "initial.part"

    def name_draft(self, manifest: Manifest) -> RoundModel:
        """The draft under its name, durably."""
        file = model_file(self._folder, manifest.digest)
        os.replace(self.draft, file)
        sync_folder(self._folder)
        return RoundModel(file=file, manifest=manifest)

    def model(self, digest: Digest, layout: Layout) -> RoundModel | None:
        """A model of this silo's own; None where its file is gone or is not what its name says."""
        model = read_model(model_file(self._folder, digest), layout)
        return model if model is not None and model.manifest.digest == digest else None

    def delete_others(self, scores: OwnScores) -> None:
        """Every file of a model but those that `scores` names."""
        named = {scored.model for scored in scores.scores.values()}
        for path in self._folder.glob("*.model"):
            if path.stem not in named:
                path.unlink(missing_ok=True)
        for pattern in ("*.checkpoint*", "*.part"):
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)

    # ---- the initial model ----------------------------------------------------------------------------------------

    @property
    def _initial(self) -> Path:
        return self._folder / "initial"

    def keep_initial(self, models: Path, initial: Digest) -> bool:
        """Keep a plan's initial model, if the cache in `models` has it whole: a second name for each of its files.

        Whether it is kept now. An initial model of an earlier plan goes.
        """
        if model_file(self._initial, initial).exists():
            return True
        if not model_file(models, initial).exists():
            return False
        self.make()
        make_private_folder(self._initial)
        for old in self._initial.iterdir():
            old.unlink(missing_ok=True)
        for suffix in ("header", "model"):  # the model last: with it, all is there
            with suppress(OSError):  # pruned this moment, or a file system without second names
                os.link(models / f"{initial}.{suffix}", self._initial / f"{initial}.{suffix}")
        return model_file(self._initial, initial).exists()

    def initial(self, initial: Digest, layout: Layout) -> RoundModel | None:
        """The initial model that was kept; None where it was not, or was damaged since."""
        header = ModelCache(self._initial, kept=1).header(initial)
        if header is None:
            return None
        model = read_model(model_file(self._initial, initial), layout, header.manifest.chunk_bytes)
        return model if model is not None and model.manifest.digest == initial else None


def read_model(file: Path, layout: Layout, chunk_bytes: int = CHUNK_BYTES) -> RoundModel | None:
    """The model of `layout` that `file` holds; None where there is none. Raises StorageError."""
    try:
        if file.stat().st_size != layout.total_bytes:
            return None
        with file.open("rb") as opened:
            blocks = iter(lambda: opened.read(_READ_BYTES), b"")
            return RoundModel(file=file, manifest=manifest_of(layout, blocks, chunk_bytes))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror}") from error
