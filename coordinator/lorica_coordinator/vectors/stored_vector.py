"""A flat vector in a file, with the manifest that its bytes are checked against before they are used.

Models, spooled updates and the server optimizer's state are all this. Whole chunks are read and checked before any of
their bytes is used, in the memory that they are used from. What this process itself has checked or digested as it wrote
it, in a file that nobody has touched since, is not digested once more: on a processor core that is half the time of a
read.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorica_coordinator.vectors.spool_key import SpoolKey
from lorica_security.errors import IntegrityError, MalformedMessage, StorageError
from lorica_security.host import files
from lorica_security.host.file_mark import FileMark
from silo_wire.canonical import Digest, canonical_json, digest_of
from silo_wire.manifest import Manifest


@dataclass(frozen=True, slots=True)
class StoredVector:
    """`offset` is where the vector begins in the file; `mark` is the file's when this process knew it to be right.

    `key` opens a vector that lies there encrypted, as spooled updates do.
    """

    path: Path
    offset: int
    manifest: Manifest
    mark: FileMark | None = None
    key: SpoolKey | None = field(default=None, repr=False)

    def chunk(self, index: int) -> bytes:
        """Chunk `index`; raises IntegrityError naming the file unless it is what the manifest says."""
        size = self.manifest.chunk_size(index)
        descriptor = self.open()
        try:
            known = FileMark.of(descriptor) == self.mark
            data = os.pread(descriptor, size, self.offset + index * self.manifest.chunk_bytes)
        except OSError as error:
            raise self.unreadable(error) from error
        finally:
            os.close(descriptor)
        if self.key is not None:
            data = self.key.stream(index * self.manifest.chunk_bytes).update(data)
        if not known:
            self.check(index, data)
        return data

    def open(self) -> int:
        """A descriptor to read the file with; raises StorageError naming it."""
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise StorageError(f"{self.path} is missing: restore it from a backup") from error
        except OSError as error:
            raise self.unreadable(error) from error

    def check(self, index: int, data: bytes | memoryview) -> None:
        """Raise IntegrityError naming the file unless `data` is chunk `index`."""
        try:
            self.manifest.check_chunk(index, data)
        except (IntegrityError, MalformedMessage) as error:
            begin = index * self.manifest.chunk_bytes
            raise IntegrityError(
                f"{self.path} was damaged: chunk {index} (bytes {begin} to {begin + self.manifest.chunk_size(index)}) "
                f"is not what was written; restore the file from a backup"
            ) from error

    def unreadable(self, error: OSError) -> StorageError:
        return StorageError(f"{self.path} cannot be read: {error.strerror or error}")


class VectorReader:
    """A stored vector from its first byte to its last, in pieces of any length; every chunk is read once, and checked.

    Raises what StoredVector raises. `close` it.
    """

    def __init__(self, vector: StoredVector) -> None:
        self._vector = vector
        self._next = 0  # chunk
        self._cut: memoryview | None = None  # memory for a chunk that a piece ends in
        self._rest = memoryview(b"")  # of the chunk before `_next`, checked
        self._descriptor = vector.open()
        self._position = vector.offset
        self._known = FileMark.of(self._descriptor) == vector.mark
        self._stream = vector.key.stream(0) if vector.key is not None else None

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes that come next, of which there must be as many."""
        if self._known:
            self._read(buffer)
            return
        while buffer:
            if not self._rest:
                whole = self._whole_chunks(len(buffer))
                self._read_chunks(buffer[:whole])
                buffer = buffer[whole:]
                if buffer:
                    self._rest = self._cut_chunk()
            taken = min(len(buffer), len(self._rest))
            buffer[:taken] = self._rest[:taken]
            buffer, self._rest = buffer[taken:], self._rest[taken:]

    def close(self) -> None:
        """May be repeated."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _whole_chunks(self, size: int) -> int:
        """How many bytes the chunks from `_next` on have that fit into `size`."""
        manifest = self._vector.manifest
        left = manifest.total_bytes - self._next * manifest.chunk_bytes
        return left if left <= size else size - size % manifest.chunk_bytes

    def _cut_chunk(self) -> memoryview:
        if self._cut is None:
            self._cut = memoryview(bytearray(self._vector.manifest.chunk_bytes))
        chunk = self._cut[: self._vector.manifest.chunk_size(self._next)]
        self._read_chunks(chunk)
        return chunk

    def _read_chunks(self, target: memoryview) -> None:
        self._read(target)
        chunk_bytes = self._vector.manifest.chunk_bytes
        for start in range(0, len(target), chunk_bytes):
            self._vector.check(self._next, target[start : start + chunk_bytes])
            self._next += 1

    def _read(self, target: memoryview) -> None:
        vector, whole = self._vector, target
        try:
            while target:
                count = os.preadv(self._descriptor, [target], self._position)
                if count == 0:  # cut short: never as it was written
                    vector.check((self._position - vector.offset) // vector.manifest.chunk_bytes, b"")
                self._position += count
                target = target[count:]
        except OSError as error:
            raise vector.unreadable(error) from error
        if self._stream is not None:
            self._stream.update_into(whole, whole)


def manifest_to_json(manifest: Manifest) -> bytes:
    return canonical_json(manifest_fields(manifest))


def manifest_fields(manifest: Manifest) -> dict[str, object]:
    return {
        "chunk_bytes": manifest.chunk_bytes,
        "chunks": [digest.hex() for digest in manifest.chunk_digests],
        "layout": manifest.layout_digest,
        "total_bytes": manifest.total_bytes,
    }


def manifest_from_fields(fields: object, where: Path) -> Manifest:
    """The inverse of `manifest_fields`; raises IntegrityError naming the file `where`."""
    try:
        if not isinstance(fields, dict):
            raise TypeError("not an object")
        chunks = tuple(bytes.fromhex(text) for text in fields["chunks"])
        return Manifest(Digest(str(fields["layout"])), int(fields["total_bytes"]), int(fields["chunk_bytes"]), chunks)
    except (KeyError, TypeError, ValueError, OverflowError, MalformedMessage) as error:
        raise IntegrityError(
            f"{where} was damaged: it holds no manifest ({error}); restore it from a backup"
        ) from error


def write_record(path: Path, fields: Mapping[str, object], *, entry: bool = True) -> None:
    """Write a small JSON record, durably, with its own digest. `entry` as for `files.replace`."""
    content = canonical_json({"digest": digest_of(canonical_json(fields)), "fields": fields})
    files.replace(path, content, entry=entry)


def read_record(path: Path) -> dict[str, Any]:
    """The fields of a record; raises IntegrityError when it was damaged, StorageError when it is missing or
    unreadable."""
    value = read_json(path)
    fields = value.get("fields")
    try:
        if isinstance(fields, dict) and value.get("digest") == digest_of(canonical_json(fields)):
            return fields
    except (ValueError, RecursionError):
        pass  # it holds what canonical JSON cannot say: NaN, half a character
    raise IntegrityError(f"{path} was damaged: it does not have the digest it names; restore it from a backup")


def read_json(path: Path) -> dict[str, object]:
    """A JSON object; raises IntegrityError when it is not one, StorageError when it is missing or unreadable."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise StorageError(f"{path} is missing: restore it from a backup") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} was damaged: it is not JSON; restore it from a backup") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{path} was damaged: it is not a JSON object; restore it from a backup")
    return value
