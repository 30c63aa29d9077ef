"""Files of the state folder that are to outlast it, where a coordinator elsewhere goes on with what they hold.

The folder is where everything is written and read. Whoever writes such a file says so, before anything relies on it.
"""

from pathlib import Path
from typing import Final, Protocol


class KeptFiles(Protocol):
    """Where copies of the folder's files are kept. All raise StorageError with the remedy. May be called from several
    threads, for one file from one at a time."""

    def keep(self, *paths: Path) -> None:
        """From here on what these files hold outlasts the folder; in this order, and the same again costs nothing."""

    def forget(self, *paths: Path) -> None:
        """Needed no more: these files, and all files below those that are folders. They may be gone from the folder."""

    def below(self, folder: Path) -> frozenset[Path]:
        """The files below `folder` that are kept."""


class InTheFolderAlone:
    """Nothing outlasts the folder. Implements `KeptFiles`."""

    def keep(self, *paths: Path) -> None:
        pass

    def forget(self, *paths: Path) -> None:
        pass

    def below(self, folder: Path) -> frozenset[Path]:
        return frozenset()


FOLDER_ALONE: Final = InTheFolderAlone()
