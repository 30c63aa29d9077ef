"""`ObserverPort`: a refusal goes into the journal, which `silo-agent status` shows, the metrics and the log."""

from collections.abc import Callable

from lorica_security.errors import LoricaError
from silo_agent.edges.console.metrics import SiloMetrics
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.rounds.effects import JournalActivity, JournalOutcome
from silo_agent.service.ports import DisplayPort
from silo_agent.service.refusals import rule_of


class SiloObserver:
    """Raises StorageError of the journal."""

    def __init__(
        self,
        *,
        journal: RoundJournal,
        metrics: SiloMetrics,
        display: DisplayPort,
        beside: Callable[[JournalActivity], None] = lambda activity: None,
    ) -> None:
        """`beside` hears of each activity, too."""
        self._journal, self._metrics, self._display, self._beside = journal, metrics, display, beside

    def refused(self, rule: str, detail: str) -> None:
        self._journal.record_refusal(rule, detail)
        self._metrics.refused(rule)
        self._display.note("refused", rule=rule, detail=detail)

    def round_ended(self, outcome: JournalOutcome) -> None:
        self._metrics.round_ended(outcome)

    def activity(self, activity: JournalActivity) -> None:
        self._metrics.activity_changed(activity)
        self._beside(activity)

    def epsilon(self, *, spent: float, allowed: float) -> None:
        self._metrics.epsilon(spent=spent, allowed=allowed)

    def epsilon_alone(self, *, spent: float, allowed: float) -> None:
        self._metrics.epsilon_alone(spent=spent, allowed=allowed)

    def unreachable(self, problem: LoricaError, seconds: float) -> None:
        """A try at the coordinator failed, the next comes in `seconds`; what it sent may have been no order at all."""
        if (rule := rule_of(problem)) is not None:
            self.refused(rule, str(problem))
        self._metrics.unreachable.inc()
        self._display.note("unreachable", detail=str(problem), next_try_s=round(seconds, 1))
