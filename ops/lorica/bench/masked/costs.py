"""What a piece of work took, in this process."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lorica.memory_readings import memory_bytes, reset_peak
from silo_wire.transport import give_memory_back

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """`peak_bytes` is the most memory that the process had during the work beyond what it had before."""

    cpu_s: float
    wall_s: float
    peak_bytes: int


def measured(work: Callable[[], Result]) -> tuple[Result, Cost]:
    """CPU time is of all threads of this process."""
    pid = os.getpid()
    give_memory_back()  # what was freed and kept for later would hide what is needed
    reset_peak(pid)
    before, _ = memory_bytes(pid)
    cpu, wall = time.process_time(), time.monotonic()
    result = work()
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    _, peak = memory_bytes(pid)
    return result, Cost(cpu_s=cpu, wall_s=wall, peak_bytes=max(peak - before, 0))
