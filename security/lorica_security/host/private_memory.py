"""What a process keeps in memory (keys, shares, records) stays there: no core file, and no other process of the same
user may look.

RLIMIT_CORE 0 holds for what the process starts, too. PR_SET_DUMPABLE 0 also makes its /proc/PID belong to root: neither
a debugger nor /proc/PID/mem, environ or fd is open to another process of the same user. Whoever has CAP_SYS_PTRACE is
not kept out.
"""

import ctypes
import resource

from lorica_security.errors import StateError

_PR_SET_DUMPABLE = 4  # prctl(2), of Linux


def keep_memory_private() -> None:
    """For the rest of this process's life; raises StateError where the kernel refuses. Without prctl (not Linux) the
    limit alone is set."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is not None and prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise StateError(
            f"the kernel does not let this process keep its memory to itself (prctl: errno {ctypes.get_errno()}): "
            "see what confines it (seccomp)"
        )
