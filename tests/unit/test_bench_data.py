"""The benchmark of a silo's lines, at the smallest size: both ways do their work, and what they find is of these
lines."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lorica.bench import data as bench
from lorica.bench.data import WAYS, Choice, run_bench_data
from lorica.bench.figures import read_figures
from lorica_security.errors import StateError


def chosen(work: Path) -> Choice:
    return Choice(lines=[150], characters=60, steps=1, size="micro", work=work, out=work / "out.json")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each process would do, here: to import torch takes longer than all of it."""

    real = subprocess.run

    def run(command: list[str], **how: Any) -> "subprocess.CompletedProcess[str]":
        if command[:-1] != [sys.executable, "-c", bench._CHILD]:
            return real(command, **how)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            bench.main(command[-1])
        return subprocess.CompletedProcess(command, 0, said.getvalue(), "")

    monkeypatch.setattr(bench.subprocess, "run", run)


@pytest.mark.usefixtures("in_this_process")
def test_lines_are_read_tokenised_and_trained_on_from_a_spool_and_from_memory(tmp_path: Path) -> None:
    found = run_bench_data(chosen(tmp_path), Console(quiet=True))
    assert [one.way for one in found] == list(WAYS)
    assert {(one.lines, one.data_bytes) for one in found} == {(150, found[0].data_bytes)}
    assert 150 * 60 < found[0].data_bytes < 150 * 250
    for one in found:
        assert min(one.read_s, one.tokenise_s, one.step_s) > 0.0
        assert one.peak_bytes >= one.data_peak_bytes
    _, figures = read_figures(tmp_path / "out.json")
    assert [one["way"] for one in figures] == list(WAYS)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_process_that_fails_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_CHILD", "import sys; sys.exit('there is no room')")
    with pytest.raises(StateError, match=r"measuring spool failed: \['there is no room'\]"):
        run_bench_data(chosen(tmp_path), Console(quiet=True))
    assert list(tmp_path.iterdir()) == []
