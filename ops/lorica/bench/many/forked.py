"""Processes as lorica.demo.processes starts them, but that torch and transformers are imported already: each start
saves seconds, and all of them share the memory of what was imported.

They are forked from one process (multiprocessing's forkserver) that has imported what takes long and done nothing else:
no thread, connection or file is there before the fork. What runs afterwards is the module that was asked for, as
`python -m`.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from lorica.demo.processes import Processes, environment
from lorica_security.errors import StateError

_HEAVY = ["silo_agent.training.silo_trainer", "lorica_coordinator.edges.sums.aggregator"]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(_HEAVY)
_TURN = threading.Lock()  # multiprocessing counts its children without one

COMMAND_S = 300.0


class ForkedProcesses(Processes):
    def start(self, name: str, module: str, arguments: Sequence[str], extra: Mapping[str, str] | None = None) -> None:
        path = self._logs / f"{name}.log"
        wanted = environment(**(extra or {}))
        process = _CONTEXT.Process(target=_run, args=(module, list(arguments), wanted, path), daemon=True)
        with _TURN, _in_environment(wanted):
            process.start()
        self._running.append((name, Forked(process), path.open("ab")))  # type: ignore[arg-type]

    def command(self, module: str, *arguments: str, extra: Mapping[str, str] | None = None) -> str:
        """In a process that is forked like the others."""
        with tempfile.NamedTemporaryFile() as printed, tempfile.NamedTemporaryFile() as errors:
            wanted, files = environment(**(extra or {})), (Path(printed.name), Path(errors.name))
            process = _CONTEXT.Process(target=_run, args=(module, list(arguments), wanted, *files))
            with _TURN, _in_environment(wanted):
                process.start()
            try:
                code = Forked(process).wait(COMMAND_S)
            finally:
                process.kill()
            if code:
                words = errors.read().decode().strip()[-300:]
                raise StateError(f"{module} {arguments[0]} failed with exit code {code}: {words}")
            return printed.read().decode()


class Forked:
    """What Processes asks of a subprocess.Popen."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        with _TURN:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def _in_environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """The server takes over the environment of its first start: threads are counted when torch is imported."""
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(
    module: str, arguments: Sequence[str], wanted: Mapping[str, str], log: Path, errors: Path | None = None
) -> None:
    """`errors`: where the second stream goes, if not to the log."""
    os.setsid()
    os.environ.clear()
    os.environ.update(wanted)
    for standard, path in ((1, log), (2, errors or log)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, standard)
        os.close(descriptor)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
