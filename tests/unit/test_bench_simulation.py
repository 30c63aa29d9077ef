"""The benchmark of simulated rounds, at the smallest size; and that a simulation waits for no disk, and nobody else is
spared that."""

import os
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from lorica.bench.figures import read_figures
from lorica.bench.simulation import stopwatch
from lorica.bench.simulation.run import FOLDER, Choice, run_bench_simulation
from lorica.bench.simulation.stopwatch import EVALUATION, PARTS, REST, TRAINING, Stopwatch
from lorica.simulation import disk
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import SiloName, federation_name
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.training import local_trainer


def chosen(work: Path, **changes: object) -> Choice:
    asked = {"sizes": ["micro"], "largest": 8, "rounds": 1, "threads": 1, "work": work, "out": work / "out.json"}
    return Choice(**{**asked, **changes})  # type: ignore[arg-type]


def test_the_parts_of_a_round_are_all_of_it(tmp_path: Path) -> None:
    somebodys = tmp_path / "simulation" / "summary.json"  # of `lorica simulate` without --out
    somebodys.parent.mkdir()
    somebodys.touch()
    (figures,) = run_bench_simulation(chosen(tmp_path), Console(quiet=True))
    assert set(figures.shares) == set(PARTS)
    assert sum(figures.shares.values()) == pytest.approx(1, abs=0.01)
    assert min(figures.shares[part] for part in (TRAINING, EVALUATION, REST)) > 0.01
    assert (figures.silos, figures.rounds) == (8, 1)
    assert figures.examples == 8 + 5 + 6 * 4
    (written,) = read_figures(tmp_path / "out.json")[1]
    assert written["shares"] == figures.shares
    assert not (tmp_path / FOLDER).exists()
    assert somebodys.exists(), "it empties no folder but its own"


def test_time_counts_for_the_innermost_part_and_nothing_stays_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])

    def batches() -> None:
        now[0] += 1

    def training() -> None:
        now[0] += 2
        inner()
        now[0] += 4

    watch = Stopwatch()
    inner = watch._timed(batches, "batches")
    watch._timed(training, "training")()
    assert {part: took for part, took in watch._parts.items() if took} == {"training": 6.0, "batches": 1.0}
    before = local_trainer.collate
    with watch.running():
        assert local_trainer.collate is not before
    assert local_trainer.collate is before


def test_an_unknown_size_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'gigantic' is unknown"):
        chosen(tmp_path, sizes=["mini", "gigantic"])


def synchronous(path: Path) -> int:
    """Of a coordinator's state that has just been opened there: what SQLite waits for at the end of a transaction."""
    store = SqlRoundStore(path, federation_name("clinics"))
    try:
        with store._transaction() as connection:
            return int(connection.exec_driver_sql("PRAGMA synchronous").scalar_one())
    finally:
        store.close()


def synchronous_of_journal(path: Path, **how: bool) -> int:
    """The same of a silo's journal."""
    with closing(RoundJournal(path, updates=path.parent, silo=SiloName("clinic"), **how)) as journal:
        return int(journal._connection.execute("PRAGMA synchronous").fetchone()[0])


def test_only_within_a_simulation_is_the_disk_not_waited_for(tmp_path: Path) -> None:
    sync = os.fsync
    assert synchronous(tmp_path / "before.db") == 2, "FULL"
    with disk.not_waited_for():
        assert synchronous(tmp_path / "within.db") == 0, "OFF"
        os.fsync(-1)  # of nothing, which is an error where it is waited for
    assert os.fsync is sync
    assert synchronous(tmp_path / "after.db") == 2
    assert synchronous_of_journal(tmp_path / "agent.db") == 2
    assert synchronous_of_journal(tmp_path / "simulated.db", synced=False) == 0


def test_the_disk_is_waited_for_again_after_a_simulation_that_failed() -> None:
    sync = os.fsync
    with pytest.raises(ConfigurationError), disk.not_waited_for():
        raise ConfigurationError("a simulation that cannot be")
    assert os.fsync is sync
