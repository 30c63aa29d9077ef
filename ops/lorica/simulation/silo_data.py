"""The silos' examples and schemas as they lie in their folders, and whether they are still those that a folder was
begun with."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from lorica_security.errors import DataError
from lorica_security.host import files
from lorica_security.identifiers import SiloName
from silo_agent.training.data.text_to_sql_data import SCHEMA_FILE, SPLITS
from silo_wire.canonical import digest_of

_KNOWN = "silos.json"


def remember(silos: Mapping[SiloName, Path], out: Path) -> None:
    """That `out` is of these data; raises DataError, StorageError."""
    files.replace(out / _KNOWN, json.dumps(_digests(silos), indent=1).encode())


def changed(silos: Mapping[SiloName, Path], out: Path) -> list[str]:
    """Names of the silos whose data are others than `out` remembers, with those that only one of both has; raises
    DataError."""
    file = out / _KNOWN
    if not file.exists():
        return []
    known, now = json.loads(file.read_bytes()), _digests(silos)
    return sorted(name for name in known.keys() | now.keys() if known.get(name) != now.get(name))


def _digests(silos: Mapping[SiloName, Path]) -> dict[str, str]:
    return {str(name): _digest(folder) for name, folder in silos.items()}


def _digest(folder: Path) -> str:
    splits = [digest_of(b"".join(lines(folder, split))) for split in SPLITS]
    # Lines that have a table each have no file of schemas beside them.
    schema = schema_of(folder) if (folder / SCHEMA_FILE).exists() else b""
    return digest_of("".join((*splits, digest_of(schema))).encode())


def schema_of(folder: Path) -> bytes:
    """Of its file of schemas; raises DataError."""
    try:
        return (folder / SCHEMA_FILE).read_bytes()
    except OSError as error:
        raise DataError(f"{folder / SCHEMA_FILE} cannot be read: {error.strerror or error}") from error


def lines(folder: Path, split: str) -> Iterator[bytes]:
    """Of a split's file, packed or not, each with its end; those that are empty left out. Raises DataError."""
    plain, packed = folder / f"{split}.jsonl", folder / f"{split}.jsonl.gz"
    try:
        if plain.exists():
            text = plain.read_bytes()
        elif packed.exists():
            text = gzip.decompress(packed.read_bytes())
        else:
            return
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{folder}: {split} cannot be read ({error}): correct or replace it") from error
    for line in text.split(b"\n"):
        if line.strip():
            yield line + b"\n"
