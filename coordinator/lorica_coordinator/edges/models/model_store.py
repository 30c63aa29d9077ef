"""The models of one plan on disk, each under its manifest digest, with the server optimizer's state that belongs to it.

    <digest>.safetensors      the parameters as they are published
                              (coordinator/lorica_coordinator/vectors/model_file.py)
    <digest>.manifest.json    their manifest, whose digest is the file's name
    <digest>.optimizer/       state.json and one file per slot, all float32
    initial.json              the digest of the initial model, and of the file that it was made from
    spare/                    files of deleted models, to be written over (spare_files.py)
    base/                     with adapters: a store of the same kind, of the model that they are for
    evidence/                 under masks: what shows that the sums made the models (round_evidence.py)

Where models are published in bfloat16, the float32 numbers that the next step begins from are one more slot, `master`;
else the published model is its own master, and the initial one has no state.

A model appears last, by rename, when everything else of it is durable: a model that exists is whole. The state belongs
to the model, not to a round, so a round that is done again after a crash starts from what it started from before. Where
a round happens to give a model that is already there, that model keeps the state it has.
"""

import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorica_coordinator.edges.models.held_models import letting_models_go
from lorica_coordinator.vectors import model_file
from lorica_coordinator.vectors.kept_files import FOLDER_ALONE, KeptFiles
from lorica_coordinator.vectors.spare_files import SpareFiles
from lorica_coordinator.vectors.stored_vector import (
    StoredVector,
    manifest_fields,
    manifest_from_fields,
    manifest_to_json,
    read_json,
    read_record,
    write_record,
)
from lorica_coordinator.vectors.vector_file import VectorWriter
from lorica_security.errors import IntegrityError, StorageError
from lorica_security.host import files
from lorica_security.host.file_mark import FileMark
from silo_wire.canonical import Digest
from silo_wire.manifest import Layout, Manifest

MASTER = "master"
"""The slot of the float32 parameters behind a model that is published in another type."""
BASE = "base"
"""The folder, in that of a plan with adapters, for the model that they are for."""
_WORK = ".new-"
SPARE = "spare"
INITIAL = "initial.json"
EVIDENCE = "evidence"
"""The folder, in that of a plan, of what shows that masked sums made its models (round_evidence.py)."""
MODEL = ".safetensors"
"""Of the file of a model's parameters, behind its digest."""
_SLOT = ".f32"


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What the server optimizer carried after `steps` steps: a vector per slot, `master` among them where there is
    one."""

    steps: int
    slots: Mapping[str, StoredVector]


@dataclass(frozen=True, slots=True)
class Slab:
    """The bytes that come next: of a new model as it is published, and of each state slot in float32."""

    model: bytes | bytearray | memoryview
    slots: Mapping[str, bytes | bytearray | memoryview]


class ModelStore:
    """`folder` holds one plan's models.

    `layout` is of float32, `model_layout` of the type in which models are published. `initial_file` is the plan
    folder's model, needed until it was imported; `initial` is its manifest digest, `published` that of what silos are
    handed where the plan names it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        layout: Layout,
        model_layout: Layout,
        initial: Digest,
        initial_file: Path,
        published: Digest | None = None,
        kept: KeptFiles = FOLDER_ALONE,
    ) -> None:
        self._folder = folder
        self._layout = layout
        self.model_layout = model_layout
        self._initial = initial
        self._initial_file = initial_file
        self._published = published
        self._kept = kept
        self._manifests: dict[Digest, Manifest] = {}
        self._marks: dict[Path, FileMark] = {}
        """Of the files that this process wrote."""
        self._header_bytes = len(model_file.header(model_layout))
        self._make_folder()

    @property
    def keeps_master(self) -> bool:
        """Whether models are published in another type than they are computed in."""
        return self.model_layout.dtype != self._layout.dtype

    def initial(self) -> Digest:
        """The plan's initial model as it is published; imports it from the plan folder if it is not stored yet.

        Raises ConfigurationError unless the file holds exactly the plan's layout in numbers that can be published,
        IntegrityError when it was changed.
        """
        published = self._imported()
        if published is None or self.lacking(published):
            published = self._import()
        self.keep(published)
        return published

    def exists(self, model: Digest) -> bool:
        return self._path(model).exists()

    def lacking(self, model: Digest) -> tuple[Path, ...]:
        """Files of `model` without which nobody trains from it, or no next one is made of it."""
        needed = (self._path(model), self._manifest_path(model))
        return tuple(path for path in needed if not path.exists()) + self._lacking_of_state(model)

    def _lacking_of_state(self, model: Digest) -> tuple[Path, ...]:
        """With a record of the state that cannot be made out: it is no better than none."""
        try:
            state = self.state(model)
            if self.keeps_master:
                self.master(model, state)
        except (IntegrityError, StorageError):
            return (self._state_folder(model) / "state.json",)
        return tuple(slot.path for slot in state.slots.values() if not slot.path.exists())

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
        """The model's parameters as they are published; raises what `manifest` raises."""
        path = self._path(model)
        return StoredVector(path, self._header_bytes, self.manifest(model), self._marks.get(path))

    def master(self, model: Digest, state: OptimizerState) -> StoredVector:
        """The model's parameters in float32, `state` being its own; raises what `manifest` raises, and
        IntegrityError."""
        if not self.keeps_master:
            return self.vector(model)
        if MASTER not in state.slots:
            raise IntegrityError(
                f"{self._state_folder(model) / 'state.json'} names no {MASTER}: restore it from a backup"
            )
        return state.slots[MASTER]

    def state(self, model: Digest) -> OptimizerState:
        """The server optimizer's state that belongs to `model`; raises StorageError when it is missing."""
        if model == self._initial:  # then it is published in float32
            return OptimizerState(0, {})
        folder = self._state_folder(model)
        record = self._record(model)
        vectors = {}
        for name, fields in record["slots"].items():
            path = folder / f"{name}{_SLOT}"
            manifest = manifest_from_fields(fields, folder / "state.json")
            vectors[name] = StoredVector(path, 0, manifest, self._marks.get(path))
        return OptimizerState(record["steps"], vectors)

    def add(
        self,
        slabs: Iterable[Slab],
        *,
        slots: Iterable[str],
        steps: int,
    ) -> Digest:
        """Store the next model and its optimizer state as they are made, slab by slab, in one pass.

        Nothing shows before everything is durable; whatever an error leaves behind is removed.
        """
        with self._work_folder() as work:
            manifest = self._write(work, slabs, slots=tuple(slots), steps=steps)
            self._publish(work, manifest, with_state=True)
        self.keep(manifest.digest)
        return manifest.digest

    def retain(self, models: Set[Digest]) -> None:
        """Let every model of this plan that is not in `models` go, with its optimizer state; the last one's files
        become spares.

        Nothing goes while somebody holds the models, to copy them: then it is for the next call. Raises StorageError,
        and lets none go, where one of `models` is not stored: the state is of another instant than the files are, and
        the others may be what is left.
        """
        with letting_models_go(self._folder.parent) as alone:
            if alone:
                self._retain(models)

    def _retain(self, models: Set[Digest]) -> None:
        try:
            stored = {_model_of(path) for path in self._folder.iterdir() if not _belongs_to_none(path)}
            stored |= {_model_of(path) for path in self._kept_here() if not _belongs_to_none(path)}
            if missing := [model for model in sorted(models) if not self.exists(model)]:
                raise StorageError(
                    f"model {missing[0]} is not stored in {self._folder}, so that no other one there is deleted: bring "
                    "it back"
                )
            spares = SpareFiles(self._folder / SPARE)
            for model in sorted(stored - models):
                self._manifests.pop(model, None)
                spares.trim(0)  # the next model needs those of one
                for path in (self._path(model), *sorted(self._state_folder(model).glob(f"*{_SLOT}"))):
                    self._marks.pop(path, None)
                    if path.exists():
                        spares.keep(path)
                self._manifest_path(model).unlink(missing_ok=True)
                if self._state_folder(model).exists():
                    shutil.rmtree(self._state_folder(model))
            files.sync_folder(self._folder)
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be cleared: {error.strerror or error}") from error
        for model in sorted(stored - models):
            self._kept.forget(self._path(model), self._manifest_path(model), self._state_folder(model))

    def _kept_here(self) -> frozenset[Path]:
        """Files and folders of this store's own folder, of what is kept."""
        below = (path.relative_to(self._folder).parts[0] for path in self._kept.below(self._folder))
        return frozenset(self._folder / part for part in below)

    def keep(self, model: Digest) -> None:
        """Have all of a model outlast the folder; its parameters last, as they appear last."""
        state, initial = self._state_folder(model), self._folder / INITIAL
        parts = (*sorted(state.glob(f"*{_SLOT}")), state / "state.json", initial)
        present = [path for path in parts if path.exists()]
        self._kept.keep(*present, self._manifest_path(model), self._path(model))

    def clear_spares(self) -> None:
        """Delete the files that are kept to be written over: no further model is made of this plan."""
        try:
            SpareFiles(self._folder / SPARE).trim(0)
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be cleared: {error.strerror or error}") from error

    def _imported(self) -> Digest | None:
        """What the initial model is published as, None when that is not known (any more)."""
        if not self.keeps_master:
            return self._initial
        path = self._folder / INITIAL
        try:
            return Digest(str(read_record(path)["model"])) if path.exists() else None
        except (IntegrityError, KeyError):
            return None

    def _import(self) -> Digest:
        offset = model_file.check(self._initial_file, self._layout)
        blocks = model_file.blocks(self._initial_file, offset)
        with self._work_folder() as work:
            if self.keeps_master:
                manifest = self._write(work, _rounded(blocks), slots=(MASTER,), steps=0)
                master = read_record(work / "optimizer" / "state.json")["slots"][MASTER]
                read = manifest_from_fields(master, self._initial_file)
            else:
                read = manifest = self._write(work, (Slab(block, {}) for block in blocks), slots=(), steps=0)
            if read.digest != self._initial or self._published not in (None, manifest.digest):
                raise IntegrityError(
                    f"{self._initial_file} does not have the digests in [model] of its plan: it was changed; "
                    "restore it, or make a new plan with coordinator plan new"
                )
            self._publish(work, manifest, with_state=self.keeps_master)
        if self.keeps_master:
            write_record(self._folder / INITIAL, {"model": manifest.digest})
        return manifest.digest

    def _record(self, model: Digest) -> dict[str, Any]:
        """What state.json says of `model`; raises StorageError or IntegrityError naming it."""
        path = self._state_folder(model) / "state.json"
        record = read_record(path)
        if not isinstance(record.get("steps"), int) or not isinstance(record.get("slots"), dict):
            raise IntegrityError(f"{path} was damaged: restore it from a backup")
        return record

    def _write(
        self,
        work: Path,
        slabs: Iterable[Slab],
        *,
        slots: tuple[str, ...],
        steps: int,
    ) -> Manifest:
        """Model and state, durably, in the folder `work`; the model's manifest."""
        state = work / "optimizer"
        with ExitStack() as stack:
            model = stack.enter_context(closing(self._writer(work / "model.safetensors", self.model_layout)))
            of_slots = {
                name: stack.enter_context(closing(self._writer(state / f"{name}{_SLOT}", self._layout)))
                for name in slots
            }
            for slab in slabs:
                model.write(slab.model)
                for name, content in slab.slots.items():
                    of_slots[name].write(content)
            manifests = {name: writer.finish() for name, writer in of_slots.items()}
            record = {"slots": {name: manifest_fields(one) for name, one in manifests.items()}, "steps": steps}
            write_record(state / "state.json", record)
            manifest = model.finish()
            # Under the names that they will have: a rename leaves the mark as it is.
            written = {
                self._path(manifest.digest): model,
                **{self._state_folder(manifest.digest) / f"{name}{_SLOT}": writer for name, writer in of_slots.items()},
            }
            self._marks.update({path: writer.mark for path, writer in written.items() if writer.mark is not None})
            return manifest

    def _writer(self, path: Path, layout: Layout) -> VectorWriter:
        """A file for a vector; a spare one of the same size, where there is one, is written over."""
        head = model_file.header(layout) if path.suffix == MODEL else b""
        SpareFiles(self._folder / SPARE).take(path, len(head) + layout.total_bytes)
        return VectorWriter(path, layout, head=head)

    @contextmanager
    def _work_folder(self) -> Iterator[Path]:
        """A folder for what is being made; what is left in it in the end is deleted."""
        work = self._folder / f"{_WORK}{secrets.token_hex(8)}"
        try:
            (work / "optimizer").mkdir(parents=True)
            yield work
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be written: {error.strerror or error}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _publish(self, work: Path, manifest: Manifest, *, with_state: bool) -> None:
        model = manifest.digest
        keeps_its_own = self.exists(model) and not self._lacking_of_state(model)
        if with_state and not keeps_its_own:
            shutil.rmtree(self._state_folder(model), ignore_errors=True)
            (work / "optimizer").rename(self._state_folder(model))
        files.replace(self._manifest_path(model), manifest_to_json(manifest), entry=False)
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
        return self._folder / f"{model}{MODEL}"

    def _manifest_path(self, model: Digest) -> Path:
        return self._folder / f"{model}.manifest.json"

    def _state_folder(self, model: Digest) -> Path:
        return self._folder / f"{model}.optimizer"


def _belongs_to_none(path: Path) -> bool:
    return path.name.startswith(_WORK) or path.name in (INITIAL, SPARE, BASE, EVIDENCE)


def _model_of(path: Path) -> Digest:
    """The model that a file or folder of the store belongs to."""
    return Digest(path.name.partition(".")[0])


def _rounded(blocks: Iterable[memoryview]) -> Iterator[Slab]:
    """float32 blocks as a model in bfloat16 and its master; each slab is good until the next one is asked for."""
    for block in blocks:
        (published,) = model_file.in_bfloat16([block])
        yield Slab(published, {MASTER: block})
