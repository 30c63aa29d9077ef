"""Client updates on their way in: one append-only file per plan, round, attempt and silo, and what is held of it.

    <plan>/<round>-<attempt>/<silo>.delta    the chunks held, in order
    <plan>/<round>-<attempt>/<silo>.json     the manifest they belong to; the delta's L2 norm once all is committed

Every chunk is checked against the manifest before it is written. After a crash the chunks on disk are checked again:
those whose bytes did not reach the disk are cut off and asked for once more. A spool is committed when its JSON holds
the norm, which is written after the data is durable.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coordinator.edges.stored_vector import (
    StoredVector,
    manifest_fields,
    manifest_from_fields,
    read_record,
    write_record,
)
from security.errors import IntegrityError, MalformedMessage, StorageError
from security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.manifest import Layout, Manifest
from silo_wire.messages import RoundKey, UpdateHeader


@dataclass(frozen=True, slots=True)
class _Place:
    delta: Path
    record: Path

    def read(self) -> tuple[Manifest, float | None] | None:
        """What the record says, None when there is none or it cannot be made out: the update is then sent again."""
        if not self.record.exists():
            return None
        try:
            fields = read_record(self.record)
            manifest = manifest_from_fields(fields.get("manifest"), self.record)
        except IntegrityError:
            return None
        norm = fields.get("norm")
        return manifest, norm if isinstance(norm, float) else None

    def write(self, manifest: Manifest, norm: float | None) -> None:
        write_record(self.record, {"manifest": manifest_fields(manifest), "norm": norm})

    def chunks_held(self, manifest: Manifest) -> int:
        """How many chunks from the first on are on disk as the manifest has them."""
        vector = StoredVector(self.delta, 0, manifest)
        held = 0
        if self.delta.exists():
            for index in range(manifest.chunks):
                try:
                    vector.chunk(index)
                except IntegrityError:
                    break
                held += 1
        return held


class Spool:
    """One silo's update on its way in; made by `Spools.open`."""

    def __init__(self, place: _Place, silo: SiloName, manifest: Manifest, held: int, norm: float | None) -> None:
        self._place = place
        self._silo = silo
        self._manifest = manifest
        self._held = held
        self._norm = norm
        self._descriptor: int | None = None

    @property
    def held(self) -> int:
        """Chunks held in order so far; writing goes on at this index."""
        return self._held

    def write(self, index: int, data: bytes) -> None:
        """Take chunk `index` == `held`.

        Raises MalformedMessage for another index, a wrong size or a value that is NaN or infinite, IntegrityError for
        wrong content, StorageError naming the file; nothing of the chunk is kept then.
        """
        if index != self._held:
            raise MalformedMessage(
                f"chunk {index} of the update of silo {self._silo} came where {self._held} is expected"
            )
        self._manifest.check_chunk(index, data)
        if not np.isfinite(np.frombuffer(data, dtype="<f4")).all():
            raise MalformedMessage(
                f"chunk {index} of the update of silo {self._silo} holds NaN or infinite values: its training diverged; "
                "lower learning_rate, or bound it with max_grad_norm"
            )
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._place.delta, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            view, at = memoryview(data), index * self._manifest.chunk_bytes
            while view:  # the kernel may take a part, above all on a disk that runs full
                written = os.pwrite(self._descriptor, view, at)
                view, at = view[written:], at + written
        except OSError as error:
            raise StorageError(f"{self._place.delta} cannot be written: {error.strerror or error}") from error
        self._held += 1

    def commit(self) -> float:
        """Make the whole update durable and return its L2 norm; may be repeated.

        Raises MalformedMessage when chunks are missing, StorageError naming the file.
        """
        if self._norm is not None:
            return self._norm
        if self._held != self._manifest.chunks:
            raise MalformedMessage(
                f"the update of silo {self._silo} is not complete: {self._held} of {self._manifest.chunks} chunks are held"
            )
        try:
            descriptor = os.open(self._place.delta, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageError(f"{self._place.delta} cannot be made durable: {error.strerror or error}") from error
        norm = self._measured_norm()
        self._place.write(self._manifest, norm)  # also makes the folder's entries durable
        self._norm = norm
        self.close()
        return norm

    def close(self) -> None:
        """Let go of the file; what is held stays for a later call. May be repeated."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _measured_norm(self) -> float:
        # Here, not above: torch takes seconds to import, and commands that only look at the state never need it.
        import torch

        from coordinator.aggregation.delta_norm import delta_norm

        vector = StoredVector(self._place.delta, 0, self._manifest)
        chunks = (vector.chunk(index) for index in range(self._manifest.chunks))
        return delta_norm(self._silo, (torch.frombuffer(bytearray(chunk), dtype=torch.float32) for chunk in chunks))


class Spools:
    """All updates on their way in, below `folder`; they outlive the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, key: RoundKey, silo: SiloName, header: UpdateHeader, layout: Layout) -> Spool:
        """Go on with the spool of exactly this manifest, or begin one in place of any other of this key and silo.

        Which update counts is the round store's to say: callers ask it before they open another one's spool. Raises
        MalformedMessage for a manifest of another layout, type or chunk size than can be summed.
        """
        if header.key != key:
            raise MalformedMessage(
                f"update header of silo {silo} is for round {header.key.round} attempt {header.key.attempt}, "
                f"the call for round {key.round} attempt {key.attempt}"
            )
        manifest = header.manifest
        manifest.check_layout(layout)
        if layout.dtype != "float32":
            raise MalformedMessage(f"update of silo {silo} has type {layout.dtype}: only float32 updates are taken")
        if manifest.chunk_bytes % layout.item_bytes:
            raise MalformedMessage(
                f"update of silo {silo} has chunk_bytes {manifest.chunk_bytes}: use a multiple of {layout.item_bytes}"
            )
        place = self._place(key, silo)
        try:
            place.delta.parent.mkdir(parents=True, exist_ok=True)
            known = place.read()
            if known is None or known[0] != manifest:
                place.delta.unlink(missing_ok=True)
                place.write(manifest, None)
                return Spool(place, silo, manifest, 0, None)
            held, norm = place.chunks_held(manifest), known[1]
            if held < manifest.chunks:
                if norm is not None:  # committed once, damaged since: what is missing is asked for again
                    place.write(manifest, None)
                    norm = None
                if place.delta.exists():
                    os.truncate(place.delta, held * manifest.chunk_bytes)
            return Spool(place, silo, manifest, held, norm)
        except OSError as error:
            raise StorageError(f"{place.delta} cannot be used: {error.strerror or error}") from error

    def held(self, key: RoundKey, silo: SiloName, update: Digest) -> int:
        """Chunks held of the update with this manifest digest; 0 when there is no such spool."""
        place = self._place(key, silo)
        known = place.read()
        if known is None or known[0].digest != update:
            return 0
        return place.chunks_held(known[0])

    def committed(self, key: RoundKey, silo: SiloName, update: Digest) -> StoredVector:
        """The committed delta with this manifest digest; raises IntegrityError naming the silo when it is not there."""
        place = self._place(key, silo)
        known = place.read()
        if known is None or known[0].digest != update or known[1] is None:
            raise IntegrityError(
                f"{place.delta}: the committed update of silo {silo} was lost or replaced; the round goes on without it"
            )
        return StoredVector(place.delta, 0, known[0])

    def discard(self, key: RoundKey) -> None:
        """Delete every spool of this attempt; nothing happens when there is none."""
        folder = self._attempt(key)
        try:
            if folder.exists():
                shutil.rmtree(folder)
        except OSError as error:
            raise StorageError(f"{folder} cannot be deleted: {error.strerror or error}") from error

    def _attempt(self, key: RoundKey) -> Path:
        return self._folder / key.plan / f"{key.round}-{key.attempt}"

    def _place(self, key: RoundKey, silo: SiloName) -> _Place:
        folder = self._attempt(key)
        return _Place(folder / f"{silo}.delta", folder / f"{silo}.json")
