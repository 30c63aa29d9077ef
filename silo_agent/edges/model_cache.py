"""Round models on disk, by digest: each chunk is checked before it is kept, and a cut download goes on where it broke.

`DIGEST.header` is what the coordinator signed; `DIGEST.part` grows chunk by chunk and becomes `DIGEST.model` (fsync,
rename) when it is whole. Names are digests alone, which were parsed as 32 bytes: no peer chooses a path.
"""

import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from google.protobuf.message import DecodeError

from security import files
from security.errors import LoricaError, StorageError
from silo_wire.canonical import Digest
from silo_wire.codec import model_header_from_wire, model_header_to_wire
from silo_wire.manifest import Manifest
from silo_wire.messages import ModelHeader
from silo_wire.v1 import federation_pb2


class PartialModel:
    """A model that is being fetched; `held` chunks are on disk and verified."""

    def __init__(self, file: IO[bytes], manifest: Manifest, held: int, path: Path) -> None:
        self._file, self.manifest, self._path = file, manifest, path
        self.held = held

    @property
    def is_whole(self) -> bool:
        return self.held == self.manifest.chunks

    @property
    def fraction(self) -> float:
        return self.held / self.manifest.chunks

    def append(self, data: bytes | memoryview) -> None:
        """Keep the next chunk; raises IntegrityError or MalformedMessage when it is not that one, StorageError."""
        self.manifest.check_chunk(self.held, data)
        try:
            self._file.write(data)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}; free some space") from error
        self.held += 1

    def close(self) -> None:
        self._file.close()

    def finish(self, target: Path) -> None:
        """Make the whole model durable under its final name."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._path, target)
            files.sync_folder(target.parent)
        except OSError as error:
            raise StorageError(f"{target} cannot be written: {error.strerror}; free some space") from error


class ModelCache:
    def __init__(self, folder: Path, *, kept: int) -> None:
        self._folder, self._kept = folder, kept

    def file(self, model: Digest) -> Path:
        return self._folder / f"{model}.model"

    def header(self, model: Digest) -> ModelHeader | None:
        """What the coordinator said of this model; its signature is the caller's to check."""
        try:
            raw = self._header_file(model).read_bytes()
            return model_header_from_wire(federation_pb2.ModelHeader.FromString(raw))
        except FileNotFoundError:
            return None
        except (OSError, DecodeError, LoricaError):
            return None  # damaged: it is fetched anew

    def holds(self, model: Digest, manifest: Manifest) -> bool:
        """Whether the whole model is here, every chunk as its manifest says."""
        path = self.file(model)
        try:
            with path.open("rb") as file:
                whole = _verified_chunks(file, manifest) == manifest.chunks and file.read(1) == b""
        except OSError:
            return False
        if not whole:
            path.unlink(missing_ok=True)
        return whole

    def open_partial(self, model: Digest, header: ModelHeader) -> PartialModel:
        """What there is of a model, cut after its last whole chunk; raises StorageError."""
        path = self._folder / f"{model}.part"
        files.write_private(
            self._header_file(model), model_header_to_wire(header).SerializeToString(deterministic=True)
        )
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.PRIVATE_FILE_MODE)
            file = os.fdopen(descriptor, "r+b")
            held = _verified_chunks(file, header.manifest)
            file.truncate(min(held * header.manifest.chunk_bytes, header.manifest.total_bytes))
            file.seek(0, os.SEEK_END)
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}") from error
        return PartialModel(file, header.manifest, held, path)

    def prune(self, keep: Collection[Digest]) -> None:
        """Delete all but `keep` and the newest models, by the time they were last asked for."""
        whole = sorted(self._folder.glob("*.model"), key=lambda path: path.stat().st_mtime, reverse=True)
        kept = {self.file(model) for model in keep}
        for path in whole:
            if len(kept) < self._kept:
                kept.add(path)
        names = {path.stem for path in kept}
        for path in self._folder.iterdir():
            if path.suffix in (".model", ".part", ".header") and path.stem not in names:
                path.unlink(missing_ok=True)

    @contextmanager
    def held(self, model: Digest, beside: Path) -> Iterator[Path | None]:
        """The whole model under a second name in `beside`, which nothing prunes meanwhile; None where it is not here."""
        with tempfile.TemporaryDirectory(prefix="held-", dir=beside) as folder:
            link = Path(folder) / "model"
            try:
                os.link(self.file(model), link)
            except FileNotFoundError:
                yield None
            else:
                yield link

    def touch(self, model: Digest) -> None:
        os.utime(self.file(model))

    def _header_file(self, model: Digest) -> Path:
        return self._folder / f"{model}.header"


def _verified_chunks(file: IO[bytes], manifest: Manifest) -> int:
    """How many chunks from the start are exactly what the manifest says."""
    for index in range(manifest.chunks):
        data = file.read(manifest.chunk_size(index))
        try:
            manifest.check_chunk(index, data)
        except LoricaError:
            return index
    return manifest.chunks
