"""The demo's child processes: each with a log file of its own, all stopped when the demo ends, however it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self, TypeVar

from lorica_security.errors import StateError

STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 15
Item = TypeVar("Item")
Done = TypeVar("Done")

_under_way: Final[set[subprocess.Popen[str]]] = set()
"""Commands that `run` waits for, in whatever thread: an interruption reaches the main one alone."""


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, with one arithmetic thread a process: the silos share the cores."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = [path for path in sys.path if path]
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths), **extra}


def begin(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """One command that may be killed; what it says is not kept."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def run(module: str, *arguments: str, log: Path | None = None, extra: Mapping[str, str] | None = None) -> str:
    """Run one command to its end and return what it printed; raises StateError with its last words when it fails."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=environment(**(extra or {})),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        _under_way.add(process)
        try:
            out, err = process.communicate()
        finally:
            process.kill()  # where this was interrupted
            _under_way.discard(process)
    if log is not None:
        with log.open("a") as file:
            file.write(f"$ {module} {' '.join(arguments)}\n{out}{err}")
    if process.returncode != 0:
        words = err.strip().splitlines() or out.strip().splitlines() or ["no output"]
        raise StateError(f"{module} {arguments[0]} failed with exit code {process.returncode}: {words[-1]}")
    return out


def in_parallel(work: Callable[[Item], Done], items: Iterable[Item]) -> list[Done]:
    """Two at a time. An interruption ends the commands that are under way, and no other begins."""
    with ThreadPoolExecutor(2) as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(_under_way):
                process.kill()
            raise


Child = tuple[str, subprocess.Popen[bytes], IO[bytes]]


class Processes:
    """Long-running children; leaving the context stops those still there, all at once, and then the one that they talk
    to.

    An agent whose coordinator is gone already would try for some seconds to tell it that it stops.
    """

    def __init__(self, logs: Path, *, last: str = "") -> None:
        """`last`: the name of the child that is stopped after the others."""
        self._logs = logs
        self._last = last
        self._running: list[Child] = []

    def start(self, name: str, module: str, arguments: Sequence[str], extra: Mapping[str, str] | None = None) -> None:
        log = (self._logs / f"{name}.log").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=environment(**(extra or {})),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches the demo alone, which then stops them in order
        )
        self._running.append((name, process, log))

    def command(self, module: str, *arguments: str, extra: Mapping[str, str] | None = None) -> str:
        """`run`, in whatever way these processes are started."""
        return run(module, *arguments, extra=extra)

    def pid(self, name: str) -> int:
        """Raises StateError when there is no such process."""
        return self._entry(name)[1].pid

    def check(self) -> None:
        """Raise StateError with the last lines of the log of a child that has ended."""
        for name, process, _ in self._running:
            code = process.poll()
            if code is not None:
                lines = (self._logs / f"{name}.log").read_text(errors="replace").splitlines()
                tail = "\n".join(lines[-LOG_TAIL_LINES:])
                raise StateError(f"{name} ended with exit code {code}; the end of {self._logs / name}.log:\n{tail}")

    def stop(self, name: str) -> None:
        """SIGTERM, and SIGKILL for one that does not end in time; raises StateError when there is no such process."""
        entry = self._entry(name)
        _stop([entry])
        self._running.remove(entry)

    def ended(self, name: str) -> int | None:
        """The exit code of a child that has ended, which is then forgotten and may be started again; None while it
        runs."""
        entry = self._entry(name)
        code = entry[1].poll()
        if code is not None:
            _stop([entry])
            self._running.remove(entry)
        return code

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for its end; raises StateError when there is no such process."""
        entry = self._entry(name)
        entry[1].kill()
        _stop([entry])
        self._running.remove(entry)

    def _entry(self, name: str) -> Child:
        for entry in self._running:
            if entry[0] == name:
                return entry
        raise StateError(f"no process {name} was started")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        last = [child for child in self._running if child[0] == self._last]
        _stop([child for child in self._running if child not in last], last)
        self._running.clear()


def _stop(*groups: Sequence[Child]) -> None:
    """SIGTERM to all of a group, one group after the other.

    SIGKILL for those that do not end in time, and for all at once when somebody presses Ctrl-C again meanwhile.
    """
    latest = time.monotonic() + STOP_TIMEOUT_S
    try:
        for children in groups:
            for _, process, _ in children:
                process.send_signal(signal.SIGTERM)  # nothing where it has ended
            for _, process, _ in children:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, latest - time.monotonic()))
    finally:
        _kill(list(chain.from_iterable(groups)))


def _kill(children: Sequence[Child]) -> None:
    """However often somebody presses Ctrl-C meanwhile."""
    while True:
        with suppress(KeyboardInterrupt):
            for _, process, log in children:
                process.kill()
                process.wait()
                log.close()
            return
