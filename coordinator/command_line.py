"""What the modules of the `coordinator` command share: options, its folder, and how a command reaches the state.

Over mutual TLS if the coordinator runs, else directly, by the same servicer.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import structlog
import typer
from prometheus_client import CollectorRegistry

from coordinator.composition import Coordinator
from coordinator.edges.coordinator_folder import coordinator_folder
from coordinator.edges.metrics import CoordinatorMetrics
from coordinator.edges.operator_servicer import OperatorServicer
from security.errors import ConfigurationError, Conflict
from security.process_lock import ProcessLock, holder
from silo_wire.v1 import operator_pb2_grpc

Dir = Annotated[
    Path | None,
    typer.Option("--dir", help="The coordinator's folder.", envvar="LORICA_COORDINATOR_DIR", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Reply = TypeVar("Reply")


def load(directory: Path | None) -> Coordinator:
    """The folder that a command means, with its settings and keys; raises ConfigurationError."""
    return Coordinator.load(coordinator_folder(directory))


def ask(coordinator: Coordinator, call: Callable[["operator_pb2_grpc.OperatorAsyncStub"], Awaitable[Reply]]) -> Reply:
    if holder(coordinator.folder.lock) is None:
        try:
            with ProcessLock(coordinator.folder.lock, "coordinator"):
                return asyncio.run(_ask_offline(coordinator, call))
        except Conflict:
            pass  # it has started this moment
    return coordinator.operator_access().call(call)


async def _ask_offline(
    coordinator: Coordinator, call: Callable[["operator_pb2_grpc.OperatorAsyncStub"], Awaitable[Reply]]
) -> Reply:
    log_to_stderr("error")
    async with coordinator.service(CoordinatorMetrics(CollectorRegistry())) as (service, _):
        return await call(_Direct(OperatorServicer(service)))  # type: ignore[arg-type]  # the same calls, without a wire


class _Direct:
    """A stub whose calls go straight to the servicer."""

    def __init__(self, servicer: OperatorServicer) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Callable[[object], Awaitable[object]]:
        method = getattr(self._servicer, name)
        return lambda request: method(request, None)


def instant(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if unix_s else "never"


def log_to_stderr(level: str) -> None:
    numbers = logging.getLevelNamesMapping()
    if level.upper() not in numbers:
        raise ConfigurationError(f"--log-level {level!r} is unknown: use debug, info, warning or error")
    pretty = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(numbers[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
