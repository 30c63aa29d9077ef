"""The demo's child processes: each with a log file of its own, all stopped when the demo ends, however it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from security.errors import StateError

STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 15


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, with one arithmetic thread a process: the silos share the cores."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = [path for path in sys.path if path]
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths), **extra}


def run(module: str, *arguments: str, log: Path | None = None, extra: Mapping[str, str] | None = None) -> str:
    """Run one command to its end and return what it printed; raises StateError with its last words when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment(**(extra or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if log is not None:
        with log.open("a") as file:
            file.write(f"$ {module} {' '.join(arguments)}\n{done.stdout}{done.stderr}")
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["no output"]
        raise StateError(f"{module} {arguments[0]} failed with exit code {done.returncode}: {words[-1]}")
    return done.stdout


class Processes:
    """Long-running children; leaving the context stops those still there, in reverse order."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: list[tuple[str, subprocess.Popen[bytes], IO[bytes]]] = []

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
        self._stop(entry)
        self._running.remove(entry)

    def ended(self, name: str) -> int | None:
        """The exit code of a child that has ended, which is then forgotten and may be started again; None while it runs."""
        entry = self._entry(name)
        code = entry[1].poll()
        if code is not None:
            self._stop(entry)
            self._running.remove(entry)
        return code

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for its end; raises StateError when there is no such process."""
        entry = self._entry(name)
        entry[1].kill()
        self._stop(entry)
        self._running.remove(entry)

    def _entry(self, name: str) -> tuple[str, subprocess.Popen[bytes], IO[bytes]]:
        for entry in self._running:
            if entry[0] == name:
                return entry
        raise StateError(f"no process {name} was started")

    def _stop(self, entry: tuple[str, subprocess.Popen[bytes], IO[bytes]]) -> None:
        _, process, log = entry
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for entry in reversed(self._running):
            self._stop(entry)
        self._running.clear()
