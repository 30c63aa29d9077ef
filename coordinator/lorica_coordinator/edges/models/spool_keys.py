"""Where the keys of updates on their way in lie: beside these, or in a folder that copies of these never come to.

    <plan>/<round>-<attempt>/<silo>.key                  beside them
    <plan>/<round>-<attempt>/<silo>.<term>.<random>.key  in a folder of their own, which several coordinators see: the
                                                         record of the update names its key

A leader that was overtaken and goes on there makes keys under names of its own, and destroys none of a later term.
"""

import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lorica_coordinator.vectors.key_place import require_marked
from lorica_coordinator.vectors.spool_key import SUFFIX, destroy_key, destroy_keys_below
from lorica_security.host import files

BESIDE: Final = ""
"""The name of a key that lies beside its update."""
_NAME: Final = re.compile(r"([0-9]{1,15})\.[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class SpoolKeys:
    """Of the updates in `spools`; `folder` and `term` where they do not lie beside these. The folder that `folder` is
    in is made where it is missing, unless it is not the coordinator's `own`: then a leader has marked it, and the
    empty folder of a mount that is not there is no place for keys."""

    spools: Path
    folder: Path | None = None
    term: int = 0
    own: bool = True

    def fresh(self) -> str:
        """The name of a key that is about to be made."""
        return BESIDE if self.folder is None else f"{self.term}.{secrets.token_hex(8)}"

    def path(self, stem: Path, name: str) -> Path | None:
        """`stem`: an update's path without suffix. None for a name that no key here has."""
        if self.folder is None:
            return stem.with_name(f"{stem.name}{SUFFIX}") if name == BESIDE else None
        if _NAME.fullmatch(name) is None:
            return None
        inside = self.folder / stem.parent.relative_to(self.spools)
        return inside / f"{stem.name}.{name}{SUFFIX}"

    def provide(self, folder: Path) -> None:
        """Make the folder for keys of the updates in `folder`. Raises OSError, ConfigurationError, StorageError."""
        if self.folder is not None:
            if self.own:
                files.make_private_folder(self.folder.parent)
            else:
                require_marked(self.folder.parent)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            (self.folder / folder.relative_to(self.spools)).mkdir(mode=0o700, parents=True, exist_ok=True)

    def destroy(self, stem: Path, name: str) -> None:
        """The key of this name, unless it is of a later term. Raises OSError."""
        path = self.path(stem, name)
        if path is not None and self._is_ours(path):
            destroy_key(path)

    def destroy_below(self, folder: Path) -> None:
        """All keys of updates in `folder` and below, those of later terms apart. Raises OSError."""
        destroy_keys_below(folder)
        if self.folder is None:
            return
        inside = self.folder / folder.relative_to(self.spools)
        for path in sorted(inside.rglob(f"*{SUFFIX}")):
            if self._is_ours(path):
                destroy_key(path)
        for empty in sorted((inside, *inside.rglob("*")), reverse=True):
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()

    def names(self) -> set[str]:
        """Of the folders of plans that have keys."""
        folder = self.spools if self.folder is None else self.folder
        return {path.name for path in folder.iterdir()} if folder.is_dir() else set()

    def _is_ours(self, path: Path) -> bool:
        if self.folder is None:
            return True
        match = _NAME.fullmatch(path.name.removesuffix(SUFFIX).partition(".")[2])
        return match is None or int(match[1]) <= self.term
