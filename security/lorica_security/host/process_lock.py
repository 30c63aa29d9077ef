"""One process to a folder: a lock file held with flock, which the kernel lets go however the process ends.

The file names its holder, so that another command can find or signal it; a process id is believed only while the lock
is held and the process started when the file says.
"""

import fcntl
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

from lorica_security.errors import Conflict, StorageError
from lorica_security.host import ballast

PATIENCE_S: Final = 10.0
_LOOK_S = 0.05


class ProcessLock:
    """`with ProcessLock(path, "coordinator"):` holds it; raises Conflict naming the holder when another process does.

    A holder that calls itself `brief`, a command that looks and ends, is waited for, up to PATIENCE_S: a coordinator
    that starts while somebody asks for its status starts a moment later. Who is `patient` waits for whatever holder, as
    long as it takes.
    """

    def __init__(self, path: Path, purpose: str, *, brief: bool = False, patient: bool = False) -> None:
        self._path = path
        self._purpose = purpose
        self._brief = brief
        self._patient = patient
        self._stands_by = False
        self._descriptor: int | None = None

    @property
    def path(self) -> Path:
        return self._path

    def tell(self, *, stands_by: bool) -> None:
        """Let the file say whether its holder waits until it is to work; raises StorageError."""
        if self._descriptor is None or stands_by == self._stands_by:
            return
        self._stands_by = stands_by
        self._write(self._descriptor)

    def __enter__(self) -> Self:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be opened: {error.strerror}") from error
        try:
            self._take(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        try:
            self._write(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def _write(self, descriptor: int) -> None:
        try:
            ballast.with_room(self._path, lambda: self._name_holder(descriptor))
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}") from error

    def _take(self, descriptor: int) -> None:
        if self._patient:
            return fcntl.flock(descriptor, fcntl.LOCK_EX)
        last = time.monotonic() + PATIENCE_S
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                facts = _facts(self._path)
                pid = _holding(self._path, facts)
            # Nobody is named for a moment by who has just taken it.
            if time.monotonic() >= last or not (pid is None or facts.get("brief")):
                who = f" (process {pid})" if pid else ""
                raise Conflict(
                    f"another {self._purpose}{who} works on {self._path.parent}: stop it first, or use another folder"
                )
            time.sleep(_LOOK_S)

    def _name_holder(self, descriptor: int) -> None:
        process = psutil.Process()
        facts = {"pid": process.pid, "started": process.create_time(), "brief": self._brief}
        facts["stands_by"] = self._stands_by
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(facts).encode(), 0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def holder(path: Path) -> int | None:
    """The process that holds the lock at `path` now and is there to stay, or None.

    Read from the file and checked against the process table rather than by taking the lock, which could turn away a
    process that starts at this moment.
    """
    facts = _facts(path)
    return None if facts.get("brief") else _holding(path, facts)


def stands_by(path: Path) -> bool:
    """Whether that process waits until it is to work: it answers nobody."""
    return bool(_facts(path).get("stands_by")) and holder(path) is not None


def _holding(path: Path, facts: dict[str, Any]) -> int | None:
    """The process that `facts` name, if it holds the lock at `path`."""
    pid, started = facts.get("pid"), facts.get("started")
    if not isinstance(pid, int):
        return None
    try:
        if psutil.Process(pid).create_time() != started:
            return None
        real = path.resolve()
        held = any(Path(file.path) == real for file in psutil.Process(pid).open_files())
    except psutil.AccessDenied:
        return pid  # another user's process, started when the file says
    except psutil.Error:
        return None
    return pid if held else None


def _facts(path: Path) -> dict[str, Any]:
    """What its last holder wrote at `path`; empty where that cannot be read as such."""
    try:
        facts = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}
