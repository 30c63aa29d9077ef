"""structlog, set up once: lines on stderr with time, level and event, each saying which round, phase and silo it is
about.

JSON, an object a line, unless a person looks: then words, in colour unless NO_COLOR is set. What libraries log goes the
same way.
"""

import logging
import os
import sys
from collections.abc import Callable
from typing import Final

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from lorica_coordinator.edges.telemetry.caller import CALLER
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import Role

LEVELS: Final = ("debug", "info", "warning", "error")

Place = tuple[str, int, int]
"""Phase, round and attempt."""


class Whereabouts:
    """A processor: adds `phase`, `round`, `attempt` and `silo` to every line that does not have them; null where there
    is none.

    `of` says where the plan stands at this moment; None until there is a service. The silo is the one that calls.
    """

    def __init__(self) -> None:
        self.of: Callable[[], Place] | None = None

    def __call__(self, logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
        phase, number, attempt = (None, None, None) if self.of is None else self.of()
        caller = CALLER.get(None)
        silo = caller.name if caller is not None and caller.role is Role.SILO else None
        for key, value in (("phase", phase), ("round", number), ("attempt", attempt), ("silo", silo)):
            line.setdefault(key, value)
        return line


def log_to_stderr(level: str, *, libraries: bool = False) -> Whereabouts:
    """`libraries`: their warnings as well, in the same form. Raises ConfigurationError for a level that is none."""
    if level.lower() not in LEVELS:
        raise ConfigurationError(f"--log-level {level!r} is unknown: use {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
    number = logging.getLevelNamesMapping()[level.upper()]
    where = Whereabouts()
    before: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        where,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering: list[Processor]
    if sys.stderr.isatty():
        colours = not os.environ.get("NO_COLOR")
        # Not the usual tracebacks, which show the values of variables: keys and tokens are among them.
        words = structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)
        rendering = [_without_nulls, _in_one_line, words]
    else:
        rendering = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*before, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    if libraries:
        handler = logging.StreamHandler(sys.stderr)
        remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(foreign_pre_chain=before, processors=[remove, *rendering])
        )
        logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
        logging.captureWarnings(True)
    return where


def _without_nulls(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
    return {key: value for key, value in line.items() if value is not None}


def _in_one_line(logger: WrappedLogger, method: str, line: EventDict) -> EventDict:
    """What a library says may hold a peer's words. All but the event is quoted where it needs to be."""
    event = str(line.get("event", ""))
    line["event"] = "".join(character if character.isprintable() else " " for character in event)
    return line
