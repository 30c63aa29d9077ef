"""A peer's processes: each in a process group of its own, with a log of its own, and none left behind.

A peer starts further processes, some of them in sessions of their own, so stopping goes by the whole tree and by every
process group in it.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from lorica.bench.processes import trees
from lorica_security.errors import StateError

STOP_TIMEOUT_S = 10.0
LISTEN_TIMEOUT_S = 120.0
POLL_S = 0.05
LOG_TAIL_LINES = 30
_LISTENING = "0A"
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PIP_CONFIG_FILE", "PIP_INDEX_URL", "SSL_CERT_FILE")


def environment(venv: Path, **extra: str) -> dict[str, str]:
    """Of a process in a peer's virtual environment: nothing of this one's Python paths and settings reaches it."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    path = f"{venv / 'bin'}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "VIRTUAL_ENV": str(venv), "PYTHONUNBUFFERED": "1", **extra}


def run(command: Sequence[str | Path], *, env: Mapping[str, str], folder: Path | None = None) -> str:
    """Run one command to its end and return what it printed; raises StateError with its last words when it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        env=dict(env),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        words = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LOG_TAIL_LINES:])
        raise StateError(f"{Path(command[0]).name} {command[1]} failed with exit code {done.returncode}:\n{words}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class _Started:
    name: str
    process: subprocess.Popen[bytes]
    log: Path


class Deployment:
    """Long-running processes; leaving the context ends them and all that they started, on Ctrl-C and SIGTERM too."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started: list[_Started] = []
        self._sigterm: Any = None

    def start(self, name: str, command: Sequence[str | Path], *, env: Mapping[str, str], folder: Path) -> int:
        """The process id of a new process group's leader."""
        log = self._logs / f"{name}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                [str(word) for word in command],
                env=dict(env),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C reaches the benchmark alone, which then ends them
            )
        self._started.append(_Started(name, process, log))
        return process.pid

    def check(self) -> None:
        """Raise StateError with the last lines of the log of a process that has ended."""
        for one in self._started:
            if (code := one.process.poll()) is not None:
                raise StateError(f"{one.name} ended with exit code {code}; the end of its log:\n{_tail(one.log)}")

    def last_words(self) -> str:
        return "\n".join(f"--- {one.name}\n{_tail(one.log)}" for one in self._started)

    def wait_until_listening(self, pid: int, port: int) -> None:
        """Raise StateError when the process ends first, or does not listen within LISTEN_TIMEOUT_S."""
        deadline = time.monotonic() + LISTEN_TIMEOUT_S
        while not _listens(pid, port):
            self.check()
            if time.monotonic() > deadline:
                raise StateError(f"nothing listens on port {port} after {LISTEN_TIMEOUT_S:.0f} s\n{self.last_words()}")
            time.sleep(POLL_S)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._sigterm = signal.signal(signal.SIGTERM, _leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        members = self._members()
        _signal(members, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while (members := members | self._members()) and time.monotonic() < deadline:
            for one in self._started:
                one.process.poll()
            members = {pid: started for pid, started in members.items() if start_time(pid) == started}
            time.sleep(POLL_S)
        _signal(members, signal.SIGKILL)
        for one in self._started:
            one.process.wait()
        self._started.clear()
        if self._sigterm is not None:
            signal.signal(signal.SIGTERM, self._sigterm)

    def _members(self) -> dict[int, str]:
        """Every process of the trees, with its start time, by which a reused id is told apart."""
        (found,) = trees([[one.process.pid for one in self._started]])
        return {pid: start for pid in found if (start := start_time(pid))}


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _signal(members: Mapping[int, str], number: signal.Signals) -> None:
    own = os.getpgrp()
    for pid, started in members.items():
        try:
            if start_time(pid) != started:
                continue
            if (group := os.getpgid(pid)) != own:
                os.killpg(group, number)
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def start_time(pid: int) -> str:
    """In ticks since the machine started, by which a process that has its number later is told apart; empty once the
    process is gone or waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _listens(pid: int, port: int) -> bool:
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for local, state in ((line.split()[1], line.split()[3]) for line in lines):
            if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                return True
    return False


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
