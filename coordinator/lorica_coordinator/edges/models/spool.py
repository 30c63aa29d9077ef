"""Client updates on their way in: one file per plan, round, attempt and silo, and what is held of it.

    <plan>/<round>-<attempt>/<silo>.delta    the chunks, each at its place; the file has its full size from the start
    <plan>/<round>-<attempt>/<silo>.key      what they are encrypted with, destroyed when the attempt is over
                                             (spool_key.py); elsewhere where copies are kept (spool_keys.py)
    <plan>/<round>-<attempt>/<silo>.json     the manifest they belong to; the delta's L2 norm once all is committed
    <plan>/spare/                            the files of closed attempts, noise by then, to be written over
                                             (spare_files.py)

Masked vectors come in the same way; of their words, which are as good as any others, there is nothing to check but the
digest, and their norm is written down as zero.

Every chunk is checked against the manifest before it is written, and its part of the norm is found then. Chunks are
held in order: how many, is remembered while the process lives. After a restart the file's chunks are checked again,
from the first to the first that is not what the manifest says; what a file held before it was taken over never is. A
spool is committed when its JSON holds the norm, which is written after the data is durable.

A file's mark vouches for ciphertext, so it counts only together with the key of the same progress, and only while that
key is the one on the disk.
"""

import math
import os
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lorica_coordinator.aggregation.delta_norm import norm_of, sum_of_squares
from lorica_coordinator.edges.models.spool_keys import BESIDE, SpoolKeys
from lorica_coordinator.vectors.kept_files import FOLDER_ALONE, KeptFiles
from lorica_coordinator.vectors.spare_files import SpareFiles
from lorica_coordinator.vectors.spool_key import SpoolKey, make_key, read_key
from lorica_coordinator.vectors.stored_vector import (
    StoredVector,
    VectorReader,
    manifest_fields,
    manifest_from_fields,
    read_record,
    write_record,
)
from lorica_coordinator.vectors.vector_file import WRITE_BACK_BYTES, begin_write_back, preallocate
from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage, StorageError, WrongTime
from lorica_security.host import files
from lorica_security.host.file_mark import FileMark
from lorica_security.identifiers import SiloName, silo_name
from silo_wire.canonical import Digest
from silo_wire.int8_vectors import blocks as int8_blocks
from silo_wire.manifest import Dtype, Layout, Manifest
from silo_wire.messages import MaskedHeader, RoundKey, UpdateHeader

SPOOLS: Final = "spools"
"""The folder of all updates on their way in, in the state folder."""
_SPARE = "spare"
_ROUNDING = 1e-12
"""Of a norm that two machines measure."""


@dataclass(frozen=True, slots=True)
class _Place:
    delta: Path
    record: Path
    keys: SpoolKeys

    def key(self, name: str) -> SpoolKey | None:
        """None where there is none of this name. Raises StorageError."""
        path = self.keys.path(self.delta.with_suffix(""), name)
        return None if path is None else read_key(path)

    def new_key(self, name: str) -> SpoolKey:
        """In place of any that an earlier update here had. Raises OSError, StorageError."""
        stem = self.delta.with_suffix("")
        if (former := self.read()) is not None:
            self.keys.destroy(stem, former[2])
        self.keys.provide(self.delta.parent)
        path = self.keys.path(stem, name)
        assert path is not None
        return make_key(path)

    def read(self) -> tuple[Manifest, float | None, str] | None:
        """What the record says, None when there is none or it cannot be made out: the update is then sent again."""
        if not self.record.exists():
            return None
        try:
            fields = read_record(self.record)
            manifest = manifest_from_fields(fields.get("manifest"), self.record)
        except IntegrityError:
            return None
        norm, name = fields.get("norm"), fields.get("key", BESIDE)
        return manifest, norm if isinstance(norm, float) else None, name if isinstance(name, str) else BESIDE

    def write(self, manifest: Manifest, norm: float | None, name: str) -> None:
        """Of a whole update (`norm`) everything becomes durable, the folder's entries, too. What was begun may be lost
        with the machine's power: it is sent again."""
        named = {} if name == BESIDE else {"key": name}
        fields = {"manifest": manifest_fields(manifest), "norm": norm, **named}
        write_record(self.record, fields, entry=norm is not None)


@dataclass(slots=True)
class _Progress:
    """The sum of squares of each chunk held, in order; once the update is committed the norm, and the file's mark."""

    key: SpoolKey = field(repr=False)
    name: str
    sums: list[float] = field(default_factory=list)
    norm: float | None = None
    mark: FileMark | None = None


class Spool:
    """One silo's update on its way in; made by `Spools.open`."""

    def __init__(
        self,
        place: _Place,
        silo: SiloName,
        manifest: Manifest,
        dtype: Dtype,
        progress: _Progress,
        kept: KeptFiles = FOLDER_ALONE,
    ) -> None:
        self._place = place
        self._kept = kept
        self._silo = silo
        self._manifest = manifest
        self._dtype = dtype
        self._progress = progress
        self._descriptor: int | None = None
        self._written_back = len(progress.sums) * manifest.chunk_bytes
        self._retired = False
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Chunks held in order so far; writing goes on at this index."""
        return len(self._progress.sums)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def progress(self) -> _Progress:
        return self._progress

    def write(self, index: int, data: bytes | memoryview) -> None:
        """Take chunk `index` == `held`.

        Raises MalformedMessage for another index, a wrong size, a value that is NaN or infinite or a block that is none
        of int8, IntegrityError for wrong content, WrongTime when the attempt is over, StorageError naming the file;
        nothing of the chunk is kept then.
        """
        with self._lock:
            if index != self.held:
                raise MalformedMessage(
                    f"chunk {index} of the update of silo {self._silo} came where {self.held} is expected"
                )
            self._manifest.check_chunk(index, data)
            squares = self._checked_squares(index, data)
            if not math.isfinite(squares):
                raise MalformedMessage(
                    f"chunk {index} of the update of silo {self._silo} holds NaN or infinite values: its training "
                    "diverged; lower learning_rate, or bound it with max_grad_norm"
                )
            begin = index * self._manifest.chunk_bytes
            try:
                files.write_at(self._open(), self._progress.key.stream(begin).update(data), begin)
                end = begin + len(data)
                if end - self._written_back >= WRITE_BACK_BYTES:
                    begin_write_back(self._open(), self._written_back, end - self._written_back)
                    self._written_back = end
            except OSError as error:
                raise StorageError(f"{self._place.delta} cannot be written: {error.strerror or error}") from error
            self._progress.sums.append(squares)

    def _checked_squares(self, index: int, data: bytes | memoryview) -> float:
        try:
            return _squares(data, self._dtype)
        except MalformedMessage as error:
            raise MalformedMessage(f"chunk {index} of the update of silo {self._silo}: {error}") from error

    def commit(self) -> float:
        """Make the whole update durable, let go of its file, and return its L2 norm, 0 for a masked one; may be
        repeated.

        Raises MalformedMessage when chunks are missing, WrongTime when the attempt is over, StorageError naming the
        file.
        """
        with self._lock:
            if self._progress.norm is not None:
                return self._progress.norm
            if self.held != self._manifest.chunks:
                raise MalformedMessage(
                    f"the update of silo {self._silo} is not complete: {self.held} of {self._manifest.chunks} "
                    "chunks are held"
                )
            try:
                os.fsync(self._open())
                self._progress.mark = FileMark.of(self._open())
            except OSError as error:
                # Which pages reached the disk cannot be found out any more: all of them must be written once again.
                self._progress.sums.clear()
                self._written_back = 0
                raise StorageError(f"{self._place.delta} cannot be made durable: {error.strerror or error}") from error
            norm = norm_of(self._progress.sums)
            self._place.write(self._manifest, norm, self._progress.name)
            self._kept.keep(self._place.delta, self._place.record)
            self._progress.norm = norm
            self._let_go()
            return norm

    def close(self) -> None:
        """Let go of the file; what is held stays for a later call. May be repeated."""
        with self._lock:
            self._let_go()

    def retire(self) -> None:
        """Close it for good: the file may become another spool's."""
        with self._lock:
            self._retired = True
            self._let_go()

    def _let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> int:
        if self._retired:
            raise WrongTime(f"the attempt that the update of silo {self._silo} is for is over: wait for the next order")
        if self._descriptor is None:
            self._descriptor = os.open(self._place.delta, os.O_WRONLY | os.O_CLOEXEC)
        return self._descriptor


class Spools:
    """All updates on their way in, below `folder`; they outlive the process.

    `keys`: where theirs lie, if not beside them; no copy of them comes there.
    """

    def __init__(self, folder: Path, *, keys: SpoolKeys | None = None, kept: KeptFiles = FOLDER_ALONE) -> None:
        self._folder = folder
        self._keys = SpoolKeys(folder) if keys is None else keys
        self._kept = kept
        self._known: dict[_Place, Spool] = {}
        self._discarded: set[Path] = set()
        self._lock = threading.Lock()  # over what is known, and over which file is whose

    def open(self, key: RoundKey, silo: SiloName, header: UpdateHeader | MaskedHeader, layout: Layout) -> Spool:
        """Go on with the spool of exactly this manifest, or begin one in place of any other of this key and silo.

        Which update counts is the round store's to say: callers ask it before they open another one's spool. Raises
        MalformedMessage for a manifest of another layout, type or chunk size than can be summed, WrongTime when the
        attempt was discarded, StorageError naming the file, above all when the disk has no room for all of it.
        """
        if header.key != key:
            raise MalformedMessage(
                f"update header of silo {silo} is for round {header.key.round} attempt {header.key.attempt}, "
                f"the call for round {key.round} attempt {key.attempt}"
            )
        manifest = header.manifest
        manifest.check_layout(layout)
        if manifest.chunk_bytes % layout.unit_bytes:
            raise MalformedMessage(
                f"update of silo {silo} has chunk_bytes {manifest.chunk_bytes}: use a multiple of {layout.unit_bytes}"
            )
        place = self._place(key, silo)
        try:
            progress = self._progress(place, manifest, layout.dtype)
            with self._lock:
                if place.delta.parent in self._discarded:
                    raise WrongTime(f"round {key.round} attempt {key.attempt} is over: wait for the next order")
                progress = self._confirmed(place, manifest, progress)
                if (former := self._known.pop(place, None)) is not None:
                    former.retire()
                place.delta.parent.mkdir(parents=True, exist_ok=True)
                if progress is None:
                    name = self._keys.fresh()
                    progress = _Progress(place.new_key(name), name)
                    place.write(manifest, None, name)
                self._provide(place.delta, manifest.total_bytes)
                spool = Spool(place, silo, manifest, layout.dtype, progress, self._kept)
                self._known[place] = spool
                return spool
        except OSError as error:
            raise StorageError(f"{place.delta} cannot be used: {error.strerror or error}") from error

    def held(self, key: RoundKey, silo: SiloName, update: Digest, layout: Layout) -> int:
        """Chunks held of the update with this manifest digest; 0 when there is no such spool."""
        place = self._place(key, silo)
        known = self._known.get(place)
        if known is not None:
            return known.held if known.manifest.digest == update else 0
        record = place.read()
        if record is None or record[0].digest != update:
            return 0
        progress = self._progress(place, record[0], layout.dtype)
        with self._lock:
            progress = self._confirmed(place, record[0], progress)
            if progress is None:
                return 0  # its key is lost, or another one has begun
            known = self._known.setdefault(place, Spool(place, silo, record[0], layout.dtype, progress, self._kept))
        return known.held if known.manifest.digest == update else 0

    def committed(self, key: RoundKey, silo: SiloName, update: Digest, norm: float | None = None) -> StoredVector:
        """The committed delta with this manifest digest; raises IntegrityError naming the silo when it is not there, or
        has another L2 `norm`: what clips it is the one that was measured."""
        place = self._place(key, silo)
        with self._lock:
            known, spool = place.read(), self._known.get(place)
            key_of_spool = None if known is None or not place.delta.exists() else place.key(known[2])
        if known is None or known[0].digest != update or known[1] is None or key_of_spool is None:
            raise IntegrityError(
                f"{place.delta}: the committed update of silo {silo} was lost or replaced; the round goes on without it"
            )
        if norm is not None and not math.isclose(norm, known[1], rel_tol=_ROUNDING):
            raise IntegrityError(
                f"{place.record}: the state says another norm than was measured of the update of silo {silo}: somebody "
                "edited it; the round goes on without it"
            )
        if spool is None or spool.manifest.digest != update:
            return StoredVector(place.delta, 0, known[0], None, key_of_spool)
        if not key_of_spool.same_as(spool.progress.key):
            path = place.keys.path(place.delta.with_suffix(""), known[2])
            raise IntegrityError(
                f"{path} has changed since the update of silo {silo} was committed; the round goes on without it"
            )
        return StoredVector(place.delta, 0, known[0], spool.progress.mark, spool.progress.key)

    def discard(self, key: RoundKey) -> None:
        """Let every spool of this attempt go, unreadable from now on; nothing happens when there is none. Their files
        become spares."""
        folder = self._attempt(key)
        spares = SpareFiles(folder.parent / _SPARE)
        try:
            with self._lock:
                self._discarded.add(folder)
                self._forget(folder)
                self._keys.destroy_below(folder)
                if not folder.exists():
                    self._kept.forget(folder)
                    return
                deltas = sorted(folder.glob("*.delta"))
                for delta in deltas:
                    spares.keep(delta)
                shutil.rmtree(folder)
                spares.trim(len(deltas))  # the next attempt needs about as many as this one had
            self._kept.forget(folder)
        except OSError as error:
            raise StorageError(f"{folder} cannot be deleted: {error.strerror or error}") from error

    def retain(self, plan: Digest | None) -> None:
        """Delete the spools, unreadable from now on, and spares of every plan but this one; None: of every plan."""
        try:
            with self._lock:
                gone = sorted(folder for folder in self._of_plans() if folder.name != plan)
                for folder in gone:
                    self._forget(folder)
                    self._keys.destroy_below(folder)
                    if folder.exists():
                        shutil.rmtree(folder)
            self._kept.forget(*gone)
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be cleared: {error.strerror or error}") from error

    def _of_plans(self) -> set[Path]:
        """The folders of plans, of which one may be kept alone, or have keys alone."""
        below = {path.relative_to(self._folder).parts[0] for path in self._kept.below(self._folder)}
        there = {path.name for path in self._folder.iterdir()} if self._folder.exists() else set()
        return {self._folder / name for name in below | there | self._keys.names()}

    def _forget(self, folder: Path) -> None:
        for place in [place for place in self._known if folder in place.delta.parents]:
            self._known.pop(place).retire()

    def _provide(self, delta: Path, size: int) -> None:
        """A file of `size` bytes at `delta`; what it holds is another matter. Raises OSError."""
        fresh = not delta.exists() and not SpareFiles(delta.parent.parent / _SPARE).take(delta, size)
        descriptor = os.open(delta, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            preallocate(descriptor, size)
        except OSError:
            if fresh:
                delta.unlink()  # with the part of the disk that it was given
            raise
        finally:
            os.close(descriptor)

    def _progress(self, place: _Place, manifest: Manifest, dtype: Dtype) -> _Progress | None:
        """How far the update of `manifest` is: as remembered, else as the file says; None when another one is there.

        To read the file takes its time, so nobody is kept waiting meanwhile: `_confirmed` says whether it still holds.
        """
        known = self._known.get(place)
        if known is not None:
            return known.progress if known.manifest == manifest else None
        record = place.read()
        if record is None or record[0] != manifest:
            return None
        if (key := place.key(record[2])) is None:
            return None
        sums = _sums_held(place.delta, manifest, dtype, key)
        return _Progress(key, record[2], sums, record[1] if len(sums) == manifest.chunks else None)

    def _confirmed(self, place: _Place, manifest: Manifest, progress: _Progress | None) -> _Progress | None:
        """What `_progress` found, unless another update, with another key, was begun in this place since. Holds the
        lock."""
        if (known := self._known.get(place)) is not None:
            return known.progress if known.manifest == manifest else None
        record = place.read()
        if progress is None or record is None or record[0] != manifest:
            return None
        if not progress.key.same_as(place.key(record[2])):
            return None
        if progress.norm is None and record[1] is not None:
            place.write(manifest, None, record[2])  # committed once, damaged since: what is missing is asked for again
        return progress

    def _attempt(self, key: RoundKey) -> Path:
        return self._folder / key.plan / f"{key.round}-{key.attempt}"

    def _place(self, key: RoundKey, silo: SiloName) -> _Place:
        """Raises IntegrityError for what is no name: as part of a path it could be another silo's."""
        try:
            silo_name(silo)
        except ConfigurationError as error:
            raise IntegrityError(f"{error}; somebody edited the state of the round") from error
        folder = self._attempt(key)
        return _Place(folder / f"{silo}.delta", folder / f"{silo}.json", self._keys)


def _squares(chunk: bytes | memoryview, dtype: Dtype) -> float:
    """The chunk's part of the squared norm; raises MalformedMessage for what is no chunk of int8."""
    if dtype == "int8":
        return int8_blocks.sum_of_squares(chunk)
    return 0.0 if dtype == "uint32" else sum_of_squares(chunk, dtype)


def _sums_held(delta: Path, manifest: Manifest, dtype: Dtype, key: SpoolKey) -> list[float]:
    """The sum of squares of each chunk that is on disk as the manifest has it, from the first on."""
    sums: list[float] = []
    if not delta.exists():
        return sums
    buffer = memoryview(bytearray(manifest.chunk_bytes))
    reader = VectorReader(StoredVector(delta, 0, manifest, key=key))
    try:
        for index in range(manifest.chunks):
            chunk = buffer[: manifest.chunk_size(index)]
            reader.read_into(chunk)
            squares = _squares(chunk, dtype)
            if not math.isfinite(squares):
                break
            sums.append(squares)
    except (
        IntegrityError,
        MalformedMessage,
        StorageError,
    ):  # not written, damaged or unreadable: it is written once again
        pass
    finally:
        reader.close()
    return sums
