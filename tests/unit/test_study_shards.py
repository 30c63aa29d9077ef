"""A study in shards: every run is of one of them, they share a folder, and together they are the whole study."""

import io
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.silos import keep_first, write_silo
from lorica.experiments import run as of_study
from lorica.experiments.definition import Study
from lorica.experiments.results_file import append_result, lines_of, results, results_files
from lorica.experiments.run import run_study
from lorica.experiments.shard import MOST, WHOLE, Shard
from lorica.simulation.workers.children import children
from lorica_security.console.strict_toml import parse_toml
from lorica_security.errors import ConfigurationError, Conflict
from lorica_security.host.process_lock import ProcessLock

STUDY = """
name = "shards"
silos = "silos"
seeds = [1]
setups = ["fedopt", "fedopt-lorar", "fedavg"]
[start]
size = "micro"
[plan]
"schedule.rounds" = 1
"training.epochs" = 1
"training.batch_size" = 4
"training.loss_reduction" = "as_published"
"training.loss_log_steps" = 1
"training.schema_in_input" = false
"training.max_input_tokens" = 24
"training.max_output_tokens" = 12
"evaluation.initial" = false
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for silo in (CLINIC, INSURER):
        write_silo(folder / "silos" / silo.name, silo, seed=1)
        for split, most in (("train", 12), ("dev", 2), ("test", 2)):
            keep_first(folder / "silos" / silo.name / f"{split}.jsonl", most)
    return folder


def study() -> Study:
    return parse_toml(Study, STUDY, "study.toml")


def done(out: Path, data: Path, *shards: Shard, jobs: int = 1) -> dict[str, dict[str, Any]]:
    """Lines of results by run, but for how long each took and the commit, which another window may move meanwhile."""
    left_out = {"seconds", "commit"}
    for shard in shards:
        run_study(study(), out, data=data, device="cpu", threads=1, jobs=jobs, shard=shard, console=Console(quiet=True))
    return {line["run"]: {key: value for key, value in line.items() if key not in left_out} for line in results(out)}


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the study, undivided, by two jobs."""
    out = tmp_path_factory.mktemp("whole")
    done(out, data, WHOLE, jobs=2)
    return out


def test_shards_together_are_the_whole_study_line_by_line(tmp_path: Path, data: Path, whole: Path) -> None:
    shards = Shard(2, 2), Shard(1, 2)
    parts = done(tmp_path / "parts", data, *shards)
    assert [path.name for path in results_files(tmp_path / "parts")] == ["results-1.jsonl", "results-2.jsonl"]
    assert [len(list(lines_of(path))) for path in results_files(tmp_path / "parts")] == [2, 1]
    assert parts == done(whole, data, WHOLE)
    pages = [(out / "report.md").read_text() for out in (tmp_path / "parts", whole)]
    assert pages[0] == pages[1]
    assert done(tmp_path / "parts", data, *shards, WHOLE) == parts, "what any shard has done is not done again"
    assert not (tmp_path / "parts" / "results.jsonl").exists()


def killed_at(function: str, *, before: bool, out: Path, data: Path) -> None:
    """The first shard, in a process of its own, which kills itself where it first calls `function` of a study's run."""
    real: Callable[..., object] = getattr(of_study, function)

    def meet(*words: object, **more: object) -> None:
        if not before:
            real(*words, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(of_study, function, meet)
    done(out, data, Shard(1, 2))


@pytest.mark.parametrize(("function", "before", "lines"), [("scores", True, 0), ("append_result", False, 1)])
def test_a_shard_that_was_killed_goes_on_beside_the_other(
    tmp_path: Path, data: Path, whole: Path, function: str, before: bool, lines: int
) -> None:
    shard = children().Process(
        target=killed_at, args=(function,), kwargs={"before": before, "out": tmp_path, "data": data}
    )
    shard.start()
    done(tmp_path, data, Shard(2, 2))  # while the first is at work
    shard.join()
    assert shard.exitcode == -signal.SIGKILL
    assert len(list(lines_of(*tmp_path.glob("results-1.jsonl")))) == lines
    assert done(tmp_path, data, Shard(1, 2)) == done(whole, data, WHOLE)
    assert list((tmp_path / "runs").iterdir()) == [], "what a kill left of a run that is done is deleted"


def test_a_shard_is_at_work_once_and_others_beside_it(tmp_path: Path, data: Path) -> None:
    for run in study().runs():
        append_result(tmp_path, {"run": run.key, "rounds": [], "test": {}})
    with ProcessLock(tmp_path / "lock-2", "study"), pytest.raises(Conflict, match="another study"):
        done(tmp_path, data, Shard(2, 3))


def test_a_run_that_another_shard_does_is_left_to_it(tmp_path: Path, data: Path) -> None:
    """Also where the study was divided otherwise, so that shards overlap; and what was done meanwhile is not again."""
    first, *others = study().runs()
    (tmp_path / "locks").mkdir()
    for run in others:
        append_result(tmp_path, {"run": run.key, "rounds": [], "test": {}}, Shard(2, 2))
    console = Console(file=io.StringIO())
    with ProcessLock(tmp_path / "locks" / first.key, "study"), suppress(Exception):  # made-up lines make no report
        run_study(study(), tmp_path, data=data, device="cpu", threads=1, shard=Shard(1, 3), console=console)
    assert "left to another shard: FedOPT, seed 1" in console.file.getvalue()  # type: ignore[attr-defined]
    assert {line["run"] for line in results(tmp_path)} == {run.key for run in others}


def test_a_run_is_its_shards_until_its_line_is_written(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a shard of another division begins in the same folder, and the line is there twice."""
    seen = []

    def append(out: Path, facts: dict[str, Any], shard: Shard) -> None:
        with pytest.raises(Conflict), ProcessLock(out / "locks" / facts["run"], "study"):
            pass
        append_result(out, facts, shard)
        seen.append(facts["run"])

    monkeypatch.setattr(of_study, "append_result", append)
    first, *others = study().runs()
    for run in others:
        append_result(tmp_path, {"run": run.key, "rounds": [], "test": {}}, Shard(2, 2))
    with suppress(Exception):  # made-up lines make no report
        done(tmp_path, data, Shard(1, 3))
    assert seen == [first.key]
    assert not (tmp_path / "runs" / first.key).exists()


def test_lines_of_jobs_that_end_together_are_whole(tmp_path: Path) -> None:
    facts = [{"run": f"{number}", "long": "x" * 100_000} for number in range(24)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda one: append_result(tmp_path, one), facts))
    assert sorted(line["run"] for line in results(tmp_path)) == sorted(one["run"] for one in facts)
    assert (tmp_path / "results.jsonl").read_text().count("\n") == len(facts)


def test_more_shards_than_runs_are_refused(tmp_path: Path, data: Path) -> None:
    with pytest.raises(ConfigurationError, match="study shards has fewer runs than the 4 shards: use fewer"):
        done(tmp_path, data, Shard(4, 4))


@given(of=st.integers(1, 40), runs=st.integers(0, 120))
def test_every_run_is_of_one_shard_and_shards_are_even(of: int, runs: int) -> None:
    parts = [Shard(number, of).of_all(range(runs)) for number in range(1, of + 1)]
    assert sorted(run for part in parts for run in part) == list(range(runs))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    "text", ["", "0/4", "5/4", "1", "1/0", "a/b", "1/4/2", "-1/4", "01/4", "1 /4", f"1/{MOST + 1}", "1/٤"]
)
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--shard .* is no I/N"):
        Shard.from_text(text)


def test_a_shard_is_read() -> None:
    assert Shard.from_text("3/16") == Shard(3, 16)


def test_who_is_patient_waits_for_the_holder(tmp_path: Path) -> None:
    entered, order = threading.Event(), list[str]()

    def wait() -> None:
        entered.set()
        with ProcessLock(tmp_path / "common", "study", patient=True):
            order.append("second")

    other = threading.Thread(target=wait)
    with ProcessLock(tmp_path / "common", "study"):
        other.start()
        entered.wait()
        order.append("first")
    other.join()
    assert order == ["first", "second"]
