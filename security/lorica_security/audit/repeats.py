"""A flood that cannot fill a disk: the first few of a kind are written as they come, of the rest only how many there
were.

Kinds come from closed sets, but for who caused them: beyond a number of kinds in a period, all others share one.
"""

import threading
from dataclasses import dataclass
from typing import Final

OTHERS: Final = "others"


@dataclass(slots=True)
class _Kind:
    written: int = 0
    counted: int = 0


class Repeats:
    """`period_s` begins with what is told first after the one before; all instants are in seconds. Several threads may
    use one."""

    def __init__(self, *, period_s: float = 3600.0, each: int = 20, kinds: int = 64) -> None:
        self._period_s, self._each, self._most = period_s, each, kinds
        self._began = 0.0
        self._kinds: dict[str, _Kind] = {}
        self._lock = threading.Lock()

    def is_news(self, kind: str, now: float, *, each: int = 0) -> bool:
        """Whether this one is to be written, `each` of a kind, if given; otherwise it was counted. Call `ended`
        first."""
        with self._lock:
            if not self._kinds:
                self._began = now
            if kind not in self._kinds and len(self._kinds) >= self._most:
                kind = OTHERS
            state = self._kinds.setdefault(kind, _Kind())
            if state.written < (each or self._each):
                state.written += 1
                return True
            state.counted += 1
            return False

    def ended(self, now: float, *, stopping: bool = False) -> list[tuple[str, int]]:
        """What was counted in a period that is over, or in the one that runs if the process is `stopping`: each kind,
        and how many."""
        with self._lock:
            if not stopping and 0 <= now - self._began < self._period_s:
                return []
            counted = [(kind, state.counted) for kind, state in self._kinds.items() if state.counted]
            self._kinds.clear()
            return counted
