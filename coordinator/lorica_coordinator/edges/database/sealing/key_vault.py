"""Keys of masked attempts in files of a folder, one to a file: never where the database is."""

import secrets
from pathlib import Path
from typing import Final

import structlog

from lorica_coordinator.edges.database.sealing.attempt_keys import KEY_BYTES, RANDOM_BYTES, AttemptKey
from lorica_coordinator.vectors.key_place import require_marked
from lorica_security.errors import ConfigurationError, StorageError
from lorica_security.host import files

_log = structlog.get_logger(__name__)

FOLDER: Final = "attempt-keys"
_SUFFIX: Final = ".key"


class FolderKeyVault:
    """Implements `attempt_keys.KeyVault`. A key is written before the row that is sealed under it, and overwritten
    before its file goes.
    """

    def __init__(self, folder: Path, term: int, *, own: bool = True) -> None:
        """`own`: the folder is made where it is missing. One that several coordinators see has to be there, with a
        leader's mark: the empty folder of a mount that is not there is no place for keys."""
        self._folder, self._term, self._own = folder, term, own

    def make(self) -> tuple[AttemptKey, bytes]:
        self._require_folder()
        key, secret = AttemptKey(self._term, secrets.token_hex(RANDOM_BYTES)), secrets.token_bytes(KEY_BYTES)
        files.write_private(self._path(key), secret)
        return key, secret

    def read(self, key: AttemptKey) -> bytes | None:
        path = self._path(key)
        if not files.is_there(path):
            self._require_mounted()
            return None
        try:
            secret = files.read_private(path)
        except ConfigurationError as error:
            if not files.is_there(path):
                return None
            raise StorageError(f"the key of a masked attempt is not private: {error}") from error
        return secret if len(secret) == KEY_BYTES and any(secret) else None

    def destroy(self, key: AttemptKey) -> None:
        files.erase(self._path(key))

    def destroy_earlier(self, kept: AttemptKey | None) -> None:
        files.sweep(self._folder)
        for path, key in self._found():
            # A name that is none of this release was given before keys had terms.
            if key is None or (key.term < self._term and key != kept):
                files.erase(path)

    def newest_term(self) -> int:
        """The highest term that left a key here; 0 without one. A database that was brought back of an earlier instant
        begins after it: keys of terms that it has forgotten are earlier ones then, and are destroyed."""
        self._require_mounted()
        return max((key.term for _, key in self._found() if key is not None), default=0)

    def leave(self) -> None:
        """Destroy every key: nobody comes back to this place."""
        found = self._found()
        for path, _ in found:
            files.erase(path)
        if found:
            _log.warning("keys of masked attempts were destroyed: no database uses them", folder=str(self._folder))

    def _found(self) -> list[tuple[Path, AttemptKey | None]]:
        try:
            paths = sorted(self._folder.glob(f"*{_SUFFIX}"))
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be read: {error.strerror or error}") from error
        return [(path, _key_of(path)) for path in paths]

    def _require_folder(self) -> None:
        self._require_mounted()
        files.make_private_folder(self._folder)

    def _require_mounted(self) -> None:
        if not self._own:
            require_marked(self._folder)

    def _path(self, key: AttemptKey) -> Path:
        return self._folder / f"{key.text}{_SUFFIX}"


def _key_of(path: Path) -> AttemptKey | None:
    try:
        return AttemptKey.parse(path.stem, str(path))
    except StorageError:
        return None
