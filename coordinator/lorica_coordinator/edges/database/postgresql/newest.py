"""What is known outside the database of the rows that were added last: a database of an earlier instant lacks them.

    own      a file of the coordinator's own folder: the line that was added last from here
    shared   NUMBER-DIGEST in a folder that several coordinators see: the line that was added last from any of them

A file of `shared` has the line in its name, so none is ever written over, and one goes only after a later one is there.
So a leader that was overtaken between its row and its file, however late it goes on, adds an earlier line and takes no
later one away.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lorica_coordinator.vectors.key_place import require_marked
from lorica_security.errors import ConfigurationError, StorageError
from lorica_security.host import files

_NAME: Final = re.compile(r"([1-9][0-9]{0,17})-[0-9a-f]{64}")


class Newest:
    """Of one chain of rows. Raises StorageError, ConfigurationError naming the file."""

    def __init__(self, own: Path, shared: Path | None = None, mount: Path | None = None) -> None:
        """`mount`: the folder above `shared` that a leader has marked (vectors/key_place.py); it is never made."""
        self.own, self.shared, self._mount = own, shared, mount

    def prepare(self) -> None:
        """Before a row is added that is to be known: its file will have its folder."""
        files.make_private_folder(self.own.parent)
        if self.shared is not None:
            require_marked(self.shared)
            files.make_private_folder(self.shared, below=self._mount)

    def keep(self, sequence: int, digest: str, line: bytes) -> None:
        """Durable when this returns; the row is there. `line` as files have it."""
        files.write_private(self.own, line)
        if self.shared is None:
            return
        files.write_private(self.shared / f"{sequence}-{digest}", line)
        for number, path in self._found(self.shared):
            if number < sequence:
                _delete(path)

    def known(self) -> Iterator[tuple[Path, bytes]]:
        """Each file with its line, as it is: rows have to have all of them."""
        if self.own.exists():
            yield self.own, files.read_private(self.own)
        if self.shared is not None:
            yield from self._read(self.shared)

    def forget(self) -> None:
        """The rows were settled as they are."""
        _delete(self.own)
        if self.shared is not None:
            for _, path in self._found(self.shared):
                _delete(path)

    def _read(self, shared: Path) -> list[tuple[Path, bytes]]:
        while True:
            read: list[tuple[Path, bytes]] = []
            found = [path for _, path in self._found(shared)]
            for path in found:
                try:
                    read.append((path, files.read_private(path)))
                except ConfigurationError:
                    if files.is_there(path):
                        raise
            if len(read) == len(found):
                return read
            # One went meanwhile, so a later one came, which may not have been listed.

    def _found(self, shared: Path) -> list[tuple[int, Path]]:
        require_marked(shared)
        try:
            listed = sorted(shared.iterdir()) if shared.exists() else []
        except OSError as error:
            raise StorageError(f"{shared} cannot be read: {error.strerror or error}") from error
        matches = [(_NAME.fullmatch(path.name), path) for path in listed]
        return [(int(match[1]), path) for match, path in matches if match is not None]


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path} cannot be deleted: {error.strerror or error}") from error
