"""What `coordinator watch` shows, from the same answers as `status` and `rounds`; nothing in it asks or waits."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lorica_security.console.terminal import one_line
from silo_wire.v1 import operator_pb2

ROUNDS_SHOWN = 6
_STYLES = {
    "ready": "green",
    "absent": "yellow",
    "revoked": "red",
    "declined": "red",
    "invited": "dim",
    "enrolled": "dim",
}
_MEASURED = ("training", "masking", "evaluating")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was answered, and when by a monotonic clock."""

    status: operator_pb2.StatusReply
    rounds: Sequence[operator_pb2.RoundRecord]
    at: float


def headline(status: operator_pb2.StatusReply) -> str:
    """The one line that says where a plan stands; the same words for as long as nothing changes."""
    where = f"round {status.round} of {status.rounds}, " if status.rounds else ""
    attempt = f" (attempt {status.attempt})" if status.attempt > 1 else ""
    return one_line(f"{where}{status.phase}{attempt}: {status.detail}")


def picture(seen: Seen | None, *, lost: str, now: float) -> RenderableType:
    """`lost` says why nothing newer is known, "" while the coordinator answers; `now` by the clock of `seen`."""
    trouble = (
        Text(one_line(lost), style="bold red") if lost else Text("Ctrl-C ends this view, nothing else", style="dim")
    )
    if seen is None:
        return trouble
    status = seen.status
    parts: list[RenderableType] = [Text(headline(status))]
    if status.rounds:
        done = status.round if status.phase == "finished" else max(0, status.round - 1)
        parts.append(ProgressBar(total=status.rounds, completed=done, width=60))
    if status.seconds_left >= 0:
        left = max(0.0, status.seconds_left - (now - seen.at))
        parts.append(Text(f"{left:.0f} s left of this phase"))
    title = Text(one_line(f"{status.federation}: {status.plan_name or 'no plan'}"))
    return Group(
        Panel(Group(*parts), title=title, title_align="left"),
        _silos(status),
        _rounds(seen.rounds, one_line(status.score)),
        trouble,
    )


def _silos(status: operator_pb2.StatusReply) -> Table:
    table = Table(expand=True)
    for column in ("silo", "state", "progress", "last seen", "detail"):
        table.add_column(column, overflow="fold")
    for silo in status.silos:
        table.add_row(
            Text(one_line(silo.silo)),
            Text(silo.state, style=_STYLES.get(silo.state, "cyan")),
            ProgressBar(total=1.0, completed=silo.fraction, width=20)
            if silo.fraction and silo.state in _MEASURED
            else "",
            _ago(silo.last_seen_unix_s),
            Text(one_line(silo.detail)),
        )
    return table


def _rounds(records: Sequence[operator_pb2.RoundRecord], score: str) -> Table:
    table = Table(expand=True)
    table.add_column("round", justify="right", overflow="fold")
    table.add_column("outcome", overflow="fold")
    for column in ("updates", "loss reduction", f"{score or 'exact match'} MacroAvg", "MicroAvg"):
        table.add_column(column, justify="right", overflow="fold")
    for record in records[-ROUNDS_SHOWN:]:
        asked = [silo for silo in record.silos if silo.outcome != "evaluated"]  # the others told a score alone
        told = [silo for silo in record.silos if silo.examples]
        mean = sum(silo.loss_reduction for silo in told) / len(told) if told else None
        table.add_row(
            f"{record.round}.{record.attempt}",
            record.outcome,
            f"{sum(silo.outcome == 'committed' for silo in asked)} of {len(asked)}" if asked else "",
            "" if mean is None else f"{mean:.4f}",
            "" if record.macro_exact_match < 0 else f"{record.macro_exact_match:.1%}",
            "" if record.micro_exact_match < 0 else f"{record.micro_exact_match:.1%}",
        )
    return table


def _ago(unix_s: float) -> str:
    if not unix_s:
        return "never"
    seconds = max(0.0, time.time() - unix_s)
    return "now" if seconds < 5 else f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"
