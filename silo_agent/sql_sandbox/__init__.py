"""A model's SQL, run read-only in a process of its own (DESIGN section 6).

    with Sandbox(parse_database("sqlite:///clinic.db"), Limits(seconds=2)) as box:
        box.run("SELECT count(*) FROM patient").rows

Layers, outermost first: the parent kills what is late; the worker has no environment, and a jail in which the kernel
leaves it the database and its two pipes (jail.py); one look at the statement refuses what is no single SELECT; the
database layer (authorizer, or read-only transaction under a checked role) allows nothing but reading.
"""

from silo_agent.sql_sandbox.comparison import ExecutionMatch, ExecutionOutcome, execution_match, same_result
from silo_agent.sql_sandbox.jail import Walls
from silo_agent.sql_sandbox.results import JailMissing, Limits, QueryFailed, ResultKind, Rows, Value
from silo_agent.sql_sandbox.sandbox import Sandbox, probe_jail, run_select
from silo_agent.sql_sandbox.target import DatabaseTarget, PostgresqlTarget, SqliteTarget, parse_database

__all__ = [
    "DatabaseTarget",
    "ExecutionMatch",
    "ExecutionOutcome",
    "JailMissing",
    "Limits",
    "PostgresqlTarget",
    "QueryFailed",
    "ResultKind",
    "Rows",
    "Sandbox",
    "SqliteTarget",
    "Value",
    "Walls",
    "execution_match",
    "parse_database",
    "probe_jail",
    "run_select",
    "same_result",
]
