"""A round comes before this silo's own models: whoever trains them looks at what the running agent is at."""

import time
from pathlib import Path
from typing import Final

from lorica_security.errors import StateError
from lorica_security.host.process_lock import holder
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.rounds.effects import Activity

AT_REST: Final = (Activity.WAITING, Activity.REFUSING, Activity.FINISHED, Activity.STOPPED)
LOOK_EVERY_S: Final = 1.0


class RoundsFirst:
    def __init__(self, lock: Path, journal: RoundJournal) -> None:
        """`lock` is the agent's."""
        self._lock, self._journal = lock, journal
        self._looked = 0.0
        self._work = ""

    def require_rest(self) -> None:
        """Raises StateError while the agent is at work in a round, masking among it."""
        if work := self._at_work():
            raise StateError(f"the agent is at work ({work}), and a round comes first: try again when it waits")

    def begun(self) -> bool:
        """Whether the agent has begun to work; looked up once a second, however often it is asked."""
        if not self._work and time.monotonic() - self._looked >= LOOK_EVERY_S:
            self._work, self._looked = self._at_work(), time.monotonic()
        return bool(self._work)

    def stopped(self) -> StateError:
        """What people are told of training that gave way."""
        return StateError(
            f"the agent began to work ({self._work}), and a round comes first: run `silo-agent personal train` again "
            "when it waits; it goes on after its last whole epoch"
        )

    def _at_work(self) -> str:
        if holder(self._lock) is None:
            return ""
        activity = self._journal.fact("activity") or ""
        return "" if not activity or activity.startswith(tuple(it.value for it in AT_REST)) else activity
