"""The process that reads one Parquet or Arrow file: no environment, few resources, rows out as frames.

Only the columns that count are read, and each batch is validated before it is looked into: a file says what it likes of
its own offsets. One batch is in memory at a time, and of it some rows as values: files may be larger than memory.
"""

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from silo_agent.sql_sandbox.frames import FrameEnd, write_frame

_BATCH_ROWS = 256
_CPU_SECONDS = 600
_OPEN_FILES = 64


def main(order: Mapping[str, Any]) -> None:
    """Send the columns, each row and how many there were, or why it failed; the parent may end this process at any
    time."""
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # others take room ahead, which would count as memory
    from pyarrow import ArrowException

    readers = {"parquet": _parquet, "arrow": _arrow}
    try:
        _take_resources_away(order["memory_bytes"])
        number = 0
        columns, batches = readers[order["kind"]](order["path"], order["wanted"])
        write_frame(replies, {"columns": columns})
        for batch in batches:
            batch = batch.select([name for name in columns if name in order["wanted"]])
            batch.validate(full=True)
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                some = batch.slice(first, _BATCH_ROWS)
                for row in zip(*(column.to_pylist() for column in some.columns), strict=True):
                    number += 1
                    write_frame(replies, {"row": [_plain(value) for value in row]})
        write_frame(replies, {"end": number})
    except FrameEnd:
        return
    except (ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        write_frame(replies, {"failed": str(error) or type(error).__name__})


def _parquet(path: str, wanted: list[str]) -> tuple[list[str], Iterator[Any]]:
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path)
    columns = list(file.schema_arrow.names)
    chosen = [name for name in columns if name in wanted]
    return columns, file.iter_batches(batch_size=_BATCH_ROWS, columns=chosen, use_threads=False)


def _arrow(path: str, wanted: list[str]) -> tuple[list[str], Iterator[Any]]:
    """A stream of batches, as Hugging Face datasets writes it to a disk, or a file of them. It is read, not mapped: a
    map of all of it would count as memory."""
    from pyarrow import OSFile, ipc

    source = OSFile(path)
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if not is_file:
        stream = ipc.open_stream(source)
        return list(stream.schema.names), iter(stream)
    file = ipc.open_file(source)
    return list(file.schema.names), (file.get_batch(number) for number in range(file.num_record_batches))


def _plain(value: object) -> object:
    """Text and whole numbers as they are, anything else as a list of how it is shown."""
    return value if value is None or type(value) in (str, int) else [str(value)[:200]]


def _take_resources_away(memory_bytes: int) -> None:
    """No file may grow and no core be dumped; memory is what is mapped now plus the limit."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for kind, value in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
    ):
        _, hard = resource.getrlimit(kind)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))
