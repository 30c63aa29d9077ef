"""Reading the processes of a benchmark from /proc: CPU seconds, memory, bytes on loopback.

A role (the coordinator, one agent) is a tree of processes, because a peer's server or client may start others.
"""

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from lorica.bench.figures import Reading
from lorica.memory_readings import memory_bytes, reset_peak
from lorica_security.errors import StateError

SAMPLE_S = 0.25
_TICKS = os.sysconf("SC_CLK_TCK")


def trees(roots: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each sequence of roots: they and their descendants, those that are alive, in no order. One look at /proc."""
    children: dict[int, list[int]] = {}
    alive = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            alive.add(int(entry.name))
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = []
    for several in roots:
        of_role, ahead = [], [root for root in several if root in alive]
        while ahead:
            of_role.append(ahead.pop())
            ahead += children.get(of_role[-1], [])
        found.append(of_role)
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, of all its threads and of its children that it has waited for; 0 once it is
    gone."""
    fields = _stat(pid)
    return 0.0 if fields is None else sum(map(int, fields[11:15])) / _TICKS


def loopback_bytes() -> int:
    """Bytes that loopback has delivered since the machine started, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[0])
    raise StateError("this machine has no loopback interface")


def imports_bytes(python: str | Path, imports: Sequence[str], environment: Mapping[str, str]) -> int:
    """Memory of a process of `python` that has imported `imports` and done nothing else."""
    code = (
        f"import {', '.join(imports)}\nprint([line.split()[1] for line in open('/proc/self/status') if 'VmRSS' in "
        "line][0])"
    )
    done = subprocess.run([python, "-c", code], env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StateError(f"importing {', '.join(imports)} failed: {done.stderr.strip().splitlines()[-1:]}")
    return int(done.stdout.strip().splitlines()[-1]) * 1024


class Meter:
    """Samples the memory of every tree in a thread of its own; `read` at the end of each round. Use it as a context."""

    def __init__(self, *, coordinator: Sequence[int], agents: Sequence[Sequence[int]]) -> None:
        """Roots of the coordinator's trees, and of each agent's."""
        self._coordinator, self._agents = tuple(coordinator), [tuple(roots) for roots in agents]
        self._roles = [self._coordinator, *self._agents]
        self._peaks = [0] * len(self._roles)
        self._cpu: list[dict[int, float]] = [{} for _ in self._roles]
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_done, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def read(self) -> Reading:
        """Totals now; the peaks begin anew."""
        at_s, wire = time.monotonic(), loopback_bytes()
        with self._lock:
            now = self._sample()
            reading = Reading(
                at_s=at_s,
                cpu_s=sum(sum(role.values()) for role in self._cpu),
                agents_cpu_s=sum(sum(role.values()) for role in self._cpu[1:]),
                wire_bytes=wire,
                coordinator_bytes=now[0],
                coordinator_peak_bytes=self._peaks[0],
                agent_peak_bytes=max(self._peaks[1:]),
            )
            self._peaks = now
            for pid in (pid for of_role in self._cpu for pid in of_role):
                reset_peak(pid)
        return reading

    def _sample_until_done(self) -> None:
        while not self._done.wait(SAMPLE_S):
            with self._lock:
                self._sample()

    def _sample(self) -> list[int]:
        """Memory of each role now. Peaks: of the trees' sums at the samples, and of each root's own, which misses
        nothing."""
        sums = []
        for index, pids in enumerate(trees(self._roles)):
            resident = 0
            for pid in pids:
                now, peak = memory_bytes(pid)
                resident += now
                self._peaks[index] = max(self._peaks[index], peak)
            # A child that has ended and was waited for is in its parent's time: only those that are alive are summed.
            self._cpu[index] = {pid: cpu_seconds(pid) for pid in pids}
            sums.append(resident)
            self._peaks[index] = max(self._peaks[index], resident)
        return sums


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name, which may hold spaces: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
