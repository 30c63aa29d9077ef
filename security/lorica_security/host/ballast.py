"""Room for a full disk: a file in each state folder that is given up when nothing else is left.

What is small and must be written takes its room: locks, keys, entries of an audit log, journals. So a start, the log
and `coordinator gc` work on a full disk. What is large does not ask for it, and is refused as before. It is made anew
when there is room for it twice.
"""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

NAME: Final = ".ballast"
BYTES: Final = 8 << 20
LEAST_BYTES: Final = 1 << 20
"""With less free space than this even what is small may not be written."""
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_MOST_ABOVE: Final = 6


def give_up_above(path: Path) -> bool:
    """Delete the ballast of the folder that `path` lies in, however deep; whether there was one."""
    for folder in list(path.absolute().parents)[:_MOST_ABOVE]:
        with suppress(OSError):
            (folder / NAME).unlink()
            return True
    return False


def with_room(path: Path, write: Callable[[], None]) -> None:
    """`write()`, which writes to `path`; once more in place of the ballast where the disk is full. Raises OSError."""
    try:
        write()
    except OSError as error:
        if error.errno not in FULL or not give_up_above(path):
            raise
        write()


def make_room(folder: Path) -> None:
    """Give up the ballast of `folder` where next to nothing is free: for what SQLite is about to write, which says too
    little of why it fails."""
    with suppress(OSError):
        if shutil.disk_usage(folder).free < LEAST_BYTES:
            (folder / NAME).unlink(missing_ok=True)


def keep(folder: Path) -> None:
    """Have the ballast in `folder` where there is room, and give it up where there is none. What cannot be done is
    left."""
    make_room(folder)
    file = folder / NAME
    with suppress(OSError):
        whole = file.exists() and file.stat().st_size >= BYTES  # else a kill cut off its making
        if not whole and shutil.disk_usage(folder).free >= 2 * BYTES:
            file.unlink(missing_ok=True)
            _make(file)


def _make(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, BYTES)
    except OSError:
        file.unlink()
        raise
    finally:
        os.close(descriptor)
