"""Rows of Arrow files larger than the memory of the process that reads them: batch by batch, of a batch some rows."""

from pathlib import Path
from typing import Any, Literal

import pytest

from silo_agent.edges.data_import import arrow_files
from silo_agent.edges.data_import.arrow_files import arrow_rows
from silo_agent.edges.data_import.findings import Findings
from silo_agent.edges.data_import.tables import Reading

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: make install")
MIB = 1 << 20


def written(path: Path, batches: list[Any], *, as_file: bool) -> None:
    from pyarrow import ipc

    with path.open("wb") as target:
        maker = ipc.new_file if as_file else ipc.new_stream
        with maker(target, batches[0].schema) as sink:
            for batch in batches:
                sink.write_batch(batch)


def questions(path: Path, kind: Literal["parquet", "arrow"] = "arrow") -> list[object]:
    reading = Reading(wanted={"question"}, required={"question": "question"}, findings=Findings())
    return [row.values["question"] for row in arrow_rows(path, "a file", kind, reading)]


@pytest.mark.parametrize(("as_file", "count", "memory"), [(False, 20, 24), (True, 64, 64)], ids=["stream", "file"])
def test_a_file_larger_than_memory_is_read_batch_by_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_file: bool, count: int, memory: int
) -> None:
    """A batch has 4 MiB. Of a file with an index pyarrow reads in threads of its own, whose stacks count as well."""
    path = tmp_path / "data.arrow"
    payload = pyarrow.array([bytes(4 * MIB)])
    names = ["question", "payload"]
    batches = [pyarrow.record_batch([pyarrow.array([f"q{number}"]), payload], names=names) for number in range(count)]
    written(path, batches, as_file=as_file)
    assert path.stat().st_size > memory * MIB
    monkeypatch.setattr(arrow_files, "MAX_MEMORY", memory * MIB)
    assert questions(path) == [f"q{number}" for number in range(count)]
    path.unlink()


def test_of_one_batch_some_rows_at_a_time_are_made_into_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data.arrow"
    texts = [f"{number:04}" + "x" * 20_000 for number in range(2000)]
    written(path, [pyarrow.record_batch([pyarrow.array(texts)], names=["question"])], as_file=False)
    monkeypatch.setattr(arrow_files, "MAX_MEMORY", 70 * MIB)  # once 40 MB, not twice
    assert questions(path) == texts
