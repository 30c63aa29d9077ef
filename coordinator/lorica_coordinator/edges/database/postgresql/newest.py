"""What several coordinators know outside the database of the rows that were added last: a database of an earlier
instant lacks them.

Of the ledger also the plans that it has sums of, an empty file each that stays: an earlier ledger has not all of them.

A file is named NUMBER-DIGEST, by the line that it has, so none is ever written over, and one goes only after a later
one is there. So a leader that was overtaken between its row and its file, however late it goes on, adds an earlier line
and takes no later one away.
"""

import re
from pathlib import Path
from typing import Final

from lorica_coordinator.vectors.key_place import require_marked
from lorica_security.errors import ConfigurationError, StorageError
from lorica_security.host import files

_NAME: Final = re.compile(r"([1-9][0-9]{0,17})-[0-9a-f]{64}")
_MARK: Final = "plan-"
_MARKED: Final = re.compile(rf"{_MARK}[0-9a-f]{{64}}")


class SharedNewest:
    """Of one chain of rows. Raises StorageError, ConfigurationError naming the file."""

    def __init__(self, folder: Path, mount: Path) -> None:
        """`mount`: the folder above `folder` that a leader has marked (vectors/key_place.py); it is never made."""
        self._folder, self._mount = folder, mount

    def prepare(self) -> None:
        """Before a row is added that is to be known: its file will have its folder."""
        require_marked(self._folder)
        files.make_private_folder(self._folder, below=self._mount)

    def keep(self, sequence: int, digest: str, line: bytes) -> None:
        """Durable when this returns; the row is there. `line` as files have it."""
        self.prepare()
        files.write_private(self._folder / f"{sequence}-{digest}", line)
        for number, path in self._found():
            if number < sequence:
                _delete(path)

    def known(self) -> list[tuple[Path, bytes]]:
        """Each file with its line, as it is: rows have to have all of them."""
        while True:
            read: list[tuple[Path, bytes]] = []
            found = [path for _, path in self._found()]
            for path in found:
                try:
                    read.append((path, files.read_private(path)))
                except ConfigurationError:
                    if files.is_there(path):
                        raise
            if len(read) == len(found):
                return read
            # One went meanwhile, so a later one came, which may not have been listed.

    def mark(self, name: str) -> None:
        """Durable when this returns: `marks` has `name`, a digest, from then on, whatever becomes of the rows."""
        path = self._folder / f"{_MARK}{name}"
        if not files.is_there(path):
            self.prepare()
            files.mark(path)

    def marks(self) -> frozenset[str]:
        return frozenset(path.name.removeprefix(_MARK) for path in self._listed() if _MARKED.fullmatch(path.name))

    def forget(self) -> None:
        """The rows were settled as they are. Marks stay."""
        for _, path in self._found():
            _delete(path)

    def _found(self) -> list[tuple[int, Path]]:
        matches = [(_NAME.fullmatch(path.name), path) for path in self._listed()]
        return [(int(match[1]), path) for match, path in matches if match is not None]

    def _listed(self) -> list[Path]:
        require_marked(self._folder)
        try:
            return sorted(self._folder.iterdir()) if self._folder.exists() else []
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be read: {error.strerror or error}") from error


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path} cannot be deleted: {error.strerror or error}") from error
