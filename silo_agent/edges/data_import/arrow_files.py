"""Rows of Parquet and Arrow files, by pyarrow, which is no part of a plain installation.

Only the columns that count are read, batch by batch, and each batch is validated before it is looked into: a file says what it
likes of its own offsets. Text is read as a dictionary and its numbers, so that a small file cannot become a large memory.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from security.errors import ConfigurationError, DataError
from silo_agent.edges.data_import.tables import Reading, Row

MAX_BYTES = 2 << 30
"""Of the columns that count, unpacked."""
_BATCH_ROWS = 1024


def require_pyarrow(shown: str) -> None:
    """Raises ConfigurationError naming the extra where pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"{shown} is a Parquet or Arrow file, and pyarrow is not installed: pip install 'lorica[import]', or save the data as CSV "
            "or JSON lines"
        ) from error


def parquet(path: Path, shown: str, reading: Reading) -> Iterator[Row]:
    require_pyarrow(shown)
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        plain = ParquetFile(path)
        wanted = _wanted(list(plain.schema_arrow.names), shown, reading)
        _check_size(plain.metadata, wanted, shown)
        texts = [name for name in wanted if _is_text(plain.schema_arrow.field(name).type)]
        file = ParquetFile(path, read_dictionary=texts)
        yield from _rows(file.iter_batches(batch_size=_BATCH_ROWS, columns=wanted, use_threads=False), wanted, shown)
    except (ArrowException, OSError, ValueError) as error:
        raise _unreadable(shown, error) from error


def arrow(path: Path, shown: str, reading: Reading) -> Iterator[Row]:
    """An Arrow stream, as Hugging Face datasets writes it to a disk, or an Arrow file."""
    require_pyarrow(shown)
    from pyarrow import ArrowException, ipc, memory_map

    try:
        with memory_map(str(path)) as mapped:
            file = mapped.read(6) == b"ARROW1"
            mapped.seek(0)
            reader: Any = ipc.open_file(mapped) if file else ipc.open_stream(mapped)
            wanted = _wanted(list(reader.schema.names), shown, reading)
            batches = (
                (reader.get_batch(number) for number in range(reader.num_record_batches)) if file else iter(reader)
            )
            yield from _rows(batches, wanted, shown)
    except (ArrowException, OSError, ValueError) as error:
        raise _unreadable(shown, error) from error


def _wanted(columns: list[str], shown: str, reading: Reading) -> list[str]:
    """Of `columns` those that count; none where one that is required is missing, which is a problem then."""
    if not reading.has_columns(shown, columns):
        return []
    return [name for name in columns if name in reading.wanted]


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _unreadable(shown: str, error: Exception) -> DataError:
    return DataError(f"{shown} cannot be read ({' '.join(str(error).split())[:200]}): replace it")


def _check_size(metadata: Any, wanted: list[str], shown: str) -> None:
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.partition(".")[0] in wanted)
    if size > MAX_BYTES:
        raise DataError(f"{shown} has {size:,} bytes of text, more than {MAX_BYTES:,}: divide it")


def _rows(batches: Iterator[Any], wanted: list[str], shown: str) -> Iterator[Row]:
    number = size = 0
    if not wanted:
        return
    for batch in batches:
        batch = batch.select(wanted)
        batch.validate(full=True)
        size += batch.nbytes
        if size > MAX_BYTES:
            raise DataError(f"{shown} has more than {MAX_BYTES:,} bytes of text: divide it")
        for values in zip(*map(_values, batch.columns), strict=True):
            number += 1
            yield Row(number, dict(zip(wanted, values, strict=True)))


def _values(column: Any) -> list[object]:
    """Each text of a dictionary is made once, however often it stands in the column."""
    from pyarrow import types

    if not types.is_dictionary(column.type):
        return list(column.to_pylist())
    texts = column.dictionary.to_pylist()
    return [None if number is None else texts[number] for number in column.indices.to_pylist()]
