"""`--out` of a simulation."""

import os
from pathlib import Path

from lorica_security.errors import StorageError


def make_folder(out: Path) -> None:
    """Make it, unless it is there; raises StorageError where nothing can be written into it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{out} cannot be made: {error.strerror or error}; choose another --out") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise StorageError(f"{out} cannot be written: choose another --out")
