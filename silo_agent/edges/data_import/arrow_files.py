"""Rows of Parquet and Arrow files, which pyarrow reads in a process of its own.

pyarrow is no part of a plain installation, and it is C++ that a crafted file can end, or have take all memory: then
that process ends, and the file is refused. Of what it says, each row is checked.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lorica_security.errors import ConfigurationError, DataError
from silo_agent.edges.data_import.tables import NoText, Reading, Row
from silo_agent.sql_sandbox.frames import FrameEnd, read_frame

MAX_BYTES = 2 << 30
"""Of all rows of one file."""
MAX_ROW_BYTES = 1 << 24
MAX_MEMORY = 4 << 30
"""Of the process that reads, beyond what its code takes."""

_NO_ROOM_AHEAD = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Of glibc: no heap for each of pyarrow's threads, each of 64 MiB of addresses, and batches go back when they are done.
How many threads there are, and so what counted as memory, was chance."""
# -I ignores the environment and the working directory; the code is found where this process found it.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from silo_agent.edges.data_import.arrow_worker import main; main(json.loads(sys.argv[2]))"
)


def arrow_rows(path: Path, shown: str, kind: Literal["parquet", "arrow"], reading: Reading) -> Iterator[Row]:
    """Raises ConfigurationError where pyarrow is not installed, DataError where the file cannot be read or holds too
    much."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigurationError(
            f"{shown} is a Parquet or Arrow file, and pyarrow is not installed: install Lorica's wheel with "
            "[silo,import], or save the data as CSV or JSON lines"
        )
    order = {"path": str(path.absolute()), "kind": kind, "wanted": sorted(reading.wanted), "memory_bytes": MAX_MEMORY}
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _START, json.dumps([place for place in sys.path if place]), json.dumps(order)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"LANG": "C.UTF-8", **_NO_ROOM_AHEAD},
    )
    assert process.stdout is not None
    with process.stdout as replies:
        try:
            yield from _rows(replies.fileno(), shown, reading)
        except FrameEnd:
            process.kill()
            raise DataError(
                f"{shown} cannot be read (its reader ended, exit code {process.wait()}): replace it"
            ) from None
        finally:
            process.kill()
            process.wait()


def _rows(replies: int, shown: str, reading: Reading) -> Iterator[Row]:
    columns = _reply(replies, shown).get("columns")
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise FrameEnd("a reply without columns")
    if not reading.has_columns(shown, columns):
        return
    names = [name for name in columns if name in reading.wanted]
    number = size = 0
    while "end" not in (reply := _reply(replies, shown)):
        number += 1
        values = _values(reply.get("row"), len(names))
        size += sum(len(value) for value in values if isinstance(value, str))
        if size > MAX_BYTES:
            raise DataError(f"{shown} holds more than {MAX_BYTES:,} characters: divide it")
        yield Row(number, dict(zip(names, values, strict=True)))


def _reply(replies: int, shown: str) -> dict[str, object]:
    reply = read_frame(replies, most=MAX_ROW_BYTES)
    if "failed" in reply:
        raise DataError(f"{shown} cannot be read ({' '.join(str(reply['failed']).split())[:200]}): replace it")
    return reply


def _values(row: object, width: int) -> list[object]:
    if not isinstance(row, list) or len(row) != width:
        raise FrameEnd("a reply that is no row")
    return [_value(value) for value in row]


def _value(value: object) -> object:
    if isinstance(value, list):  # how the reader shows what is neither text nor a whole number
        return NoText("".join(map(str, value[:1])))
    return value if value is None or type(value) in (str, int) else NoText(str(value))
