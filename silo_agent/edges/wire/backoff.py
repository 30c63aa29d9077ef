"""How long to wait before the next try: doubling, with full jitter so that silos do not return all at once."""

import secrets

FIRST_S = 0.5
MOST_S = 10.0

_draw = secrets.SystemRandom().uniform


class Backoff:
    """Waits of at most 0.5 s, 1 s, 2 s ... 10 s, each drawn between a tenth of that and all of it."""

    def __init__(self, *, first_s: float = FIRST_S, most_s: float = MOST_S) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._next_s = first_s

    def reset(self) -> None:
        self._next_s = self._first_s

    def wait_s(self) -> float:
        """The next wait in seconds."""
        ceiling = self._next_s
        self._next_s = min(2 * ceiling, self._most_s)
        return _draw(ceiling / 10, ceiling)
