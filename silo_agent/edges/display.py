"""`DisplayPort` twice: bars and lines for a person at a terminal, JSON lines for a log."""

from types import TracebackType
from typing import Self

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from silo_agent.task.effects import Activity, JournalActivity

_MEASURED = (Activity.FETCHING, Activity.TRAINING, Activity.UPLOADING, Activity.EVALUATING)
_PROBLEMS = frozenset(
    {
        *("refused", "work-failed", "errand-refused", "unreachable", "coordinator-not-told", "bad-line"),
        *("checkpoint-ignored", "checkpoint-not-written", "residual-lost", "residual-not-written"),
    }
)


class LogDisplay:
    """One JSON record a line on stderr (logs.py); progress is not logged, the coordinator shows it."""

    def __init__(self) -> None:
        self._log = structlog.stdlib.get_logger("silo-agent")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def activity(self, activity: JournalActivity) -> None:
        key = activity.key
        where: dict[str, object] = {"round": key.round, "attempt": key.attempt} if key else {}
        if activity.detail:
            where["detail"] = activity.detail
        self._log.info("activity", activity=activity.activity.value, **where)

    def progress(self, fraction: float) -> None:
        return

    def note(self, event: str, **fields: object) -> None:
        if event in _PROBLEMS:
            self._log.warning(event, **fields)
        elif event == "event":
            self._log.debug(event, **fields)
        else:
            self._log.info(event, **fields)


class TerminalDisplay:
    """A bar for what is measured, a line for what happened."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._last = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def activity(self, activity: JournalActivity) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
        shown = activity.activity.value
        if activity.key is not None:
            shown += f", round {activity.key.round}"
        if activity.detail:
            shown += f": {activity.detail}"
        if activity.activity in _MEASURED:
            self._task = self._bars.add_task(shown, total=1.0)
        else:
            self._line(shown)

    def progress(self, fraction: float) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=fraction)

    def note(self, event: str, **fields: object) -> None:
        if event == "event":
            return
        told = ", ".join(f"{name} {_shown(value)}" for name, value in fields.items() if value != "")
        self._line(f"{event}: {told}" if told else event)

    def _line(self, text: str) -> None:
        if text != self._last:  # an unreachable coordinator says the same again and again
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._last = text


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
