"""structlog, set up once: JSON lines on stderr with time, level and event, each saying which silo, round and phase it
is about.

What libraries log goes the same way.
"""

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from silo_agent.rounds.effects import JournalActivity

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Whereabouts:
    """A processor: adds `silo`, `phase`, `round` and `attempt` to every line that does not have them; null where there
    is none.

    The phase is what the agent is doing (Activity).
    """

    def __init__(self) -> None:
        self.silo: str | None = None
        self._activity: JournalActivity | None = None

    def at(self, activity: JournalActivity) -> None:
        self._activity = activity

    def __call__(self, logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
        activity = self._activity
        key = None if activity is None else activity.key
        line.setdefault("silo", self.silo)
        line.setdefault("phase", None if activity is None else activity.activity.value)
        line.setdefault("round", None if key is None else key.round)
        line.setdefault("attempt", None if key is None else key.attempt)
        return line


def configure_logs(level: str) -> Whereabouts:
    """`level` is a key of LEVELS."""
    where = Whereabouts()
    before: list[Processor] = [
        where,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering: list[Processor] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*before, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=before, processors=[remove, *rendering]))
    logging.basicConfig(handlers=[handler], level=max(LEVELS[level], logging.WARNING), force=True)
    logging.captureWarnings(True)
    return where
