"""Waiting for another process: by looking, since it sends no event here, and never longer than `longest_s`."""

import time
from collections.abc import Callable

LOOK_S = 0.2


def until(reached: Callable[[], bool], check: Callable[[], None], longest_s: float) -> None:
    """Return once `reached`; `check` raises when a process has ended that should not."""
    deadline = time.monotonic() + longest_s
    while not reached():
        check()
        assert time.monotonic() < deadline, f"not reached within {longest_s:.0f} s"
        time.sleep(LOOK_S)
