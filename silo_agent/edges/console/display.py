"""`DisplayPort` twice: bars and lines for a person at a terminal, JSON lines for a log."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import structlog
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from silo_agent.edges.console.logs import Whereabouts
from silo_agent.rounds.effects import Activity, JournalActivity

_MEASURED = (Activity.FETCHING, Activity.TRAINING, Activity.UPLOADING, Activity.EVALUATING)
_WORK = (*_MEASURED, Activity.PREPARING, Activity.MASKING)
_PROBLEMS = frozenset(
    {
        *("refused", "work-failed", "errand-refused", "unreachable", "coordinator-not-told", "bad-line"),
        *("checkpoint-ignored", "checkpoint-not-written", "residual-lost", "residual-not-written"),
        "own-models-not-trained",
        "answers-right-not-written",
        "no-loss-reduction",
    }
)


class LogDisplay:
    """One JSON record a line on stderr (logs.py); progress is not logged, the coordinator shows it."""

    def __init__(self, where: Whereabouts) -> None:
        self._where = where
        self._log = structlog.stdlib.get_logger("silo-agent")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def activity(self, activity: JournalActivity) -> None:
        self._where.at(activity)
        detail = {"detail": activity.detail} if activity.detail else {}
        self._log.info("activity", activity=activity.activity.value, **detail)

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
    """A moving line for what the agent does now, with a bar where that is measured; a still one for what happened."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            _WhereMeasured(BarColumn(bar_width=30)),
            _WhereMeasured(TextColumn("{task.percentage:>3.0f} %")),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._done = ""
        self._since = 0.0
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
        if self._done:
            self._line(f"{self._done}: {self._clock() - self._since:.1f} s")
        where = f", round {activity.key.round}" if activity.key is not None else ""
        shown = f"{activity.activity.value}{where}"
        measured = activity.activity in _MEASURED
        self._done, self._since = shown if activity.activity in _WORK else "", self._clock()
        self._task = self._bars.add_task(
            _one_line(f"{shown}: {activity.detail}" if activity.detail else shown), total=1.0 if measured else None
        )

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
            self._bars.console.print(_one_line(text), markup=False, highlight=False, soft_wrap=True)
        self._last = text


class _WhereMeasured(ProgressColumn):
    """Nothing where nothing is measured: a bar that runs to and fro would look like work."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        return Text() if task.total is None else self._column.render(task)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _one_line(text: str) -> str:
    """What others say moves no cursor and paints nothing."""
    return "".join(character if character.isprintable() else " " for character in text)
