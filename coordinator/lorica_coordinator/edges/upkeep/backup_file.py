"""A backup as a file: a line that says of what it is, then files, each after a line with its name and size, and a line
with all digests.

Under a passphrase it is a sealed stream (security/lorica_security/host/sealed_stream.py); in clear only where that was
asked for. Who reads one trusts nothing in it: names are of a closed form, each stands once, digests are checked before
anything of it is used.
"""

import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

from blake3 import blake3

from lorica_security.errors import ConfigurationError, IntegrityError, StorageError
from lorica_security.host import files
from lorica_security.host.key_file import Passphrase
from lorica_security.host.sealed_stream import MAGIC, SealedReader, SealedWriter

FORMAT: Final = 1
PASSPHRASE: Final = "LORICA_BACKUP_PASSPHRASE"  # noqa: S105  # nosec B105  # a variable's name
_KIND: Final = "lorica coordinator backup"
_BLOCK_BYTES: Final = 1 << 20
_MOST_LINE_BYTES: Final = 4096
_MOST_MANIFEST_BYTES: Final = 64 << 20
_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_TOP: Final = frozenset({"federation.toml", "keys", "audit", "state"})
_MOST_PARTS: Final = 8
_YEAR_10000_S: Final = 253_402_300_800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """`made_at` is in Unix seconds; `revision` that of the tables, `release` of the program that wrote it."""

    federation: str
    made_at: float
    release: str
    revision: str


class _Sink(Protocol):
    def write(self, data: bytes, /) -> object: ...


def may_hold(name: str) -> bool:
    """Whether a backup may hold a file of this name: relative, of plain parts, none of them hidden, below a known
    folder."""
    parts = name.split("/")
    return len(parts) <= _MOST_PARTS and parts[0] in _TOP and all(_PART.fullmatch(part) for part in parts)


def _is_instant(value: object) -> bool:
    return type(value) is float and 0 <= value < _YEAR_10000_S


class BackupWriter:
    """`add` files, then `finish`."""

    def __init__(self, sink: _Sink, about: About) -> None:
        self._sink = sink
        self._digests: dict[str, str] = {}
        self.bytes = 0
        self._line({"kind": _KIND, "format": FORMAT, **asdict(about)})

    @property
    def count(self) -> int:
        return len(self._digests)

    def add(self, name: str, content: bytes) -> None:
        self.add_from(name, io.BytesIO(content), len(content))

    def add_from(self, name: str, file: BinaryIO, size: int) -> None:
        """`size` bytes of `file`, which must have them. Raises StorageError naming it, ConfigurationError for an unfit
        name."""
        if not may_hold(name) or name in self._digests:
            raise ConfigurationError(f"{name} cannot stand in a backup: rename it")
        self._line({"name": name, "size": size})
        hashed, left = blake3(), size
        while left:
            block = file.read(min(left, _BLOCK_BYTES))
            if not block:
                raise StorageError(f"{name} became shorter while it was copied: try again")
            hashed.update(block)
            self._sink.write(block)
            left -= len(block)
        self._digests[name] = hashed.hexdigest()
        self.bytes += size

    def finish(self) -> None:
        self._line({"digests": self._digests})

    def _line(self, value: dict[str, object]) -> None:
        self._sink.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")


@contextmanager
def new_backup(target: Path, passphrase: Passphrase | None, about: About) -> Iterator[BackupWriter]:
    """A file of mode 0600 that is at `target` at the end of the block, whole, or not at all; None: in clear.

    Raises ConfigurationError for a target that is there, StorageError naming it.
    """
    if target.exists():
        raise ConfigurationError(f"{target} is there already: choose a new file, nothing is overwritten")
    temporary = target.with_name(f".{target.name}.tmp")
    if files.is_abandoned(temporary):
        temporary.unlink(missing_ok=True)  # one that was cut off
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, files.PRIVATE_FILE_MODE)
    except FileExistsError as error:
        raise ConfigurationError(
            f"{temporary} is there: another backup is being written to {target}; wait for it, or choose another file"
        ) from error
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            files.hold(descriptor)
            sealed = None if passphrase is None else SealedWriter(file, passphrase)
            writer = BackupWriter(sealed or file, about)
            yield writer
            writer.finish()
            if sealed is not None:
                sealed.finish()
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        files.sync_folder(target.parent)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def opened_backup(source: Path, passphrase: Passphrase | None) -> Iterator["BackupReader"]:
    """Raises ConfigurationError for what is no backup, needs a passphrase or has none where one is given,
    WrongPassphrase, StorageError naming it."""
    try:
        with source.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                file.seek(0)
                reader = BackupReader(file, str(source))
                if passphrase is not None:  # who gives one counts on it: anybody can write a backup that has none
                    raise ConfigurationError(
                        f"{source} is in clear, though ${passphrase.variable} gives a passphrase: it is not the one "
                        f"that was made under that; unset ${passphrase.variable} for one that was made with --plain"
                    )
                yield reader
                return
            if passphrase is None:
                raise ConfigurationError(
                    f"{source} is under a passphrase: give it with ${PASSPHRASE} or ${PASSPHRASE}_FILE"
                )
            sealed = SealedReader(file, passphrase, where=str(source))
            yield BackupReader(io.BufferedReader(sealed, _BLOCK_BYTES), str(source))
    except OSError as error:
        raise StorageError(f"{source} cannot be read: {error.strerror or error}") from error


class BackupReader:
    """Of an untrusted file. Raises IntegrityError naming it for anything that no writer wrote."""

    def __init__(self, file: BinaryIO | io.BufferedReader, where: str) -> None:
        self._file, self._where = file, where
        line = self._line(_MOST_LINE_BYTES)
        if line.pop("kind", None) != _KIND:
            raise IntegrityError(f"{where} is no backup of a coordinator")
        if (found := line.pop("format", None)) != FORMAT:
            raise ConfigurationError(
                f"{where} has format {str(found)[:20]}, this release reads {FORMAT}: use the release that wrote it"
            )
        if set(line) != set(About.__slots__) or not all(
            _is_instant(line[name]) if name == "made_at" else isinstance(line[name], str) for name in line
        ):
            raise self._damaged("its first line is not one that a backup has")
        self.about = About(**line)

    def extract(self, folder: Path) -> int:
        """Every file below `folder`, with mode 0600 in folders of 0700, durable; how many. `folder` is of no use where
        this raises."""
        digests: dict[str, str] = {}
        while "digests" not in (line := self._line(_MOST_MANIFEST_BYTES)):
            name, size = line.get("name"), line.get("size")
            if not isinstance(name, str) or type(size) is not int or size < 0 or not may_hold(name) or name in digests:
                raise self._damaged(f"it names a file {str(name)[:80]!r}, which no backup holds")
            digests[name] = self._write(folder, name, size)
        if line != {"digests": digests} or self._file.read(1):
            raise self._damaged("the digests of its files are others than those that it names")
        for inside in {(folder / name).parent for name in digests}:
            for one in (inside, *inside.parents):
                if one.is_relative_to(folder):
                    files.sync_folder(one)
        return len(digests)

    def _write(self, folder: Path, name: str, size: int) -> str:
        path = folder / name
        hashed, left = blake3(), size
        try:
            inside = folder
            inside.mkdir(mode=files.PRIVATE_FOLDER_MODE, exist_ok=True)
            for part in path.parent.relative_to(folder).parts:
                inside /= part
                inside.mkdir(mode=files.PRIVATE_FOLDER_MODE, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, files.PRIVATE_FILE_MODE)
            with os.fdopen(descriptor, "wb") as file:
                while left:
                    block = self._file.read(min(left, _BLOCK_BYTES))
                    if not block:
                        raise self._damaged(f"it ends within {name}")
                    hashed.update(block)
                    file.write(block)
                    left -= len(block)
                file.flush()
                os.fsync(file.fileno())
        except (FileExistsError, NotADirectoryError) as error:
            raise self._damaged(f"{name} is a file and a folder") from error
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
        return hashed.hexdigest()

    def _line(self, most: int) -> dict[str, Any]:
        line = self._file.readline(most + 1)
        try:
            if not line.endswith(b"\n") or not isinstance(value := json.loads(line), dict):
                raise ValueError("no line")
        except (ValueError, RecursionError) as error:
            raise self._damaged("a line of it does not parse, or it was cut") from error
        return value

    def _damaged(self, what: str) -> IntegrityError:
        return IntegrityError(f"{self._where} was damaged, or is no backup: {what}; use another copy")
