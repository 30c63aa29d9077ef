"""Lines that a peer's application writes as its rounds end, read the moment they are written: a pipe, not a log."""

import os
import select
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from lorica.bench.figures import Reading
from lorica.bench.peers.deployment import Deployment, start_time
from lorica.bench.processes import Meter
from lorica_security.errors import StateError

FIRST_ROUND_S = 300.0
LONGEST_ROUND_S = 1800.0
CHECK_S = 1.0


class Marks:
    """A named pipe at `path`; use it as a context."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unread = b""

    def __enter__(self) -> Self:
        os.mkfifo(self.path)
        # Open for writing too: without a writer the pipe would always be readable, at its end.
        self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._pipe)
        self.path.unlink()

    def read(self, wait_s: float) -> list[str] | None:
        """The words of the next line, the writer's process id first; None when there is none within `wait_s`."""
        if b"\n" not in self._unread and select.select([self._pipe], [], [], wait_s)[0]:
            self._unread += os.read(self._pipe, 65536)
        if b"\n" not in self._unread:
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace").split()


def follow(marks: Marks, deployment: Deployment, meter: Meter, rounds: int) -> list[Reading]:
    """A reading as each of `rounds` rounds ends, then the application's own check of the model.

    Raises StateError when a process ends, no round does in time, or the averaged model is wrong.
    """
    readings: list[Reading] = []
    writer, since = 0, ""
    deadline = time.monotonic() + FIRST_ROUND_S
    while True:
        words = marks.read(CHECK_S)
        if words is None:
            deployment.check()
            if time.monotonic() > deadline:
                raise StateError(f"round {len(readings) + 1} did not end in time\n{deployment.last_words()}")
            if writer and not (since and start_time(writer) == since):
                raise StateError(f"the application ended after {len(readings)} rounds\n{deployment.last_words()}")
            continue
        deadline = time.monotonic() + LONGEST_ROUND_S
        match words:
            case [pid, "round", "0"]:
                writer, since = int(pid), start_time(int(pid))
            case [_, "round", number] if int(number) == len(readings) + 1:
                readings.append(meter.read())
            case [_, "end"] if len(readings) == rounds:
                return readings
            case [_, "end", *reason]:
                raise StateError(f"{' '.join(reason)}\n{deployment.last_words()}")
            case _:
                raise StateError(f"after {len(readings)} of {rounds} rounds the application wrote {' '.join(words)!r}")
