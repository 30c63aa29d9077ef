"""The benchmark of private training: real processes at the smallest size, what it writes, what it refuses."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from lorica.bench.figures import read_figures
from lorica.bench.private import run
from lorica.bench.private.measure import Task, model_for, records
from lorica.bench.private.run import Choice, choice, run_bench_dp
from lorica.bench.private.ways import WAYS
from lorica.documentation import bench_tables
from lorica_security.errors import ConfigurationError, StateError
from silo_agent.training.data.batches import collate
from silo_agent.training.private.clipping import clipping
from silo_wire.plans.sections.training import TrainingSection

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)


def chosen(**changes: object) -> Choice:
    asked = {
        "sizes": ["micro"],
        "ways": ["ghost", "plain"],
        "batch": 4,
        "physical": 2,
        "steps": 1,
        "turns": 1,
        "device": "cpu",
        "threads": 1,
        "out": None,
    }
    return choice(**{**asked, **changes})  # type: ignore[arg-type]


def test_private_beside_plain(tmp_path: Path) -> None:
    out = tmp_path / "bench-dp.json"
    plain, ghost = run_bench_dp(chosen(out=out), QUIET)
    assert (plain.task.way, ghost.task.way) == ("plain", "ghost")
    assert plain.measured.noise_s == 0.0
    assert 0.0 < ghost.measured.noise_s < ghost.measured.step_s
    assert ghost.measured.trained_parameters == ghost.measured.parameters == plain.measured.parameters
    assert min(plain.measured.peak_bytes, ghost.measured.peak_bytes) > 4 * plain.measured.parameters
    assert plain.time_ratio is None
    assert ghost.time_ratio == pytest.approx(ghost.measured.step_s / plain.measured.step_s, abs=1e-3)
    assert ghost.memory_ratio == pytest.approx(ghost.measured.peak_bytes / plain.measured.peak_bytes, abs=1e-3)
    written = read_figures(out)[1]
    assert [one["way"] for one in written] == ["plain", "ghost"]
    assert written[1]["noise_share"] == pytest.approx(ghost.measured.noise_s / ghost.measured.step_s, abs=1e-3)


def test_figures_are_medians_over_turns_and_ratios_of_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measuring is in another process, and its times are nobody's to say: here they are given."""
    steps = {"plain": iter([1.0, 5.0, 2.0]), "ghost": iter([3.0, 5.0, 4.0])}

    def told(_: str, task: dict[str, object], *, name: str) -> dict[str, object]:
        step_s = next(steps[str(task["way"])])
        known = {"parameters": 1, "trained_parameters": 1, "noise_s": 0.1, "peak_bytes": 7}
        return {**known, "step_s": step_s, "cpu_s": 2 * step_s}

    monkeypatch.setattr(run, "measured_apart", told)
    plain, ghost = run_bench_dp(chosen(turns=3), QUIET)
    assert (plain.measured.step_s, ghost.measured.step_s, ghost.measured.cpu_s) == (2.0, 4.0, 8.0)
    assert (ghost.time_ratio, ghost.memory_ratio, ghost.turns) == (2.0, 1.0, 3)
    assert ghost.to_json()["turns"] == 3


def test_a_run_that_is_cut_short_leaves_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left = iter([1.0, 3.0, 2.0])

    def told(*_: object, name: str) -> dict[str, object]:
        if (step_s := next(left, None)) is None:
            raise StateError(name)
        return {
            "parameters": 1,
            "trained_parameters": 1,
            "noise_s": 0.1,
            "peak_bytes": 7,
            "step_s": step_s,
            "cpu_s": step_s,
        }

    monkeypatch.setattr(run, "measured_apart", told)
    with pytest.raises(StateError, match="micro, ghost"):
        run_bench_dp(chosen(turns=2, out=tmp_path / "out.json"), QUIET)
    plain, ghost = read_figures(tmp_path / "out.json")[1]
    assert (plain["turns"], plain["step_s"]) == (2, 1.5)
    assert (ghost["turns"], ghost["time_ratio"]) == (1, 3.0)
    _, rows = bench_tables.private([plain, ghost])
    assert [tuple(row[-3:]) for row in rows] == [("", "", ""), ("3.00 x", "1.00 x", "plain")]


def test_what_differs_of_training_is_a_key_of_plans() -> None:
    for way in WAYS.values():
        section = TrainingSection.model_validate(dict(way.training))
        assert {key for key, value in section.model_dump().items() if value != getattr(TrainingSection(), key)} == set(
            way.training
        )


def test_a_way_that_fails_is_named() -> None:
    with pytest.raises(StateError, match=r"^micro, plain: .*(?i:device)"):
        run_bench_dp(chosen(device="nowhere"), QUIET)


@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if way.backend == "ghost"])
def test_gradients_of_what_is_measured_are_those_of_one_example_at_a_time(way: str) -> None:
    """Of full models and of adapters."""
    task = Task(way=way, size="micro", batch=4, physical=4, steps=1, device="cpu", threads=1)
    model, parameters = model_for(task, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros, with which the other half has no gradient
                parameter.normal_(0, 0.1)
    model.train()
    batch = collate(records(4, pieces=1000), range(4), pad=0, device=torch.device("cpu"))
    sums = []
    for backend in ("ghost", "loop"):
        clipping(backend, model, parameters, max_grad_norm=0.1).accumulate(batch)
        sums.append(torch.cat([parameter.summed_grad.flatten() for parameter in parameters]))  # type: ignore[attr-defined]
    assert float((sums[0] - sums[1]).norm()) < 1e-5 * float(sums[1].norm())
    trained = sum(parameter.numel() for parameter in parameters)
    assert (trained < sum(parameter.numel() for parameter in model.parameters()) / 5) == way.endswith("lora")


def test_every_way_stands_beside_one_that_is_measured_before_it() -> None:
    names = list(WAYS)
    for name, way in WAYS.items():
        assert not (way.training and way.backend), "of plain training alone: private training refuses them"
        assert (way.backend is None and name == "plain") or names.index(str(way.beside)) < names.index(name)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"sizes": ["gigantic"]}, "gigantic"),
        ({"ways": ["magic"]}, "way 'magic' to train is unknown"),
        ({"physical": 8}, "PHYSICAL=8 is more than BATCH=4"),
    ],
)
def test_what_cannot_be_measured_is_refused(changed: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        chosen(**changed)
