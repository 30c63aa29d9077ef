"""The study of joint noise: the same records, rate, steps and epsilon in every way, and silos that divide the records
among them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lorica.demo.federation import Layout
from lorica.demo.scoring import Score
from lorica.privacy_utility import joint as study
from lorica.privacy_utility.joint import PARTS, WAYS, run_joint
from lorica.privacy_utility.rows import EIGHT, TODAY
from lorica.privacy_utility.silos import NAMES
from lorica_coordinator.plans.model_source import SizedModel
from silo_wire.plans.plan import Plan


@pytest.fixture
def federations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, dict[str, list[str]]]]:
    """Every federation that the study has trained: its plan, and the ids of each silo's records. Nothing is trained
    here."""
    trained: list[tuple[Plan, dict[str, list[str]]]] = []

    def write_private_silos(place: Layout, silos: Any, *, records: int, seed: int, test: int) -> None:
        for name in NAMES:
            place.data(name).mkdir(parents=True)
            lines = [json.dumps({"id": f"{name}-{number}"}) for number in range(records)]
            (place.data(name) / "train.jsonl").write_text("\n".join(lines) + "\n")
            (place.data(name) / "test.jsonl").write_text("{}\n")

    def simulate(plan: Path, silos: dict[str, Path], out: Path, *, threads: int) -> Any:
        from lorica_coordinator.plans.plan_folder import compile_plan

        bundle = compile_plan(plan)
        ids = {
            str(name): [json.loads(line)["id"] for line in (folder / "train.jsonl").read_text().splitlines()]
            for name, folder in silos.items()
        }
        trained.append((bundle.plan, ids))
        shelf = SimpleNamespace(bundle=lambda digest: bundle)
        return SimpleNamespace(
            coordinator=SimpleNamespace(folder=SimpleNamespace(root=out), shelf=shelf),
            plan=bundle.plan.digest,
            final=bundle.plan.digest,
        )

    def answered(self: Any, coordinator: Path, plan: str, final: str, data: Any) -> Any:
        self.right.update(dict.fromkeys(data, "01"))
        one = Score(questions=2, exact_match=0.5, execution_accuracy=0.0, loss_per_token=1.0 / len(trained))
        return dict.fromkeys(data, one), dict.fromkeys(data, one)

    monkeypatch.setattr(study, "write_private_silos", write_private_silos)
    monkeypatch.setattr(study, "FolderModel", lambda folder: SizedModel("micro"))
    monkeypatch.setattr(study, "simulate", simulate)
    monkeypatch.setattr(study.Answers, "__call__", answered)
    return trained


def test_ways_differ_in_noise_and_rounds_alone_and_a_cut_off_study_goes_on(
    federations: list[tuple[Plan, dict[str, list[str]]]], tmp_path: Path
) -> None:
    def run() -> Any:
        quiet = Console(quiet=True)
        return run_joint(tmp_path, epsilon=1.0, seeds=[3], records=8000, out=tmp_path / "rows.json", console=quiet)

    rows = run()
    assert [row.variant for row in rows] == list(WAYS)
    assert {row.data for row in rows} == {EIGHT}
    plans = {row.variant: plan for row, (plan, _) in zip(rows, federations, strict=True)}
    for row, plan in zip(rows, plans.values(), strict=True):
        assert plan.schedule.rounds * plan.privacy.steps == 80
        assert plan.privacy.sampling_rate == 0.025
        assert plan.schedule.min_silos == len(NAMES) * PARTS == 8
        assert plan.aggregation.weighting == "equal"
        assert 0.98 < row.spent <= 1.0
    assert [plan.joint for plan in plans.values()] == [False, False, True]
    assert plans["joint"].noise_makers == 5
    assert plans[TODAY].privacy.noise_multiplier == plans["own, a step a round"].privacy.noise_multiplier
    _, ids = federations[0]
    for name in NAMES:
        parts = [set(ids[f"{name}-{part + 1}"]) for part in range(PARTS)]
        assert [len(part) for part in parts] == [2000] * PARTS
        assert len(set.union(*parts)) == 8000
    again = run()
    assert len(federations) == len(WAYS)
    assert again == rows
