"""The benchmark of many silos: what the masked journal comes to, what is read of a round, and what it refuses."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lorica.bench.figures import read_figures
from lorica.bench.many.journal import measure_journal
from lorica.bench.many.run import Choice, first_entered, run_bench_many
from lorica_security.errors import ConfigurationError, StateError


def test_what_an_attempt_writes_grows_with_the_square_of_its_silos(tmp_path: Path) -> None:
    (tmp_path / "6").mkdir()
    (tmp_path / "12").mkdir()
    few, many = measure_journal(tmp_path / "6", 6), measure_journal(tmp_path / "12", 12)
    assert (few.silos, many.silos) == (6, 12)
    assert few.events > 4 * 6
    assert 3 < many.event_bytes / few.event_bytes < 4.5
    for one in (few, many):
        assert one.event_bytes < one.written_bytes < 1.1 * one.event_bytes + 5 * 4096 * one.events
        assert one.event_bytes < one.erased_bytes < 3 * one.event_bytes


def test_the_journal_alone_is_printed_and_written(tmp_path: Path) -> None:
    printed, out = Console(file=StringIO(), width=120), tmp_path / "many.json"
    journals, rounds = run_bench_many(Choice(silos=(3, 4), parameters=0, work=tmp_path / "work", out=out), printed)
    assert [one.silos for one in journals] == [3, 4]
    assert rounds == []
    written = read_figures(out)[1]
    assert [one["event_bytes"] for one in written["journals"]] == [one.event_bytes for one in journals]
    assert list((tmp_path / "work").iterdir()) == []


def test_phases_are_read_from_the_coordinators_log_as_they_were_entered_first(tmp_path: Path) -> None:
    log = tmp_path / "coordinator.log"
    phases = ("masking", "masking", "aggregating", "finished")
    told = [
        {"event": "transition", "phase": phase, "timestamp": f"2026-11-27T05:07:1{second}.5Z"}
        for second, phase in enumerate(phases)
    ]
    log.write_text("\n".join(["no JSON", '{"event": "resumed", "phase": "idle"}', *map(json.dumps, told)]))
    entered = first_entered(log)
    assert set(entered) == set(phases)
    assert entered["aggregating"] - entered["masking"] == 2
    assert entered["finished"] - entered["aggregating"] == 1


def test_a_log_without_a_model_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "coordinator.log"
    log.write_text('{"event": "transition", "phase": "gathering", "timestamp": "2026-11-27T05:07:18Z"}')
    with pytest.raises(StateError, match="no round that was aggregated, but of gathering"):
        first_entered(log)


@pytest.mark.parametrize(("silos", "parameters", "words"), [((8, 2), 0, "SILOS=2"), ((8,), 7, "PARAMETERS=7")])
def test_what_cannot_be_measured_is_refused(silos: tuple[int, ...], parameters: int, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Choice(silos=silos, parameters=parameters, work=Path(), out=None)


def test_more_silos_than_the_machine_has_memory_for_are_refused_before_any_starts(tmp_path: Path) -> None:
    asked = Choice(silos=(100_000,), parameters=25_000_000, work=tmp_path, out=None)
    with pytest.raises(StateError, match=r"100000 silos .* GB of memory"):
        asked.require_memory()
