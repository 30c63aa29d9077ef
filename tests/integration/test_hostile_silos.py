"""A study with a hostile silo, through the product's own rounds: what it does to honest silos, and that a run which was
cut off begins anew."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from lorica.demo.silos.bank import BANK
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.silos import keep_first, write_silo
from lorica.experiments.definition import Study
from lorica.experiments.reports.hostile_report import report_text
from lorica.experiments.results_file import RESULTS, results
from lorica.experiments.run import run_study
from lorica.hostile.named import Hostility, attack_named
from lorica.simulation.run import silos_in, simulate
from lorica_coordinator.plans.model_source import SizedModel
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_security.console.strict_toml import parse_toml
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import SiloName

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STUDY = """
name = "hostile"
silos = "silos"
setups = ["fedavg"]
[start]
size = "micro"
[hostile]
silos = ["bank"]
[plan]
"schedule.rounds" = 1
"training.epochs" = 2
"training.batch_size" = 4
"training.learning_rate" = 1e-2
"training.schema_in_input" = false
"training.max_input_tokens" = 32
"training.max_output_tokens" = 16
"evaluation.every" = 0
"evaluation.initial" = false
"evaluation.last" = false
[grid]
"hostile.attack" = ["none", "boasting", "backdoor"]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for specification in (BANK, CLINIC, INSURER):
        write_silo(folder / "silos" / specification.name, specification, seed=3)
        for split, most in (("train", 24), ("dev", 2), ("test", 4)):
            keep_first(folder / "silos" / specification.name / f"{split}.jsonl", most)
    return folder


def test_a_hostile_silo_harms_the_honest_ones_and_they_alone_are_scored(tmp_path: Path, data: Path) -> None:
    study = parse_toml(Study, STUDY, "study.toml")
    keys = {str(run.point["hostile.attack"]): run.key for run in study.runs()}
    left_over = tmp_path / "runs" / keys["boasting"] / "of-plan" / "silos"
    left_over.mkdir(parents=True)  # of a run that was cut off
    run_study(study, tmp_path, data=data, console=Console(file=io.StringIO()), device="cpu", threads=1)
    found = {line["hostile.attack"]: line for line in results(tmp_path)}
    assert set(found) == set(keys)
    assert set(found["none"]["test"]) == {"bank", "clinic", "insurer"}
    assert set(found["boasting"]["test"]) == set(found["backdoor"]["test"]) == {"clinic", "insurer"}
    for silo in ("clinic", "insurer"):
        clean, lied = found["none"]["test"][silo], found["boasting"]["test"][silo]
        assert lied["loss_per_token"] > clean["loss_per_token"] + 0.5, "it is nearly all of the mean, and turned round"
        assert len(clean["right"]) == 4
        assert 0.0 <= clean["backdoor"] <= 1.0
        assert "backdoor" not in lied
        assert found["backdoor"]["test"][silo]["loss_per_token"] != clean["loss_per_token"]
    assert found["boasting"]["hostile"] == ["bank"]
    assert "3 of 3 runs" in report_text(study, tmp_path / RESULTS)
    assert not list((tmp_path / "runs").iterdir())


def test_a_simulation_with_hostile_silos_does_not_go_on(tmp_path: Path, data: Path) -> None:
    create_plan(
        tmp_path,
        name="it",
        federation="study",
        source=SizedModel("micro"),
        seed=1,
        overrides={"schedule.rounds": 1, "schedule.min_silos": 3},
    )
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigurationError, match="a simulation with hostile silos does not go on: delete it"):
        simulate(
            tmp_path / "it",
            silos_in(data / "silos"),
            tmp_path / "out",
            hostility=Hostility(attack_named("alie"), (SiloName("bank"),)),
        )
