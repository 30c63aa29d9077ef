"""Keys of masked attempts in files of the coordinator's folder, one to a file: never where the database is."""

import secrets
from pathlib import Path
from typing import Final

from lorica_coordinator.edges.database.sealing.attempt_seal import KEY_BYTES, AttemptName
from lorica_security.errors import ConfigurationError, StorageError
from lorica_security.host import files

FOLDER: Final = "attempt-keys"
_SUFFIX: Final = ".key"


class FolderKeyVault:
    """Implements `attempt_seal.KeyVault`. A key is written before the row that is sealed under it, and overwritten
    before its file goes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, name: AttemptName) -> bytes:
        files.make_private_folder(self._folder)
        path = self._path(name)
        files.erase(path)
        key = secrets.token_bytes(KEY_BYTES)
        files.write_private(path, key)
        return key

    def read(self, name: AttemptName) -> bytes | None:
        path = self._path(name)
        if not files.is_there(path):
            return None
        try:
            key = files.read_private(path)
        except ConfigurationError as error:
            if not files.is_there(path):
                return None
            raise StorageError(f"the key of a masked attempt is not private: {error}") from error
        return key if len(key) == KEY_BYTES and any(key) else None

    def keep_only(self, name: AttemptName | None) -> None:
        kept = None if name is None else self._path(name)
        try:
            found = sorted(self._folder.glob(f"*{_SUFFIX}"))
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be read: {error.strerror or error}") from error
        for path in found:
            if path != kept:
                files.erase(path)

    def _path(self, name: AttemptName) -> Path:
        return self._folder / f"{name.plan}-{name.round}-{name.attempt}{_SUFFIX}"
