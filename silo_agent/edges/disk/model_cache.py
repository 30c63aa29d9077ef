"""Round models on disk, by digest: each chunk is checked before it is kept, and a cut download goes on where it broke.

`DIGEST.header` is what the coordinator signed; `DIGEST.part` grows chunk by chunk and becomes `DIGEST.model` when it is
whole. Names are digests alone, which were parsed as 32 bytes: no peer chooses a path.

A part is begun in the file of a model that is not needed any more, `spare`, where there is one: to write over pages and
blocks that a file has already costs a tenth of the time of new ones. What that file held is taken for nothing but what
it is: a chunk is held if it has its digest.

Nothing here is synced to disk. A kill loses nothing that was written, and what a power cut takes is found by its digest
when a later process looks, and fetched again: models are the coordinator's, and the wait for a disk would be on the way
of every round.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from google.protobuf.message import DecodeError

from lorica_security.errors import LoricaError, StorageError
from lorica_security.host import files
from lorica_security.host.file_mark import FileMark
from silo_wire.canonical import Digest
from silo_wire.codecs.updates_codec import model_header_from_wire, model_header_to_wire
from silo_wire.manifest import Manifest
from silo_wire.messages import ModelHeader
from silo_wire.v1 import federation_pb2

_BASE = "base"


def model_file(folder: Path, model: Digest) -> Path:
    """Where a cache in `folder` has a model that is whole."""
    return folder / f"{model}.model"


class PartialModel:
    """A model that is being fetched; `held` chunks are on disk and verified, some more may have arrived.

    Chunks may be appended in one thread while they arrive in another; `close` it once none is being appended.
    """

    def __init__(
        self, descriptor: int, manifest: Manifest, held: int, path: Path, closed: Callable[[FileMark, int], None]
    ) -> None:
        """`closed` hears of the file's mark and the chunks held in it, once, at the end."""
        self._descriptor, self.manifest, self._path, self._tell = descriptor, manifest, path, closed
        self.held = self.due = held

    @property
    def is_whole(self) -> bool:
        """Whether every chunk has arrived."""
        return self.due == self.manifest.chunks

    @property
    def fraction(self) -> float:
        return self.due / self.manifest.chunks

    def arrive(self, data: bytes | memoryview) -> None:
        """The chunk that is due; `append` keeps it. Raises MalformedMessage for another size: what waits is counted in
        chunks."""
        self.manifest.check_chunk_size(self.due, data)
        self.due += 1

    def append(self, data: bytes | memoryview) -> None:
        """Keep the next chunk; raises IntegrityError or MalformedMessage when it is not that one, StorageError."""
        self.manifest.check_chunk(self.held, data)
        try:
            files.write_at(self._descriptor, data, self.held * self.manifest.chunk_bytes)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}; free some space") from error
        self.held += 1

    def finish(self, target: Path) -> None:
        """Give the whole model its final name; raises StorageError."""
        try:
            os.ftruncate(self._descriptor, self.manifest.total_bytes)
            os.replace(self._path, target)
        except OSError as error:
            raise StorageError(f"{target} cannot be written: {error.strerror}; free some space") from error

    def close(self) -> None:
        self._tell(FileMark.of(self._descriptor), self.held)
        os.close(self._descriptor)


class ModelCache:
    """For one process at a time, but for `header` and `held`."""

    def __init__(self, folder: Path, *, kept: int) -> None:
        self._folder, self._kept = folder, kept
        self._checked: dict[Digest, tuple[FileMark, int]] = {}
        """Of each model's file as this process left it, and the number of chunks in it that it found right."""

    def base(self) -> "ModelCache":
        """A cache apart for the model that a plan's adapters are for: no round model takes its place."""
        folder = self._folder / _BASE
        files.make_private_folder(folder)
        return ModelCache(folder, kept=1)

    def file(self, model: Digest) -> Path:
        return model_file(self._folder, model)

    def header(self, model: Digest) -> ModelHeader | None:
        """What the coordinator said of this model; its signature is the caller's to check."""
        try:
            raw = self._header_file(model).read_bytes()
            return model_header_from_wire(federation_pb2.ModelHeader.FromString(raw))
        except FileNotFoundError:
            return None
        except (OSError, DecodeError, LoricaError):
            return None  # damaged: it is fetched anew

    def whole(self, model: Digest, manifest: Manifest) -> FileMark | None:
        """The mark of the model's file, if it is here and every chunk is as its manifest says."""
        path = self.file(model)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            mark = FileMark.of(descriptor)
            held = self._held(model, descriptor, manifest)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        if held < manifest.chunks or mark.size != manifest.total_bytes:
            path.unlink(missing_ok=True)
            return None
        self._checked[model] = mark, held
        return mark

    def open_partial(self, model: Digest, header: ModelHeader, *, anew: bool = False) -> PartialModel:
        """What there is of a model, to go on after its last whole chunk, or `anew` with its first; raises
        StorageError."""
        path = self._part(model)
        files.write_private(
            self._header_file(model), model_header_to_wire(header).SerializeToString(deterministic=True)
        )
        try:
            if not path.exists():
                with suppress(FileNotFoundError):
                    self._spare.replace(path)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.PRIVATE_FILE_MODE)
            held = 0 if anew else self._held(model, descriptor, header.manifest)
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}") from error

        def closed(mark: FileMark, held: int) -> None:
            self._checked[model] = mark, held

        return PartialModel(descriptor, header.manifest, held, path, closed)

    def prune(self, model: Digest, *, coming: bool = False) -> None:
        """Delete all but `model` and the newest others, by the time they were last asked for; one file becomes the
        spare.

        With `coming`, before `model` is here, at least one other stays: `silo-agent ask` has its use for it.
        """
        most = max(2, self._kept) if coming else self._kept
        names = {model}
        for path in sorted(self._folder.glob("*.header"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
            if len(names) < most and path.with_suffix(".model").exists():
                names.add(Digest(path.stem))
        for path in self._folder.iterdir():
            if path.suffix in (".model", ".part", ".header") and path.stem not in names:
                self._checked.pop(Digest(path.stem), None)
                if path.suffix == ".header" or not self._keep_as_spare(path):
                    path.unlink(missing_ok=True)

    @contextmanager
    def held(self, model: Digest, beside: Path) -> Iterator[Path | None]:
        """The whole model under a second name in `beside`, which nothing prunes meanwhile; None where it is not
        here."""
        with tempfile.TemporaryDirectory(prefix="held-", dir=beside) as folder:
            link = Path(folder) / "model"
            try:
                os.link(self.file(model), link)
            except FileNotFoundError:
                yield None
            else:
                yield link

    def touch(self, model: Digest) -> None:
        """It was asked for just now."""
        now = time.time_ns()  # the kernel's own is some milliseconds coarse
        os.utime(self._header_file(model), ns=(now, now))

    def _keep_as_spare(self, path: Path) -> bool:
        if self._spare.exists():
            return False
        path.replace(self._spare)
        # Another process may read it under a second name (`held`); under this one it cannot be given one any more.
        if self._spare.stat().st_nlink > 1:
            self._spare.unlink()
        return True

    def _held(self, model: Digest, descriptor: int, manifest: Manifest) -> int:
        """How many chunks from the start are exactly what the manifest says; raises OSError."""
        checked = self._checked.get(model)
        if checked is not None and checked[0] == FileMark.of(descriptor):
            return checked[1]
        memory = memoryview(bytearray(manifest.chunk_bytes))
        for index in range(manifest.chunks):
            chunk = memory[: os.preadv(descriptor, [memory], index * manifest.chunk_bytes)]
            try:
                manifest.check_chunk(index, chunk[: manifest.chunk_size(index)])
            except LoricaError:
                return index
        return manifest.chunks

    def _header_file(self, model: Digest) -> Path:
        return self._folder / f"{model}.header"

    def _part(self, model: Digest) -> Path:
        return self._folder / f"{model}.part"

    @property
    def _spare(self) -> Path:
        return self._folder / "spare"
