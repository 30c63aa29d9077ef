"""The process that runs hostile SQL: no environment, few resources, one database, frames in and out.

Order: keep the two pipes, read what to open, load all code, enter the jail, open the SQLite file, then answer one
statement at a time until the parent closes the pipe. A PostgreSQL server is connected to before the jail, which has no
way out to it.
"""

import logging
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Protocol

from lorica_security.errors import LoricaError
from silo_agent.sql_sandbox import jail
from silo_agent.sql_sandbox.frames import FrameEnd, read_frame, write_frame
from silo_agent.sql_sandbox.results import ERRORS, Limits, Rows
from silo_agent.sql_sandbox.statement import one_select
from silo_agent.sql_sandbox.target import PostgresqlTarget, SqliteTarget

REQUEST_BYTES = 2**20
_CPU_GRACE_SECONDS = 2


class Session(Protocol):
    """An open database that runs one statement."""

    def run(self, sql: str, /) -> Rows:
        """The complete result; raises UnsafeSql, QueryFailed, DataError."""

    def prepare(self, sql: str, /) -> None:
        """Raises the same where the database does not understand it; runs nothing of it."""


def main() -> None:
    """Serve one parent over stdin and stdout until it closes them."""
    requests, replies = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    logging.disable()
    try:
        opening = read_frame(requests, most=REQUEST_BYTES)
        try:
            if "probe" in opening:
                write_frame(replies, asdict(jail.prove()))
                return
            limits = Limits(**opening["limits"])  # type: ignore[arg-type]  # from the parent, which checked them
            opened = _jailed(opening, limits)
            write_frame(replies, {"jailed": True})
            _allow_cpu(limits.seconds)
            session = opened()
        except LoricaError as error:
            write_frame(replies, _failure(error))
            return
        write_frame(replies, {"ready": True})
        while True:
            request = read_frame(requests, most=REQUEST_BYTES)
            _allow_cpu(limits.seconds)
            write_frame(replies, _answer(session, request, limits))
    except FrameEnd:
        return


def _jailed(opening: Mapping[str, object], limits: Limits) -> Callable[[], Session]:
    """What opens the session, and this process in its jail. Nothing can be imported afterwards, so a statement is
    looked at before."""
    if "sqlite" in opening:
        from silo_agent.sql_sandbox import sqlite_session

        target = SqliteTarget(Path(str(opening["sqlite"])))
        sqlite_session.load_code(limits)
        files = target.files()
        jail.enter(limits, readable=files)
        return lambda: sqlite_session.SqliteSession(target, limits, files)
    from silo_agent.sql_sandbox.postgresql_session import PostgresqlSession

    server = PostgresqlTarget(url=str(opening["postgresql"]), shown=str(opening["shown"]))
    session = PostgresqlSession(server, limits, session_name=str(opening["session_name"]))
    one_select("SELECT 1", dialect="postgres")
    jail.enter(limits, readable=(), connected=True)
    return lambda: session


def _answer(session: Session, request: Mapping[str, object], limits: Limits) -> dict[str, object]:
    sql = str(request["sql"])
    try:
        if request.get("prepare") is True:
            session.prepare(sql)
            return {"columns": [], "rows": [], "ordered": False}
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
    return {next((key for key, kind in ERRORS.items() if isinstance(error, kind)), "database"): str(error)}


def _allow_cpu(seconds: float) -> None:
    """SIGXCPU ends a statement that neither the driver's time limit nor the parent has stopped."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = ceil(usage.ru_utime + usage.ru_stime + seconds) + _CPU_GRACE_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
    main()
