"""The benchmark of the status page, at a small size: each look is answered, and of what it should be."""

from pathlib import Path

import pytest
from rich.console import Console

from lorica.bench import status_page as bench
from lorica.bench.figures import read_figures
from lorica_coordinator.edges.status_page import page


def test_every_kind_of_look_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench, page):
        monkeypatch.setattr(module, "FRESH_S", 0.01)
    out = tmp_path / "out.json"
    choice = bench.Choice(silos=3, rounds=12, repeats=2, work=tmp_path, out=out)
    first, quiet, new, silos, plans, _ = bench.run_bench_status_page(choice, Console(quiet=True))
    assert {(one["silos"], one["rounds"]) for one in read_figures(out)[1]} == {(3, 12)}
    assert first.bytes > new.bytes >= quiet.bytes  # the whole page; and a round more in its list
    assert silos.bytes > plans.bytes > 12 * len("[1,0.5,0.5,null]")
    assert list(tmp_path.iterdir()) == [out]
