"""Whether a simulation will come to its end: a federation waits for people who mend it, a simulation has nobody but who
started it."""

from collections.abc import Sequence
from itertools import dropwhile, takewhile

from lorica_coordinator.service.records import RoundRow
from lorica_security.errors import StateError

MOST_ATTEMPTS = 3
"""At one round without a model. Nobody is late here and nothing gets lost, so that a further one would end as they
did."""
PATIENCE_S = 60.0
"""For a phase that cannot go on, such as aggregation on a full disk: somebody may have seen it and made room."""


class GoingOn:
    """`require` is called every now and then with how things stand."""

    def __init__(self) -> None:
        self._fault_since: float | None = None

    def require(self, rows: Sequence[RoundRow], fault: str | None, *, now: float) -> None:
        """`rows` are attempts, oldest first, `now` seconds of any clock. Raises StateError with what stands in the
        way."""
        ended = list(dropwhile(lambda row: row.outcome == "running", reversed(rows)))
        vain = list(takewhile(lambda row: (row.round, row.outcome) == (ended[0].round, "abandoned"), ended))
        if len(vain) >= MOST_ATTEMPTS:
            raise StateError(
                f"round {vain[0].round} has come to nothing {len(vain)} times, and would again: {vain[0].detail}; "
                "make a plan that does not, and choose another --out"
            )
        if fault is None:
            self._fault_since = None
            return
        if self._fault_since is None:
            self._fault_since = now
        if now - self._fault_since >= PATIENCE_S:
            raise StateError(
                f"the coordinator cannot go on: {fault}; once that is mended, the same command goes on where it was"
            )
