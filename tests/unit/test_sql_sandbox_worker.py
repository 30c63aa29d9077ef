"""The worker process and what its parent believes: environment, resources, death, replies."""

import json
import os
import re
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorica_security.errors import ConfigurationError, DataError, UnsafeSql
from silo_agent.sql_sandbox import Limits, Sandbox, SqliteTarget, sandbox
from silo_agent.sql_sandbox.frames import FrameEnd, read_frame, write_frame
from silo_agent.sql_sandbox.results import ERRORS

LIMITS = Limits(seconds=1, rows=10, result_bytes=2**12, memory_bytes=64 * 2**20)


@pytest.fixture
def database(tmp_path: Path) -> SqliteTarget:
    path = tmp_path / "one.db"
    connection = sqlite3.connect(path)
    connection.executescript("CREATE TABLE t (a); INSERT INTO t VALUES (1);")
    connection.close()
    return SqliteTarget(path)


@pytest.fixture
def box(database: SqliteTarget) -> Iterator[Sandbox]:
    with Sandbox(database, LIMITS) as box:
        yield box


def worker_pid(box: Sandbox) -> int:
    assert box._process is not None
    return box._process.pid


def test_one_worker_serves_many_statements(box: Sandbox) -> None:
    first = worker_pid(box)
    assert {box.run("SELECT a FROM t").rows for _ in range(20)} == {((1,),)}
    with pytest.raises(UnsafeSql):
        box.run("DROP TABLE t")
    assert worker_pid(box) == first


def test_the_worker_has_none_of_the_parents_environment(
    database: SqliteTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORICA_SECRET", "do not tell")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("PGPASSWORD", "do not tell")
    with Sandbox(database, LIMITS) as box:
        entries = Path(f"/proc/{worker_pid(box)}/environ").read_bytes().split(b"\0")
    assert {entry.partition(b"=")[0] for entry in entries if entry} <= {b"LANG", b"LC_CTYPE"}


def test_the_command_line_names_no_database(box: Sandbox, database: SqliteTarget) -> None:
    assert str(database.path).encode() not in Path(f"/proc/{worker_pid(box)}/cmdline").read_bytes()


def test_the_worker_starts_from_any_directory_and_ignores_python_code_found_there(
    database: SqliteTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sqlite3.py").write_text("raise SystemExit('planted')")
    (tmp_path / "lorica_security").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Sandbox(database, LIMITS) as box:
        assert box.run("SELECT a FROM t").rows == ((1,),)


@pytest.mark.parametrize(
    ("name", "most"), [("Max file size", 0), ("Max core file size", 0), ("Max processes", 0), ("Max open files", 64)]
)
def test_resources_are_taken_away(box: Sandbox, name: str, most: int) -> None:
    limits = Path(f"/proc/{worker_pid(box)}/limits").read_text()
    match = re.search(rf"^{name}\s+(\S+)\s+(\S+)", limits, re.MULTILINE)
    assert match is not None
    assert match.groups() == (str(most), str(most))


@pytest.mark.parametrize("name", ["Max address space", "Max cpu time"])
def test_memory_and_processor_time_are_bounded(box: Sandbox, name: str) -> None:
    box.run("SELECT 1")
    limits = Path(f"/proc/{worker_pid(box)}/limits").read_text()
    match = re.search(rf"^{name}\s+(\d+)", limits, re.MULTILINE)
    assert match is not None
    assert int(match[1]) < (2**31 if name == "Max address space" else 60)


def test_the_worker_loads_neither_torch_nor_the_network_stack_of_the_agent() -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; import silo_agent.sql_sandbox.worker, "
        "silo_agent.sql_sandbox.sqlite_session;print([m for m in ('torch', 'numpy', 'grpc', 'sqlalchemy', 'pydantic', "
        "'psycopg') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-I", "-c", code, *sandbox.CODE], text=True).strip() == "[]"


def test_a_worker_killed_between_statements_is_replaced(box: Sandbox) -> None:
    os.kill(worker_pid(box), signal.SIGKILL)
    assert box._process is not None
    box._process.wait()
    assert box.run("SELECT a FROM t").rows == ((1,),)


def test_a_worker_that_stops_answering_is_killed_at_the_deadline_and_replaced(box: Sandbox) -> None:
    stopped = worker_pid(box)
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(UnsafeSql, match="limit seconds"):
        box.run("SELECT a FROM t")
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)
    assert box.run("SELECT a FROM t").rows == ((1,),)


def test_no_process_is_left_behind(database: SqliteTarget) -> None:
    with Sandbox(database, LIMITS) as box:
        pid = worker_pid(box)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ConfigurationError, match="closed"):
        box.run("SELECT 1")


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"columns": ["a"], "rows": [[1]]},
        {"columns": ["a"], "rows": [[1, 2]], "ordered": False},
        {"columns": ["a"], "rows": [[{"x": 1}]], "ordered": False},
        {"columns": ["a"], "rows": [[10**40]], "ordered": False},
        {"columns": [1], "rows": [[1]], "ordered": False},
        {"columns": ["a"], "rows": [[1]] * 11, "ordered": False},
        {"columns": ["a"], "rows": 3, "ordered": False},
        {"columns": ["a"], "rows": [], "ordered": "no"},
        {"columns": ["a"], "rows": [["a\udcff"]], "ordered": False},
        {"columns": ["\ud83d"], "rows": [], "ordered": False},
    ],
)
def test_a_reply_that_no_honest_worker_sends_is_not_believed(reply: dict[str, object]) -> None:
    with pytest.raises(FrameEnd):
        sandbox._rows(reply, LIMITS)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0\0",
        struct.pack(">I", 5) + b"{}",
        struct.pack(">I", 2**31) + b"{}",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 2) + b"{'",
        struct.pack(">I", 9) + b'{"a":NaN}',
        struct.pack(">I", 11) + b'{"a":1e999}',
        struct.pack(">I", 12) + b'{"a":-1e999}',
        struct.pack(">I", 60_000) + b"[" * 60_000,
    ],
)
def test_a_broken_frame_ends_the_conversation(raw: bytes) -> None:
    reader, writer = os.pipe()
    try:
        os.write(writer, raw)
        os.close(writer)
        with pytest.raises(FrameEnd):
            read_frame(reader, most=2**20)
    finally:
        os.close(reader)


@pytest.mark.parametrize("key", list(ERRORS))
def test_an_error_of_a_worker_paints_nothing_on_a_terminal(key: str) -> None:
    with pytest.raises(ERRORS[key]) as caught:
        sandbox._rows({key: "no such column: \x1b[2J\u202e\udcffä\n"}, LIMITS)
    assert str(caught.value) == r"no such column: \x1b[2J\u202e\udcffä"


def test_a_complaint_of_a_worker_paints_nothing_on_a_terminal(
    database: SqliteTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_START", r"import sys; sys.exit('\x1b[2Jended')")
    with pytest.raises(DataError, match=r"did not start.*: \\x1b\[2Jended$"), Sandbox(database, LIMITS):
        pass


def test_frames_carry_text_and_numbers_unchanged() -> None:
    message: dict[str, object] = {"text": "Größe\udcff\x01", "numbers": [1, 2.5, None, True, 2**63]}
    reader, writer = os.pipe()
    try:
        write_frame(writer, message)
        assert read_frame(reader, most=1000) == message
        assert json.loads(json.dumps(message)) == message
    finally:
        os.close(reader)
        os.close(writer)


def test_a_worker_that_cannot_start_says_why(database: SqliteTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_START", "import no_such_module")
    with pytest.raises(DataError, match=r"did not start.*ModuleNotFoundError"), Sandbox(database, LIMITS):
        pass
