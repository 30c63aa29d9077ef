"""The models of one plan on disk, each under its manifest digest, with the server optimizer's state that belongs to it.

    <digest>.safetensors      the parameters (coordinator/model_file.py)
    <digest>.manifest.json    their manifest, whose digest is the file's name
    <digest>.optimizer/       state.json and one file per slot; the initial model has none

A model appears last, by rename, when everything else of it is durable: a model that exists is whole. The state belongs
to the model, not to a round, so a round that is done again after a crash starts from what it started from before. Where
a round happens to give a model that is already there, that model keeps the state it has.
"""

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from coordinator import model_file
from coordinator.edges.stored_vector import (
    StoredVector,
    manifest_fields,
    manifest_from_fields,
    manifest_to_json,
    read_json,
    read_record,
    write_record,
)
from security import files
from security.errors import IntegrityError, StorageError
from silo_wire.canonical import Digest, digest_of, digest_to_wire
from silo_wire.manifest import MAX_CHUNK_BYTES, Layout, Manifest

_WORK = ".new-"


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What the server optimizer carried after `steps` steps: a vector per slot; none before the first step."""

    steps: int
    slots: Mapping[str, StoredVector]


@dataclass(frozen=True, slots=True)
class Slab:
    """The same range of a new model and of each state slot, as bytes."""

    model: bytes | bytearray | memoryview
    slots: Mapping[str, bytes | bytearray | memoryview]


class ModelStore:
    """`folder` holds one plan's models; `initial_file` is the plan folder's model, needed until it was imported."""

    def __init__(self, folder: Path, *, layout: Layout, initial: Digest, initial_file: Path) -> None:
        self._folder = folder
        self._layout = layout
        self._initial = initial
        self._initial_file = initial_file
        self._manifests: dict[Digest, Manifest] = {}
        self._make_folder()

    def initial(self) -> Digest:
        """The plan's initial model; imports it from the plan folder if it is not stored yet.

        Raises ConfigurationError unless the file holds exactly the plan's layout, IntegrityError when it was changed.
        """
        if not self.exists(self._initial):
            offset = model_file.check(self._initial_file, self._layout)
            self._store(Slab(block, {}) for block in model_file.blocks(self._initial_file, offset))
        return self._initial

    def exists(self, model: Digest) -> bool:
        return self._path(model).exists()

    def manifest(self, model: Digest) -> Manifest:
        """Raises StorageError when the model is not stored, IntegrityError when its manifest was damaged."""
        if model not in self._manifests:
            if not self.exists(model):
                raise StorageError(f"model {model} is not stored in {self._folder}: restore it from a backup")
            path = self._manifest_path(model)
            manifest = manifest_from_fields(read_json(path), path)
            if manifest.digest != model:
                raise IntegrityError(f"{path} was damaged: its digest is not its name; restore it from a backup")
            self._manifests[model] = manifest
        return self._manifests[model]

    def read_chunk(self, model: Digest, index: int) -> bytes:
        """Chunk `index`, checked; raises IntegrityError naming the file when it was damaged."""
        return self.vector(model).chunk(index)

    def vector(self, model: Digest) -> StoredVector:
        """The model's parameters; raises what `manifest` raises."""
        return StoredVector(self._path(model), len(model_file.header(self._layout)), self.manifest(model))

    def state(self, model: Digest) -> OptimizerState:
        """The server optimizer's state that belongs to `model`; raises StorageError when it is missing."""
        if model == self._initial:
            return OptimizerState(0, {})
        folder = self._state_folder(model)
        record = read_record(folder / "state.json")
        steps, slots = record.get("steps"), record.get("slots")
        if not isinstance(steps, int) or not isinstance(slots, dict):
            raise IntegrityError(f"{folder / 'state.json'} was damaged: restore it from a backup")
        return OptimizerState(
            steps,
            {
                name: StoredVector(folder / f"{name}.f32", 0, manifest_from_fields(fields, folder / "state.json"))
                for name, fields in slots.items()
            },
        )

    def add(self, slabs: Iterable[Slab], *, slots: Iterable[str], steps: int, slab_bytes: int) -> Digest:
        """Store the next model and its optimizer state as they are made, slab by slab of `slab_bytes`, in one pass.

        Nothing shows before everything is durable; whatever an error leaves behind is removed.
        """
        return self._store(slabs, slots=tuple(slots), steps=steps, slab_bytes=slab_bytes)

    def retain(self, models: Set[Digest]) -> None:
        """Delete every model of this plan, and its optimizer state, that is not in `models`."""
        try:
            for path in sorted(self._folder.iterdir()):
                model = Digest(path.name.partition(".")[0])
                if model in models or path.name.startswith(_WORK):
                    continue
                self._manifests.pop(model, None)
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            files.sync_folder(self._folder)
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be cleared: {error.strerror or error}") from error

    def _store(
        self, slabs: Iterable[Slab], *, slots: tuple[str, ...] = (), steps: int = 0, slab_bytes: int = MAX_CHUNK_BYTES
    ) -> Digest:
        work = self._folder / f"{_WORK}{secrets.token_hex(8)}"
        try:
            state = work / "optimizer"
            state.mkdir(parents=True)
            with ExitStack() as stack:
                open_slots = {name: stack.enter_context((state / f"{name}.f32").open("xb")) for name in slots}
                digests: dict[str, list[bytes]] = {name: [] for name in slots}

                def model_blocks() -> Iterator[bytes | bytearray | memoryview]:
                    for slab in slabs:
                        for name, content in slab.slots.items():
                            open_slots[name].write(content)
                            digests[name].append(digest_to_wire(digest_of(content)))
                        yield slab.model

                manifest = model_file.write(work / "model.safetensors", self._layout, model_blocks())
                for file in open_slots.values():
                    file.flush()
                    os.fsync(file.fileno())
            record = {
                "slots": {
                    name: manifest_fields(
                        Manifest(self._layout.digest, self._layout.total_bytes, slab_bytes, tuple(digests[name]))
                    )
                    for name in slots
                },
                "steps": steps,
            }
            write_record(state / "state.json", record)
            if steps == 0 and manifest.digest != self._initial:
                raise IntegrityError(
                    f"{self._initial_file} does not have the digest in [model] initial of its plan: it was changed; "
                    "restore it, or make a new plan with coordinator plan new"
                )
            self._publish(work, manifest, with_state=steps > 0)
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be written: {error.strerror or error}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return manifest.digest

    def _publish(self, work: Path, manifest: Manifest, *, with_state: bool) -> None:
        model = manifest.digest
        keeps_its_own = self.exists(model) and (model == self._initial or self._state_folder(model).exists())
        if with_state and not keeps_its_own:
            shutil.rmtree(self._state_folder(model), ignore_errors=True)
            (work / "optimizer").rename(self._state_folder(model))
        files.replace(self._manifest_path(model), manifest_to_json(manifest))
        (work / "model.safetensors").replace(self._path(model))
        files.sync_folder(self._folder)
        self._manifests[model] = manifest

    def _make_folder(self) -> None:
        """The folder, without what an interrupted write left in it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for leftover in self._folder.glob(f"{_WORK}*"):
                shutil.rmtree(leftover)
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be used: {error.strerror or error}") from error

    def _path(self, model: Digest) -> Path:
        return self._folder / f"{model}.safetensors"

    def _manifest_path(self, model: Digest) -> Path:
        return self._folder / f"{model}.manifest.json"

    def _state_folder(self, model: Digest) -> Path:
        return self._folder / f"{model}.optimizer"
