"""Where the coordinator's releases are kept: in `state`/privacy, or where the state is (database/postgresql)."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

from lorica_security.errors import IntegrityError
from lorica_security.host import files
from lorica_security.noise.random_words import KEY_BYTES
from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from lorica_security.privacy.ledger import Entry
from silo_wire.canonical import Digest

_CLOSED: Final = "closed"


class KeptReleases(Protocol):
    """For one process at a time that writes; anyone may read. Raises StorageError, IntegrityError naming the place."""

    def entries(self) -> tuple[Entry, ...]:
        """All of them, as a ledger: each follows the one before."""

    def append(self, entries: Sequence[Entry]) -> None:
        """Durable when this returns. After an error none, some or all of them are there: each was meant to be
        released."""

    def closed(self) -> frozenset[Digest]:
        """The plans of which no further sum is released."""

    def close(self, plans: Iterable[Digest]) -> None:
        """Durable when this returns; never taken back."""

    def began(self) -> bool:
        """Whether anything was ever entered."""

    def root(self) -> bytes | None:
        """What noise is made from, KEY_BYTES; None where none was made yet."""

    def keep_root(self, root: bytes) -> None:
        """Durable when this returns; where there is one by then, that one stays."""


class FolderReleases:
    """In the files of a private folder (release_ledger.py)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ledger = PrivacyLedgerFile(folder / "ledger")

    @property
    def path(self) -> Path:
        return self._ledger.path

    def entries(self) -> tuple[Entry, ...]:
        return self._ledger.entries()

    def append(self, entries: Sequence[Entry]) -> None:
        self._ledger.append(entries)

    def closed(self) -> frozenset[Digest]:
        path = self._folder / _CLOSED
        return frozenset(map(Digest, files.read_private(path).decode().split())) if path.exists() else frozenset()

    def close(self, plans: Iterable[Digest]) -> None:
        listed = sorted({*self.closed(), *plans})
        files.make_private_folder(self._folder)
        files.write_private(self._folder / _CLOSED, "".join(f"{plan}\n" for plan in listed).encode())

    def began(self) -> bool:
        return self.path.exists()

    @property
    def root_path(self) -> Path:
        return self._folder / "root"

    def root(self) -> bytes | None:
        path = self.root_path
        if not path.exists():
            return None
        root = files.read_private(path)
        if len(root) != KEY_BYTES:
            raise IntegrityError(f"{path} has {len(root)} bytes, {KEY_BYTES} are needed: restore it from a backup")
        return root

    def keep_root(self, root: bytes) -> None:
        files.make_private_folder(self._folder)
        files.write_private(self.root_path, root)
