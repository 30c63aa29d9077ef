"""What goes into a backup of a coordinator's folder, while the coordinator runs or not.

    as it is        federation.toml, keys, plans and their kept copies, models with the server optimizer's state
    a copy          the database, at one instant; with the plan stopped, without updates, masks and open invitations
    then            the audit log and the ledger of releases: what is in the database is in these, which are written
                    first
    never           updates on their way in and their keys, exports, locks, files to be written over

Models are held meanwhile, so that those which the copy of the database names are there. Keys and database are of one
instant: keys are read before and after, and once more where they changed.
"""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lorica_coordinator.edges.database.database_copy import copy_database
from lorica_coordinator.edges.database.open_store import require_sqlite
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.database.round_tables import TABLES_REVISION
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.models.held_models import holding_models
from lorica_coordinator.edges.models.model_store import BASE, EVIDENCE, INITIAL, MODEL
from lorica_coordinator.edges.upkeep.backup_file import About, BackupWriter, may_hold, new_backup
from lorica_coordinator.rounds.without_updates import without_updates
from lorica_coordinator.settings import SETTINGS_FILE, Settings
from lorica_security.errors import ConfigurationError, Conflict, StorageError
from lorica_security.host import files
from lorica_security.host.key_file import Passphrase
from lorica_security.identifiers import FederationName, federation_name
from lorica_security.on_disk.log_file import segments

WORK_PREFIX = ".backup-"
"""Of folders in the state folder that a backup under way has; a crash leaves one, `coordinator gc` deletes it."""
_TRIES = 5


@dataclass(frozen=True, slots=True)
class BackedUp:
    """`left_out`: files below plans/ with names that a backup has no room for."""

    files: int
    bytes: int
    left_out: tuple[str, ...]


def back_up(
    folder: CoordinatorFolder, target: Path, passphrase: Passphrase | None, *, now: float, release: str
) -> BackedUp:
    """Write the folder to the new file `target`; None: in clear. `now` in Unix seconds.

    Raises ConfigurationError, StorageError naming the file, Conflict where keys change all the time.
    """
    settings = Settings.read(folder.settings)
    require_sqlite(settings, "backup")
    federation, state = federation_name(settings.federation), settings.state_folder
    about = About(federation=federation, made_at=now, release=release, revision=TABLES_REVISION)
    if target.absolute().is_relative_to(state.absolute()):
        raise ConfigurationError(f"{target} lies in the state that it would be a backup of: choose another place")
    with holding_models(state / "models"), _work_folder(state) as work, new_backup(target, passphrase, about) as backup:
        copied = work / "state.sqlite"
        for _ in range(_TRIES):
            keys = _keys(folder)
            copied.unlink(missing_ok=True)
            copy_database(state / "state.sqlite", copied)
            if keys == _keys(folder):
                break
        else:
            raise Conflict(f"the keys in {folder.keys} change all the time: try again")
        leave_out_what_is_under_way(copied, federation, now)
        backup.add(SETTINGS_FILE, _read(folder.settings))
        for name, content in keys.items():
            backup.add(name, content)
        _add_file(backup, "state/state.sqlite", copied)
        left_out = _add_below(backup, "state/plans", state / "plans") + _add_below(
            backup, "state/bundles", state / "bundles"
        )
        for plan in sorted((state / "models").iterdir()):
            if plan.is_dir():
                _add_models(backup, f"state/models/{plan.name}", plan)
        _add_below(backup, "state/privacy", state / "privacy")
        for segment in segments(folder.audit):
            backup.add(f"audit/{segment.name}", _read(segment))
    return BackedUp(backup.count, backup.bytes, tuple(left_out))


def _keys(folder: CoordinatorFolder) -> dict[str, bytes]:
    return {f"keys/{path.name}": _read(path) for path in sorted(folder.keys.iterdir()) if may_hold(f"keys/{path.name}")}


def leave_out_what_is_under_way(database: Path, federation: FederationName, now: float) -> None:
    """Of a copy: nothing that a silo revealed or sent for the attempt under way, no token that still opens a door."""
    store = SqlRoundStore(database, federation)
    try:
        state, records = without_updates(store.load(), 0.0)
        store.transition(state, records, at=now, now=0.0)
        store.void_invitations(pins=())
    finally:
        store.close()
    try:
        with closing(sqlite3.connect(database)) as opened:
            opened.execute("PRAGMA secure_delete = ON")
            opened.execute("VACUUM")
    except sqlite3.Error as error:
        raise StorageError(f"{database} cannot be written: {error}") from error


def _add_models(backup: BackupWriter, name: str, folder: Path) -> None:
    """Of one plan. A model is whole when its parameters are there; what is being made has other names."""
    for path in sorted(folder.glob(f"*{MODEL}")):
        model = path.name.removesuffix(MODEL)
        _add_file(backup, f"{name}/{path.name}", path)
        _add_file(backup, f"{name}/{model}.manifest.json", folder / f"{model}.manifest.json")
        _add_below(backup, f"{name}/{model}.optimizer", folder / f"{model}.optimizer")
    if (folder / INITIAL).exists():
        _add_file(backup, f"{name}/{INITIAL}", folder / INITIAL)
    if (folder / EVIDENCE).is_dir():
        _add_below(backup, f"{name}/{EVIDENCE}", folder / EVIDENCE)
    if (folder / BASE).is_dir():
        _add_models(backup, f"{name}/{BASE}", folder / BASE)


def _add_below(backup: BackupWriter, name: str, folder: Path) -> list[str]:
    """Every file below `folder` but hidden ones; those whose names do not fit."""
    left_out = []
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        relative = path.relative_to(folder)
        if path.is_symlink() or not path.is_file() or any(part.startswith(".") for part in relative.parts):
            continue
        if may_hold(full := f"{name}/{relative}"):
            _add_file(backup, full, path)
        else:
            left_out.append(full)
    return left_out


def _add_file(backup: BackupWriter, name: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            backup.add_from(name, file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise StorageError(f"{path} cannot be copied: {error.strerror or error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def _work_folder(state: Path) -> Iterator[Path]:
    """For the copy of the database, which is overwritten before it is deleted: it held what the copy may not."""
    work = Path(tempfile.mkdtemp(dir=state, prefix=WORK_PREFIX))
    try:
        yield work
    finally:
        for path in work.iterdir():
            files.erase(path)
        shutil.rmtree(work, ignore_errors=True)
