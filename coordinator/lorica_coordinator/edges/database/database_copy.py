"""A copy of a SQLite database that is in use: as it is at one instant, in one file of mode 0600, durable."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from lorica_security.errors import StorageError
from lorica_security.host import files

_WAIT_S = 30.0


def copy_database(source: Path, target: Path) -> None:
    """Raises StorageError naming the file; `target`, which must not be there, is whole or not there."""
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, files.PRIVATE_FILE_MODE))
        if target.exists():
            raise FileExistsError(None, "it is there already")
        with closing(sqlite3.connect(source, timeout=_WAIT_S)) as database:
            database.execute("VACUUM INTO ?", (str(temporary),))
        descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
        files.sync_folder(target.parent)
    except (OSError, sqlite3.Error) as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(
            f"{source} cannot be copied to {target}: {getattr(error, 'strerror', None) or error}"
        ) from error
