"""The coordinator's folder (settings, keys, lock; its state is where the settings say), and which one a command means.

A command works on `--dir`, else $LORICA_COORDINATOR_DIR, else the current folder if it holds a federation.toml, else
the folder that `coordinator init` or `coordinator access accept` made last for this user.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_config_path

from lorica_coordinator.settings import SETTINGS_FILE
from lorica_security.errors import ConfigurationError, StorageError
from lorica_security.host import files

ENVIRONMENT_VARIABLE = "LORICA_COORDINATOR_DIR"


@dataclass(frozen=True, slots=True)
class CoordinatorFolder:
    root: Path

    @property
    def settings(self) -> Path:
        return self.root / SETTINGS_FILE

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def identity_key(self) -> Path:
        """What the coordinator signs with: models, trust bundles, its audit log."""
        return self.keys / "identity.key"

    @property
    def operator_pair(self) -> Path:
        """What the operator's commands on this host present; `coordinator init` makes it."""
        return self.keys / "operator-pair.pem"

    @property
    def begun(self) -> Path:
        """There while `coordinator init` makes the keys, before federation.toml is there."""
        return self.root / ".init"

    @property
    def audit(self) -> Path:
        return self.root / "audit"

    @property
    def lock(self) -> Path:
        return self.root / "coordinator.lock"

    def require(self) -> None:
        if not self.settings.is_file():
            raise ConfigurationError(
                f"{self.root} holds no {SETTINGS_FILE}: run `coordinator init DIR`, or name its folder with --dir"
            )


def undo_init(folder: CoordinatorFolder) -> None:
    """Erase the keys of a `coordinator init` that a kill cut off before federation.toml: nobody was told of them.
    Raises StorageError.

    Not where there is more: what federation.toml was lost from since has keys that silos know.
    """
    if not folder.begun.exists() or folder.settings.exists():
        return
    made = {folder.begun, folder.keys}
    if any(path not in made and not files.is_temporary(path) for path in folder.root.iterdir()):
        return
    if folder.keys.is_dir():
        for path in folder.keys.iterdir():
            files.erase(path)
        folder.keys.rmdir()
    for path in filter(files.is_temporary, folder.root.iterdir()):
        files.erase(path)
    folder.begun.unlink()


def chosen_folder(given: Path | None) -> Path:
    """The folder that a command means, which may not be one; raises ConfigurationError when none is known."""
    if given is not None:
        chosen = given
    elif named := os.environ.get(ENVIRONMENT_VARIABLE):
        chosen = Path(named)
    elif (Path.cwd() / SETTINGS_FILE).is_file():
        chosen = Path.cwd()
    else:
        try:
            chosen = Path(_pointer().read_text().strip())
        except OSError as error:
            raise ConfigurationError(
                "no federation is known here: run `coordinator init DIR`, or name its folder with --dir"
            ) from error
    return chosen.absolute()


def remember(folder: Path) -> None:
    """Make `folder` the one that this user's commands mean when they name none."""
    pointer = _pointer()
    try:
        pointer.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{pointer.parent} cannot be created: {error.strerror}") from error
    files.replace(pointer, f"{folder}\n".encode())


def _pointer() -> Path:
    return user_config_path("lorica") / "coordinator"
