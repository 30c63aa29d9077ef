"""Large files that are needed no more, kept to be written over.

A file that exists has its place on the disk and its pages in memory: writing over it takes half the time that a new one
takes, and deleting it none. What a spare holds is of no account: whoever takes one writes all of it, or checks it.
"""

import secrets
from pathlib import Path

_SUFFIX = ".spare"


class SpareFiles:
    """The spares in `folder`, which is made when the first one comes. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, path: Path) -> None:
        """Take a file away from where it is."""
        self._folder.mkdir(exist_ok=True)
        path.rename(self._folder / f"{secrets.token_hex(8)}{_SUFFIX}")

    def take(self, path: Path, size: int) -> bool:
        """Put a spare of `size` bytes at `path`, if there is one."""
        for spare in self._spares():
            if spare.stat().st_size == size:
                spare.rename(path)
                return True
        return False

    def trim(self, count: int) -> None:
        """Delete spares until at most `count` are left."""
        for spare in self._spares()[count:]:
            spare.unlink()

    def _spares(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_SUFFIX}"))
