"""The benchmark of plain training: real trainers at the smallest size, and that both do the same work."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from lorica.bench.figures import read_figures
from lorica.bench.private.measure import random_t5, records
from lorica.bench.trainers.measure import TRAININGS, Stopwatch
from lorica.bench.trainers.run import Choice, Entry, run_bench_training
from lorica.bench.trainers.task import WAYS, Measured, Task, Way
from lorica.documentation import bench_tables
from lorica_security.errors import ConfigurationError, StateError

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)
EXAMPLES = 6


def task(way: Way) -> Task:
    return Task(
        way=way,
        size="micro",
        batch=EXAMPLES,
        accumulation=1,
        steps=0,
        precision="float32",
        device="cpu",
        threads=1,
    )


def chosen(**changes: object) -> Choice:
    asked = {
        "sizes": ["micro"],
        "batch": 2,
        "accumulation": 1,
        "steps": 2,
        "turns": 1,
        "precision": "float32",
        "device": "cpu",
        "threads": 1,
        "out": None,
    }
    return Choice(**{**asked, **changes})  # type: ignore[arg-type]


def measured(step_s: float) -> Measured:
    return Measured(
        parameters=1,
        step_s=step_s,
        cpu_s=2 * step_s,
        before_s=1.0,
        after_s=0.0,
        peak_bytes=1,
        examples="",
        loss=1.0,
    )


def test_both_trainers_make_the_same_step() -> None:
    """Of all examples in one batch and without dropout, so that neither their order nor any draw is between them."""
    trained = []
    for way in WAYS:
        model = random_t5("micro", dropout=0.0)
        before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()
        watch = Stopwatch(torch.device("cpu"))
        TRAININGS[way](task(way), model, records(EXAMPLES, pieces=1000), watch)()
        assert len(watch.ends) == 1
        trained.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) - before)
    moved = [step.abs() > 1e-6 for step in trained]
    assert float(moved[0].float().mean()) > 0.3
    # AdamW's first step is as long for a gradient that is rounding alone.
    assert float((moved[0] != moved[1]).float().mean()) < 1e-3
    assert float((trained[0] - trained[1]).norm()) < 1e-2 * float(trained[0].norm())


def test_both_stand_beside_one_another(tmp_path: Path) -> None:
    out = tmp_path / "bench-training.json"
    own, other = run_bench_training(chosen(out=out), QUIET)
    assert (own.task.way, other.task.way) == WAYS
    assert own.turns[0].examples == other.turns[0].examples
    assert own.time_ratios is None
    assert other.time_ratios is not None
    assert other.time_ratios[0] == pytest.approx(other.turns[0].step_s / own.turns[0].step_s, abs=1e-3)
    assert own.turns[0].peak_bytes > 4 * own.turns[0].parameters
    written = read_figures(out)[1]
    assert [one["way"] for one in written] == list(WAYS)
    assert written[0]["examples_per_s"] == pytest.approx(2 / own.turns[0].step_s, rel=1e-3)
    _, rows = bench_tables.trainers(written)
    assert [row[1] for row in rows] == list(WAYS)


def test_medians_are_of_turns() -> None:
    turns = [measured(1.0), measured(9.0), measured(2.0)]
    told = Entry(task=task("lorica"), turns=turns, time_ratios=None, cpu_ratios=None).to_json()
    assert (told["step_s"], told["cpu_s"], told["turns"]) == (2.0, 4.0, 3)
    assert told["examples_per_s"] == EXAMPLES / 2.0


def test_a_trainer_that_fails_is_named() -> None:
    with pytest.raises(StateError, match=r"^micro, lorica: .*(?i:device)"):
        run_bench_training(chosen(device="nowhere"), QUIET)


def test_a_size_that_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="gigantic"):
        chosen(sizes=["gigantic"])
