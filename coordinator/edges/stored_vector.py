"""A flat vector in a file, with the manifest that its bytes are checked against on every read.

Models, spooled updates and the server optimizer's state are all this. Reading needs nothing but the range that is
asked for: whole chunks are read, checked and cut, so that no byte is used unchecked and no memory is held in between.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from security import files
from security.errors import IntegrityError, MalformedMessage, StorageError
from silo_wire.canonical import Digest, canonical_json, digest_of
from silo_wire.manifest import Manifest


@dataclass(frozen=True, slots=True)
class StoredVector:
    """`offset` is where the vector begins in the file."""

    path: Path
    offset: int
    manifest: Manifest

    def chunk(self, index: int) -> bytes:
        """Chunk `index`; raises IntegrityError naming the file unless it is what the manifest says."""
        size = self.manifest.chunk_size(index)
        begin = index * self.manifest.chunk_bytes
        try:
            with self.path.open("rb") as file:
                data = os.pread(file.fileno(), size, self.offset + begin)
        except FileNotFoundError as error:
            raise StorageError(f"{self.path} is missing: restore it from a backup") from error
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read: {error.strerror or error}") from error
        try:
            self.manifest.check_chunk(index, data)
        except (IntegrityError, MalformedMessage) as error:
            raise IntegrityError(
                f"{self.path} was damaged: chunk {index} (bytes {begin} to {begin + size}) is not what was written; "
                "restore the file from a backup"
            ) from error
        return data

    def read(self, start: int, stop: int) -> bytearray:
        """Bytes `start` to `stop` of the vector, every chunk they lie in checked."""
        data = bytearray(stop - start)
        chunk_bytes = self.manifest.chunk_bytes
        for index in range(start // chunk_bytes, -(-stop // chunk_bytes)):
            begin = index * chunk_bytes
            piece = self.chunk(index)[max(0, start - begin) : stop - begin]
            at = max(0, begin - start)
            data[at : at + len(piece)] = piece
        return data


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
    except (KeyError, TypeError, ValueError, MalformedMessage) as error:
        raise IntegrityError(
            f"{where} was damaged: it holds no manifest ({error}); restore it from a backup"
        ) from error


def write_record(path: Path, fields: Mapping[str, object]) -> None:
    """Write a small JSON record, durably, with its own digest."""
    files.replace(path, canonical_json({"digest": digest_of(canonical_json(fields)), "fields": fields}))


def read_record(path: Path) -> dict[str, Any]:
    """The fields of a record; raises IntegrityError when it was damaged, StorageError when it is missing or unreadable."""
    value = read_json(path)
    fields = value.get("fields")
    if not isinstance(fields, dict) or value.get("digest") != digest_of(canonical_json(fields)):
        raise IntegrityError(f"{path} was damaged: it does not have the digest it names; restore it from a backup")
    return fields


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
