"""One process to a folder: a lock file held with flock, which the kernel lets go however the process ends.

The file names its holder, so that another command can find or signal it; a process id is believed only while the lock
is held and the process started when the file says.
"""

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from lorica_security.errors import Conflict, StorageError
from lorica_security.host import ballast


class ProcessLock:
    """`with ProcessLock(path, "coordinator"):` holds it; raises Conflict naming the holder when another process
    does."""

    def __init__(self, path: Path, purpose: str) -> None:
        self._path = path
        self._purpose = purpose
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            pid = holder(self._path)
            who = f" (process {pid})" if pid else ""
            raise Conflict(
                f"another {self._purpose}{who} works on {self._path.parent}: stop it first, or use another folder"
            ) from None
        try:
            ballast.with_room(self._path, lambda: _name_holder(descriptor))
        except OSError as error:
            os.close(descriptor)
            raise StorageError(f"{self._path} cannot be written: {error.strerror}") from error
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _name_holder(descriptor: int) -> None:
    process = psutil.Process()
    content = json.dumps({"pid": process.pid, "started": process.create_time()}).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


def holder(path: Path) -> int | None:
    """The process that holds the lock at `path` now, or None.

    Read from the file and checked against the process table rather than by taking the lock, which could turn away a
    process that starts at this moment.
    """
    try:
        facts = json.loads(path.read_bytes())
        pid, started = facts["pid"], facts["started"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        return None
    try:
        if psutil.Process(pid).create_time() != started:
            return None
        real = path.resolve()
        held = any(Path(file.path) == real for file in psutil.Process(pid).open_files())
    except psutil.AccessDenied:
        return int(pid)  # another user's process, started when the file says
    except psutil.Error:
        return None
    return int(pid) if held else None
