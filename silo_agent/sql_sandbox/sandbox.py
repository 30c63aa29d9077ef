"""The parent's side: a warm worker process, its deadline, and its death.

The parent trusts the worker with nothing: it scrubs its environment, kills it where it is late, and checks every reply.
Not for use by several threads at once.
"""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from types import TracebackType
from typing import IO, Self

import lorica_security
import silo_agent
from lorica_security.errors import ConfigurationError, DataError, LoricaError, UnsafeSql
from lorica_security.host.own_code import places_of
from lorica_security.visible_text import visible
from silo_agent.sql_sandbox.frames import FrameEnd, FrameTimeout, read_frame, write_frame
from silo_agent.sql_sandbox.jail import Walls
from silo_agent.sql_sandbox.results import ERRORS, MOST_WHOLE, Limits, Row, Rows, Stale
from silo_agent.sql_sandbox.target import DatabaseTarget, PostgresqlTarget, SqliteTarget

_START_SECONDS = 60.0
_GRACE_SECONDS = 1.0
_CLOSE_SECONDS = 2.0
# JSON's longest escape takes six bytes for one; the rest is brackets, commas and column names.
_REPLY_BYTES_EACH = 8
_REPLY_BYTES_BESIDE = 2**20
_SQL_CHARACTERS = 150_000
_SURROGATE = re.compile("[\ud800-\udfff]")

# -I ignores PYTHONPATH, the user's site and the working directory; the code is found where these very packages lie.
_START = "import sys; sys.path[:0] = sys.argv[1:]; from silo_agent.sql_sandbox.worker import main; main()"
CODE = places_of(lorica_security, silo_agent)


class Sandbox:
    """A database that answers SELECTs a model wrote: `with Sandbox(target, limits) as box: box.run(sql)`.

    The worker starts on entry, serves every `run`, and is replaced where a statement killed it.
    """

    def __init__(self, target: DatabaseTarget, limits: Limits | None = None) -> None:
        self._target = target
        self._limits = limits or Limits()
        self._session_name = f"lorica-sandbox-{secrets.token_hex(8)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._open = False
        self._abandoned = False

    def __enter__(self) -> Self:
        """Start the worker; raises DataError where the database cannot be used."""
        self._open = True
        try:
            self._worker()
        except LoricaError:
            self._open = False
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker; a statement that a killed one left in a PostgreSQL server is ended too."""
        if self._abandoned and self._process is None:
            with contextlib.suppress(LoricaError):
                self._worker()
        self._open = False
        if self._process is not None:
            _close_pipes(self._process)
            try:
                self._process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def run(self, sql: str) -> Rows:
        """The complete result of one SELECT.

        Raises UnsafeSql where the statement was refused or stopped at a limit, QueryFailed where the database could not
        run it, DataError where the database itself is out of reach.
        """
        return self._answer(sql, prepare=False)

    def prepare(self, sql: str) -> None:
        """Have the database understand one SELECT, and run nothing of it: what comes of that depends on the schema
        alone.

        Raises as `run` does.
        """
        self._answer(sql, prepare=True)

    def _answer(self, sql: str, *, prepare: bool) -> Rows:
        if not self._open:
            raise ConfigurationError("SQL sandbox is closed: use it in a with statement")
        if len(sql) > _SQL_CHARACTERS:
            raise UnsafeSql(f"SQL refused: it is longer than {_SQL_CHARACTERS} characters")
        try:
            return self._ask(sql, prepare)
        except Stale:
            self._kill()  # the next one may reach what the database is now
            return self._ask(sql, prepare)

    def _ask(self, sql: str, prepare: bool) -> Rows:
        process = self._worker()
        deadline = time.monotonic() + self._limits.seconds + _GRACE_SECONDS
        try:
            write_frame(_fd(process.stdin), {"sql": sql, "prepare": prepare}, deadline=deadline)
            reply = read_frame(_fd(process.stdout), most=self._reply_bytes, deadline=deadline)
            return _rows(reply, self._limits)
        except FrameTimeout:
            self._kill()
            raise UnsafeSql(f"SQL stopped: it ran longer than {self._limits.seconds} s (limit seconds)") from None
        except FrameEnd as end:
            code = self._kill()
            if code == -signal.SIGXCPU:
                raise UnsafeSql(f"SQL stopped: it ran longer than {self._limits.seconds} s (limit seconds)") from None
            raise UnsafeSql(
                f"SQL stopped: its process ended ({end}, exit code {code}), most often for memory (limit memory_bytes)"
            ) from None
        except BaseException as error:
            # An interrupt (KeyboardInterrupt) between question and answer: the next answer would be taken for the next
            # question's.
            if not isinstance(error, LoricaError):
                self._kill()
            raise

    @property
    def _reply_bytes(self) -> int:
        return _REPLY_BYTES_EACH * self._limits.result_bytes + _REPLY_BYTES_BESIDE

    def _worker(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._process is not None:
            self._kill()
        with tempfile.TemporaryFile() as complaints:
            self._process = _started(complaints, _environment(self._target))
            try:
                reply = _first_reply(self._process, self._opening())
                if reply.get("jailed") is True:
                    reply = self._opened(self._process)
            except (FrameTimeout, FrameEnd) as end:
                code = self._kill()
                raise DataError(
                    f"SQL sandbox did not start ({end}, exit code {code}): {_last_line(complaints)}"
                ) from None
            except BaseException:
                self._kill()
                raise
        if reply.get("ready") is not True:
            self._kill()
            error = _error(reply)
            raise error if isinstance(error, DataError) else DataError(f"SQL sandbox did not start: {error}")
        self._abandoned = False
        return self._process

    def _opened(self, process: "subprocess.Popen[bytes]") -> dict[str, object]:
        """What a worker says that has its code and its jail: a hostile file can hold it up from here on."""
        deadline = time.monotonic() + self._limits.seconds + _GRACE_SECONDS
        try:
            return read_frame(_fd(process.stdout), most=_REPLY_BYTES_BESIDE, deadline=deadline)
        except FrameTimeout:
            raise DataError(
                f"database {self._target.shown} was not opened within {self._limits.seconds} s (limit seconds): "
                "what lies beside it may be damaged, or the machine too busy"
            ) from None

    def _opening(self) -> dict[str, object]:
        limits = asdict(self._limits)
        if isinstance(self._target, SqliteTarget):
            return {"sqlite": str(self._target.path), "limits": limits}
        return {
            "postgresql": self._target.url,
            "shown": self._target.shown,
            "session_name": self._session_name,
            "limits": limits,
        }

    def _kill(self) -> int:
        """Kill and reap the worker; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        # A worker that ended by itself tells by its code why; one that only closed its pipe is given no time.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.kill()
        code = process.wait()
        _close_pipes(process)
        self._abandoned = isinstance(self._target, PostgresqlTarget)
        return code


def run_select(target: DatabaseTarget, sql: str, limits: Limits | None = None) -> Rows:
    """The complete result of one SELECT, in a worker of its own; raises as Sandbox.run does."""
    with Sandbox(target, limits) as box:
        return box.run(sql)


def probe_jail() -> Walls:
    """Which walls of the jail hold on this machine, proven by attempts in a process of its own; raises DataError."""
    with tempfile.TemporaryFile() as complaints:
        process = _started(complaints, {"LANG": "C.UTF-8"})
        try:
            reply = _first_reply(process, {"probe": True})
        except (FrameTimeout, FrameEnd) as end:
            raise DataError(f"the jail of SQL cannot be tried ({end}): {_last_line(complaints)}") from None
        finally:
            process.kill()
            process.wait()
            _close_pipes(process)
    if (error := _error(reply)) is not None:
        raise error
    return Walls(landlock=int(str(reply["landlock"])), seccomp=reply["seccomp"] is True)


def _started(complaints: IO[bytes], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _START, *CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
        bufsize=0,
        env=environment,
        cwd="/",
        start_new_session=True,  # the terminal's Ctrl-C is the parent's to handle
    )
    os.set_blocking(_fd(process.stdin), False)
    return process


def _first_reply(process: "subprocess.Popen[bytes]", opening: dict[str, object]) -> dict[str, object]:
    deadline = time.monotonic() + _START_SECONDS
    write_frame(_fd(process.stdin), opening, deadline=deadline)
    return read_frame(_fd(process.stdout), most=_REPLY_BYTES_BESIDE, deadline=deadline)


def _environment(target: DatabaseTarget) -> dict[str, str]:
    """Nothing of the parent's environment, but where PostgreSQL's password file and client certificates lie."""
    kept = ("HOME", "PGPASSFILE") if isinstance(target, PostgresqlTarget) else ()
    return {"LANG": "C.UTF-8", **{name: os.environ[name] for name in kept if name in os.environ}}


def _rows(reply: dict[str, object], limits: Limits) -> Rows:
    """`reply` as Rows, or its error raised; FrameEnd for what an honest worker does not send."""
    if (error := _error(reply)) is not None:
        raise error
    columns, rows, ordered = reply.get("columns"), reply.get("rows"), reply.get("ordered")
    if not isinstance(columns, list) or not all(map(_is_text, columns)):
        raise FrameEnd("reply without columns")
    if not isinstance(rows, list) or len(rows) > limits.rows or not isinstance(ordered, bool):
        raise FrameEnd("reply without rows")
    return Rows(tuple(columns), tuple(_row(row, len(columns)) for row in rows), ordered)


def _error(reply: dict[str, object]) -> LoricaError | None:
    return next((kind(_text(reply, key)) for key, kind in ERRORS.items() if key in reply), None)


def _row(row: object, width: int) -> Row:
    if not isinstance(row, list) or len(row) != width:
        raise FrameEnd("reply with a row of another width")
    if not all(value is None or isinstance(value, float) or _is_text(value) or _is_whole(value) for value in row):
        raise FrameEnd("reply with a value that is no scalar")
    return tuple(row)


def _is_text(value: object) -> bool:
    """JSON can say half a surrogate pair, which no database's text holds and nothing can print or store."""
    return isinstance(value, str) and not _SURROGATE.search(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and -MOST_WHOLE < value < MOST_WHOLE


def _text(reply: dict[str, object], key: str) -> str:
    return visible(" ".join(str(reply.get(key, "the worker gave no reason")).split()))[:1000]


def _fd(pipe: IO[bytes] | None) -> int:
    assert pipe is not None, "Popen was asked for pipes"
    return pipe.fileno()


def _close_pipes(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _last_line(complaints: IO[bytes]) -> str:
    complaints.seek(0)
    lines = complaints.read(2**16).decode("utf-8", "replace").strip().splitlines()
    return visible(lines[-1])[:300] if lines else "it said nothing"
