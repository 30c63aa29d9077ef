"""Whoever copies models holds them meanwhile: no model is deleted or written over under a reader's eyes.

A lock file beside the plans' folders: shared by readers, held alone by whoever lets models go. The kernel lets it go
with the process. A coordinator never waits for a reader: it keeps what it would have let go until after the next round,
or `coordinator gc`.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorica_security.errors import StorageError

_LOCK = "held.lock"


@contextmanager
def holding_models(folder: Path) -> Iterator[None]:
    """Every model below `folder`, that of all plans, stays as it is until the end of the block."""
    with _locked(folder, fcntl.LOCK_SH):
        yield


@contextmanager
def letting_models_go(folder: Path) -> Iterator[bool]:
    """Whether nobody holds them: then nobody does until the end of the block."""
    with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
        yield alone


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[bool]:
    path = folder / _LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
