"""The process that runs hostile SQL: no environment, few resources, one database, frames in and out.

Order: keep the two pipes, read what to open, open it (which imports the driver), take the resources away, then answer one
statement at a time until the parent closes the pipe.
"""

import logging
import os
import resource
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Protocol

from security.errors import LoricaError, UnsafeSql
from silo_agent.sql_sandbox.frames import FrameEnd, read_frame, write_frame
from silo_agent.sql_sandbox.results import Limits, QueryFailed, Rows
from silo_agent.sql_sandbox.target import PostgresqlTarget, SqliteTarget

REQUEST_BYTES = 2**20
_OPEN_FILES = 64
_CPU_GRACE_SECONDS = 2


class Session(Protocol):
    """An open database that runs one statement."""

    def run(self, sql: str, /) -> Rows:
        """The complete result; raises UnsafeSql, QueryFailed, DataError."""


def main() -> None:
    """Serve one parent over stdin and stdout until it closes them."""
    requests, replies = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    logging.disable()
    try:
        opening = read_frame(requests, most=REQUEST_BYTES)
        limits = Limits(**opening["limits"])  # type: ignore[arg-type]  # from the parent, which checked them
        try:
            session = _open(opening, limits)
        except LoricaError as error:
            write_frame(replies, _failure(error))
            return
        _take_resources_away(limits)
        write_frame(replies, {"ready": True})
        while True:
            request = read_frame(requests, most=REQUEST_BYTES)
            _allow_cpu(limits.seconds)
            write_frame(replies, _answer(session, str(request["sql"]), limits))
    except FrameEnd:
        return


def _open(opening: Mapping[str, object], limits: Limits) -> Session:
    if "sqlite" in opening:
        from silo_agent.sql_sandbox.sqlite_session import SqliteSession

        return SqliteSession(SqliteTarget(Path(str(opening["sqlite"]))), limits)
    from silo_agent.sql_sandbox.postgresql_session import PostgresqlSession

    target = PostgresqlTarget(url=str(opening["postgresql"]), shown=str(opening["shown"]))
    return PostgresqlSession(target, limits, session_name=str(opening["session_name"]))


def _answer(session: Session, sql: str, limits: Limits) -> dict[str, object]:
    try:
        rows = session.run(sql)
    except LoricaError as error:
        return _failure(error)
    except MemoryError:
        return {
            "refused": f"SQL stopped: it needs more than {limits.memory_bytes} bytes of memory (limit memory_bytes)"
        }
    except RecursionError:
        return {"refused": "SQL refused: it is nested too deeply"}
    return {"columns": rows.columns, "rows": rows.rows, "ordered": rows.ordered}


def _failure(error: LoricaError) -> dict[str, object]:
    if isinstance(error, UnsafeSql):
        return {"refused": str(error)}
    return {"failed" if isinstance(error, QueryFailed) else "database": str(error)}


def _take_resources_away(limits: Limits) -> None:
    """No file may grow, no core be dumped, no process or thread be made; memory is what is mapped now plus the limit."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for kind, value in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + limits.memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
    ):
        _, hard = resource.getrlimit(kind)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))


def _allow_cpu(seconds: float) -> None:
    """SIGXCPU ends a statement that neither the driver's time limit nor the parent has stopped."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = ceil(usage.ru_utime + usage.ru_stime + seconds) + _CPU_GRACE_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
    main()
