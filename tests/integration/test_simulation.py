"""`lorica simulate`: the federation in one process gives the model of the federation over the network, to the last
bit."""

import gc
import json
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import structlog
from typer.testing import CliRunner

from lorica.cli import app
from lorica.demo.plan import set_arguments
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.silos import keep_first, write_silo
from lorica.simulation.run import silos_in, simulate
from lorica.simulation.workers.one_bench import NOBODYS_ENTROPY
from lorica_coordinator.plans.plan_folder import compile_plan
from lorica_coordinator.rounds.cohorts.drawn import place
from lorica_coordinator.service.records import RoundRow
from lorica_security.errors import ConfigurationError, StateError
from lorica_security.host.files import write_private
from lorica_security.identifiers import SiloName
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.training.model.plan_model import PlanModel
from silo_wire.canonical import Digest
from tests.support.coordinator_edges import Workplace, stored_vector
from tests.support.federation import Federation
from tests.support.waiting import until
from tests.support.warm_processes import WarmProcesses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDS = 2
TRAIN = 64
"""Examples of each silo, of which a round takes several steps."""
VALUES = {
    "schedule.rounds": ROUNDS,
    "evaluation.every": 1,
    "evaluation.initial": "false",
    "evaluation.max_examples": 8,
    "training.epochs": 1,
    "training.fedprox_mu": 0.01,
    "training.dropout": 0.1,
    "aggregation.reduction_memory": 0.5,
    "aggregation.server_rate_at_end": 0.25,
}


def settings(**values: object) -> list[str]:
    return list(set_arguments(VALUES | values))


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("silos")
    for specification in (CLINIC, INSURER):
        write_silo(folder / specification.name, specification, seed=3)
        keep_first(folder / specification.name / "train.jsonl", TRAIN)
    return folder


@pytest.fixture(scope="module")
def networked(tmp_path_factory: pytest.TempPathFactory, silos: Path) -> Iterator[Federation]:
    """The plan, run to its end by processes over mutual TLS."""
    root = tmp_path_factory.mktemp("networked")
    data = {path.name: path for path in sorted(silos.iterdir())}
    (root / "logs").mkdir()
    with WarmProcesses(root / "logs") as processes:
        it = Federation(root, processes, data)
        it.init("--no-plan", "--federation", "north")
        it.coordinator("plan", "new", "small", "--size", "micro", *settings())
        it.coordinator("plan", "new", "masked", "--size", "micro", *settings(**MASKED))
        it.coordinator("plan", "new", "drawn", "--size", "micro", *settings(**DRAWN))
        it.coordinator("plan", "new", "turns", "--size", "micro", *settings(**IN_TURN))
        it.serve("--plan", "small")
        for silo in data:
            joins(it, silo)
        it.wait(it.all_ready)
        it.coordinator("plan", "start", "small")
        it.wait(it.finished)
        yield it


def joins(federation: Federation, silo: str) -> None:
    """With the entropy of a simulation's silos, from which come the order of data and dropout under masks."""
    federation.agent(silo, "enroll", federation.coordinator("invite", silo).strip())
    folder = SiloFolder(federation.root / "agents" / silo)
    folder.settings.write_text("[policy]\ntrust_on_first_use = true\n")
    write_private(folder.own_entropy, NOBODYS_ENTROPY)
    federation.start_agent(silo)


DRAWN = {"schedule.min_silos": 1, "schedule.cohort_size": 1, "schedule.rounds": 4}
IN_TURN = {
    "schedule.min_silos": 1,
    "schedule.rounds": 2,
    "aggregation.reduction_memory": 0,
    "aggregation.server_rate_at_end": 1,
    "aggregation.weighting": "equal",
    "aggregation.momentum": 0.0,
    "semi_supervised.unlabelled": '["insurer"]',
}
MASKED = {
    "aggregation.secure_aggregation": "true",
    "aggregation.max_weight": 100.0,
    "schedule.min_silos": 3,
    "schedule.rounds": 1,
    "aggregation.server_rate_at_end": 1,
}


def simulated(plan: Path, silos: Path, out: Path, *more: str) -> str:
    device = () if "--devices" in more else ("--device", "cpu")
    result = CliRunner().invoke(
        app,
        ["simulate", str(plan), "--silos", str(silos), "--out", str(out), *device, "--threads", "1", *more],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    return result.stdout


def rounds_of(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("workers", ["1", "2 --devices cpu,cpu"])
def test_simulation_and_federation_over_the_network_give_the_same_models_to_the_last_bit(
    networked: Federation, silos: Path, tmp_path: Path, workers: str
) -> None:
    shown = simulated(networked.plans / "small", silos, tmp_path / "out", "--workers", *workers.split())
    assert shown.count("applied") == ROUNDS
    over_network = json.loads(networked.coordinator("rounds", "--json"))
    here = rounds_of(tmp_path / "out")
    assert [row["round"] for row in here] == [row["round"] for row in over_network] == [1, 2]
    for row, other in zip(here, over_network, strict=True):
        assert row["model"] == other["model_digest"]
        assert row["micro_exact_match"] == other["micro_exact_match"]
        weights = {name: silo["weight"] for name, silo in row["silos"].items()}  # type: ignore[attr-defined]
        assert weights == {silo["silo"]: silo["weight"] for silo in other["silos"]}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["final_model"] == over_network[-1]["model_digest"]
    assert summary["rounds"] == ROUNDS


@pytest.mark.parametrize("workers", [1, 2])
def test_a_simulation_that_was_cut_off_goes_on_to_the_same_model(
    networked: Federation, silos: Path, tmp_path: Path, workers: int
) -> None:
    def cut(row: RoundRow) -> None:
        raise KeyboardInterrupt

    structlog.reset_defaults()  # of a test before
    plan = networked.plans / "small"
    with pytest.raises(KeyboardInterrupt):
        simulate(plan, silos_in(silos), tmp_path / "out", device="cpu", threads=1, workers=workers, on_round=cut)
    assert not (tmp_path / "out" / "summary.json").exists()
    went_on = simulate(plan, silos_in(silos), tmp_path / "out", device="cpu", threads=1)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["final_model"] == went_on.final
    logged = [json.loads(line) for line in (tmp_path / "out" / "simulation.log").read_text().splitlines()]
    assert {"info"} <= {line["level"] for line in logged}
    assert not structlog.is_configured()
    over_network = json.loads(networked.coordinator("rounds", "--json"))
    assert [row["model"] for row in rounds_of(tmp_path / "out")] == [row["model_digest"] for row in over_network]
    # The one with the best MacroAvg is there though the coordinator may have deleted it, and no other one that a round
    # has made.
    scored = [
        (row.macro_exact_match, row.round, row.model) for row in went_on.rows if row.macro_exact_match is not None
    ]
    kept = went_on.kept.best(compile_plan(plan).model_layout)
    assert kept is not None
    assert kept.manifest.digest == max(scored)[2]
    names = {path.stem for path in (tmp_path / "out" / "kept").iterdir()}
    assert names & {row.model for row in went_on.rows} == {kept.manifest.digest}
    for name, points in went_on.losses.items():
        facts = [silo for row in went_on.rows for silo in row.silos if silo.silo == name and silo.examples]
        assert points[-1][0] % ROUNDS == 0, "each round has as many steps"
        # Those of steps, with dropout; what the federation is told is evaluated, before the first and after the last.
        assert points[0][1] == pytest.approx(facts[0].loss_max, rel=0.1)
        assert min(silo.loss_min for silo in facts) < points[-1][1] < points[0][1]


def test_each_round_is_of_the_silo_whose_public_place_comes_first(
    networked: Federation, silos: Path, tmp_path: Path
) -> None:
    simulated(networked.plans / "drawn", silos, tmp_path / "out")
    plan = compile_plan(networked.plans / "drawn").plan.digest
    names = sorted(SiloName(path.name) for path in silos.iterdir())
    cohorts = [list(row["silos"]) for row in rounds_of(tmp_path / "out")]  # type: ignore[call-overload]
    assert cohorts == [[min(names, key=lambda silo: place(plan, number, 1, (silo,)))] for number in range(1, 5)]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_masks_and_their_quorum_hold_in_a_simulation(
    networked: Federation, silos: Path, tmp_path: Path, workers: str
) -> None:
    three = tmp_path / "three"
    shutil.copytree(silos, three)
    shutil.copytree(silos / "clinic", three / "practice")
    simulated(networked.plans / "masked", three, tmp_path / "out", "--workers", workers)
    rows = {row["outcome"]: row for row in rounds_of(tmp_path / "out")}
    assert set(rows) - {"evaluated"} == {"applied", "scored"}, "one round, and the closing one"
    for outcome in ("applied", "scored"):
        assert {name: silo["outcome"] for name, silo in rows[outcome]["silos"].items()} == dict.fromkeys(  # type: ignore[attr-defined]
            ("clinic", "insurer", "practice"), "committed"
        )
    assert (rows["applied"]["macro_exact_match"], rows["scored"]["micro_exact_match"]) == (None, None)
    assert rows["applied"]["micro_exact_match"] is not None, "the sum of their scores"
    pins = tmp_path / "out" / "silos" / "clinic" / "peers.json"
    assert json.JSONDecoder().raw_decode(pins.read_text())[0]["changes"] == 1, (
        "each of the others' keys was a change of its own"
    )


def test_what_cannot_be_simulated_is_said_at_once(networked: Federation, silos: Path, tmp_path: Path) -> None:
    plan = networked.plans / "small"
    with pytest.raises(ConfigurationError, match=r"no folder in .*/empty holds a train\.jsonl"):
        silos_in(tmp_path / "empty")
    with pytest.raises(StateError, match="min_silos = 3 and 2 silos are enrolled"):
        simulate(networked.plans / "masked", silos_in(silos), tmp_path / "few", device="cpu", threads=1)
    refusing = tmp_path / "refusing"
    shutil.copytree(silos, refusing)
    (refusing / "clinic" / "silo.toml").write_text("[policy]\nmax_parameters = 10\n")
    with pytest.raises(StateError, match=r"silo clinic does not take part: .*max_parameters"):
        simulate(plan, silos_in(refusing), tmp_path / "refused", device="cpu", threads=1)


def dry_run(plan: Path, silos: Path, out: Path) -> tuple[int, str, dict[str, Any]]:
    """Exit code or error, what was shown, and estimate.json."""
    command = ["simulate", str(plan), "--silos", str(silos), "--out", str(out), "--dry-run"]
    result = CliRunner().invoke(app, [*command, "--device", "cpu", "--threads", "1"])
    error = "" if result.exception is None else str(result.exception)
    return result.exit_code, result.stdout + error, json.loads((out / "estimate.json").read_text())


def test_a_dry_run_tells_the_bytes_that_the_federation_over_the_network_counts(
    networked: Federation, silos: Path, tmp_path: Path
) -> None:
    code, shown, told = dry_run(networked.plans / "small", silos, tmp_path / "out")
    assert code == 0, shown
    traffic = told["coordinator_traffic"]
    assert traffic == {
        "down": networked.metric("lorica_sent_bytes_total"),
        "up": networked.metric("lorica_received_bytes_total"),
    }
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["estimate.json"], "it leaves nothing else"
    (row, *_) = json.loads(networked.coordinator("rounds", "--json"))
    trained = {silo["silo"]: int(silo["examples"]) for silo in row["silos"]}
    assert {silo["counts"]["silo"]: silo["counts"]["train"] for silo in told["silos"]} == trained
    for silo in told["silos"]:
        assert silo["scored"] == VALUES["evaluation.max_examples"]
        assert silo["training_s"] > 0
        assert silo["evaluation_s"] > 0
        assert silo["memory"]["peak"] > sum(silo["memory"][part] for part in ("parameters", "gradients", "optimizer"))
    a_round = told["silos"][0]["traffic"]
    assert told["line_s"]["10 Mbit/s"] == (a_round["down"] + a_round["up"]) * 8 / 1e7
    assert [(one["key"], one["dtype"]) for one in told["shorter"]] == [("model", "bfloat16"), ("update", "int8")]
    assert "lines, a round: 10 Mbit/s" in shown
    assert "recommended: " in shown
    assert told["evaluations"] == ROUNDS
    assert told["simulation_s"] > told["federation_s"]
    state = networked.folder / "state"
    vectors = [
        *(state / "models").rglob("*.f32"),
        *(state / "models").rglob("*.safetensors"),
        *state.glob("spools/**/*"),
    ]
    assert sum(path.stat().st_size for path in vectors if path.is_file()) <= told["coordinator_disk"]


def test_a_dry_run_names_who_would_refuse_after_telling_the_rest(
    networked: Federation, silos: Path, tmp_path: Path
) -> None:
    refusing = tmp_path / "refusing"
    shutil.copytree(silos, refusing)
    (refusing / "clinic" / "silo.toml").write_text("[policy]\nmax_parameters = 10\nmax_rounds = 1\n")
    (refusing / "insurer" / "dev.jsonl").write_text("{\n")
    code, shown, told = dry_run(networked.plans / "masked", refusing, tmp_path / "out")
    assert code == 1
    assert [silo["counts"]["silo"] for silo in told["silos"]] == ["clinic"], "insurer has no data that can be read"
    few, policy, data = told["problems"]
    assert few.startswith("plan masked has min_silos = 3 and there are 2 silos")
    assert policy.startswith("silo clinic does not take part: the plan asks for")
    assert "[policy] max_parameters of this silo allows 10" in policy
    assert data.startswith("silo insurer does not take part:")
    assert "dev.jsonl has 1 bad lines of 1" in data
    assert "coordinator: about" in shown
    assert shown.endswith("; ".join(told["problems"]))


def test_a_dry_run_names_the_silo_that_would_log_too_few_losses_to_weigh_by(
    networked: Federation, silos: Path, tmp_path: Path
) -> None:
    values = settings(**{"training.loss_reduction": "logged", "training.loss_log_steps": 2, "evaluation.every": 0})
    networked.coordinator("plan", "new", "logged", "--size", "micro", *values)
    few = tmp_path / "few"
    shutil.copytree(silos, few)
    keep_first(few / "clinic" / "train.jsonl", 16)
    code, _, told = dry_run(networked.plans / "logged", few, tmp_path / "out")
    assert code == 1
    (problem,) = told["problems"]
    assert problem.startswith("silo clinic does not take part: this silo would log 1 of at least 3 losses a round")


def test_a_dry_run_measures_private_training_and_tells_its_epsilon(
    networked: Federation, silos: Path, tmp_path: Path
) -> None:
    values = settings(
        **{
            "aggregation.reduction_memory": 0,
            "privacy.level": "record",
            "privacy.steps": 6,
            "privacy.nominal_records": 40,
            "privacy.expected_batch_size": 8,
            "training.dropout": 0.0,
            "training.fedprox_mu": 0,
            "evaluation.every": 0,
            "evaluation.last": "false",
            "schedule.training_deadline_s": 1e-3,
        }
    )
    networked.coordinator("plan", "new", "private", "--size", "micro", *values)
    code, shown, told = dry_run(networked.plans / "private", silos, tmp_path / "out")
    assert code == 0, shown
    assert [silo["steps"] for silo in told["silos"]] == [6, 6]
    assert all(silo["training_s"] > 0 and silo["evaluation_s"] == 0 for silo in told["silos"])
    assert 7 < told["epsilon"] <= 8
    assert "privacy: epsilon" in shown
    assert shown.count("LATE: training at silo") == 2


def test_updates_in_int8_give_the_same_models_and_remainders_in_a_quarter_of_the_bytes(
    networked: Federation, silos: Path, tmp_path: Path
) -> None:
    """The last tests of this federation, which has other plans from here on."""
    networked.coordinator("plan", "new", "short", "--size", "micro", *settings(**{"wire.update": "int8"}))
    before = networked.metric("lorica_received_bytes_total")
    networked.coordinator("plan", "start", "short")
    networked.wait(lambda: networked.view().look()[0].phase != "finished")
    networked.wait(networked.finished)
    simulated(networked.plans / "short", silos, tmp_path / "out")
    over_network = json.loads(networked.coordinator("rounds", "--json"))
    here = rounds_of(tmp_path / "out")
    assert [row["outcome"] for row in here] == ["applied"] * ROUNDS
    assert [row["model"] for row in here] == [row["model_digest"] for row in over_network]
    bundle = compile_plan(networked.plans / "short")
    numbers, sent = bundle.layout.parameters, networked.metric("lorica_received_bytes_total") - before
    assert sent == ROUNDS * 2 * bundle.update_bytes == ROUNDS * 2 * (numbers + 4 * -(-numbers // 1024))
    for silo in ("clinic", "insurer"):
        folders = (tmp_path / "out" / "silos" / silo / "updates", networked.root / "agents" / silo / "updates")
        held = [{path.name: path.read_bytes() for path in folder.glob("*.residual")} for folder in folders]
        assert held[0] == held[1]
        assert len(held[0]) == 2, "begun with, and left"


CORRECTED = {
    "schedule.rounds": 3,
    "aggregation.reduction_memory": 0,
    "aggregation.server_rate_at_end": 1,
    "aggregation.weighting": "equal",
    "aggregation.momentum": 0,
    "aggregation.max_delta_norm": 0,
    "training.drift_correction": "scaffold",
    "training.optimizer": "sgd",
    "training.learning_rate_schedule": "constant",
    "training.learning_rate": 0.1,
    "training.steps": 6,
    "training.fedprox_mu": 0,
    "evaluation.every": 0,
    "evaluation.last": "false",
}


def test_corrections_of_drift_are_the_same_too_where_an_agent_is_killed_in_the_second_round(
    networked: Federation, silos: Path, tmp_path: Path
) -> None:
    networked.coordinator("plan", "new", "corrected", "--size", "micro", *settings(**CORRECTED))
    networked.coordinator("plan", "start", "corrected")
    networked.wait(lambda: networked.view().look()[0].phase != "finished" and networked.at_round(2))
    networked.processes.kill("clinic")
    networked.start_agent("clinic")
    networked.wait(networked.finished)
    simulated(networked.plans / "corrected", silos, tmp_path / "out")
    over_network = json.loads(networked.coordinator("rounds", "--json"))
    here = rounds_of(tmp_path / "out")
    assert [row["outcome"] for row in here] == ["applied"] * 3
    assert [row["model"] for row in here] == [row["model_digest"] for row in over_network]
    states = tmp_path / "out" / "silos" / "clinic" / "updates"
    agents = networked.root / "agents" / "clinic" / "updates"
    held = [{path.name: path.read_bytes() for path in folder.glob("*.control")} for folder in (states, agents)]
    assert held[0] == held[1]
    assert len(held[0]) == 2, "begun with, and left: it went on with its correction"


def test_an_agent_that_has_lost_its_control_state_declines_and_every_silo_begins_anew(networked: Federation) -> None:
    values = settings(**CORRECTED | {"schedule.rounds": 4})
    networked.coordinator("plan", "new", "lost", "--size", "micro", *values)
    networked.coordinator("plan", "start", "lost")
    networked.wait(lambda: networked.view().look()[0].phase != "finished" and networked.at_round(2))
    networked.processes.kill("clinic")
    updates = networked.root / "agents" / "clinic" / "updates"
    for path in updates.glob("*.control"):
        path.unlink()
    networked.start_agent("clinic")
    networked.wait(networked.finished)
    rows = json.loads(networked.coordinator("rounds", "--json"))
    (at,) = [index for index, row in enumerate(rows) if row["outcome"] != "applied"]
    assert {silo["silo"]: silo["outcome"] for silo in rows[at]["silos"]}["clinic"] == "declined"
    assert [(row["round"], row["attempt"]) for row in rows[at : at + 2]] == [
        (rows[at]["round"], 1),
        (rows[at]["round"], 2),
    ]
    assert [row["round"] for row in rows if row["outcome"] == "applied"] == [1, 2, 3, 4]
    logged = (networked.root / "logs" / "clinic.log").read_text()
    assert "is not here (No such file or directory): this round is declined" in logged


STUDY = """
name = "tiny"
silos = "{silos}"
setups = ["finetuning", "centralized", "fedopt-lorar"]
[start]
size = "micro"
[at_most]
clinic = 12
insurer = 16
[plan]
"schedule.rounds" = 1
"evaluation.every" = 1
"evaluation.initial" = false
"evaluation.max_examples" = 4
"evaluation.execution" = false
"training.epochs" = 1
"training.schema_in_input" = false
"training.max_output_tokens" = 24
[only.fedopt-lorar]
"adapters.rank" = 2
"adapters.train" = "b"
"""


def test_a_study_runs_each_set_up_once_and_goes_on_where_it_was(silos: Path, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY.format(silos=silos))
    command = [
        "experiment",
        str(tmp_path / "study.toml"),
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    first = CliRunner().invoke(app, command, catch_exceptions=False)
    assert first.exit_code == 0
    assert "FedOPT + Lorar, seed 1" in first.stdout
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    done = [json.loads(line) for line in lines]
    assert [len(run["plans"]) for run in done] == [2, 1, 1], "alone is one federation for each silo"
    assert [[list(row["silos"]) for rows in run["rounds"] for row in rows] for run in done] == [
        [["clinic"], ["insurer"]],
        [["all"]],
        [["clinic", "insurer"]],
    ]
    assert done[1]["rounds"][0][0]["silos"]["all"]["examples"] == 28
    for run in done:
        assert {silo: score["examples"] for silo, score in run["test"].items()} == {"clinic": 40, "insurer": 60}
        assert all(score["loss_per_token"] > 0 for score in run["test"].values())
    (tmp_path / "out" / "results.jsonl").write_text("\n".join(lines[:2]) + "\n")
    second = CliRunner().invoke(app, [*command, "--jobs", "2"], catch_exceptions=False)
    assert "3 runs, 2 of them done" in second.stdout
    assert "FedOPT + Lorar, seed 1" in second.stdout
    assert "Finetuning" not in second.stdout
    again = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert again[2]["rounds"][0][0]["model"] == done[2]["rounds"][0][0]["model"], "the same run gives the same model"
    assert "| FedOPT + Lorar |" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_run_that_fails_leaves_the_others_of_its_study_alone(silos: Path, tmp_path: Path, jobs: str) -> None:
    allowing_one = tmp_path / "silos"
    shutil.copytree(silos, allowing_one)
    (allowing_one / "clinic" / "silo.toml").write_text("[policy]\nmax_rounds = 1\n")
    text = STUDY.format(silos=allowing_one).replace('"schedule.rounds" = 1\n', "")
    text = text.replace('"finetuning", "centralized", ', "") + '[grid]\n"schedule.rounds" = [2, 1]\n'
    (tmp_path / "study.toml").write_text(text)
    command = ["experiment", str(tmp_path / "study.toml"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    for said in ("max_rounds", "max_rounds.* it was begun earlier: to begin it anew, delete"):
        with pytest.raises(StateError, match=f"^1 of [12] runs failed; the first: FedOPT .*rounds = 2: .*{said}"):
            CliRunner().invoke(app, [*command, "--threads", "1", "--jobs", jobs], catch_exceptions=False)
        lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
        assert [json.loads(line)["point"] for line in lines] == [{"schedule.rounds": 1}]


def test_a_study_has_one_model_in_memory_however_many_simulations_its_runs_are(
    silos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []
    original = PlanModel.__init__

    def counted(self: PlanModel, *arguments: Any, **more: Any) -> None:
        alive.append(sum(model() is not None for model in made))
        original(self, *arguments, **more)
        made.append(weakref.ref(self.t5))

    monkeypatch.setattr(PlanModel, "__init__", counted)
    (tmp_path / "study.toml").write_text(STUDY.format(silos=silos).replace(', "centralized", "fedopt-lorar"', ""))
    command = ["experiment", str(tmp_path / "study.toml"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    gc.disable()  # or it could come by chance
    try:
        CliRunner().invoke(app, [*command, "--threads", "1"], catch_exceptions=False)
    finally:
        gc.enable()
    assert alive == [0] * 4, "two silos by themselves, then each one's best model scored"


@pytest.mark.parametrize("victim", ["study", "one of its processes"])
def test_a_study_that_is_killed_leaves_no_process_behind(silos: Path, tmp_path: Path, victim: str) -> None:
    text = STUDY.format(silos=silos).replace('"schedule.rounds" = 1', '"schedule.rounds" = 1000')
    (tmp_path / "study.toml").write_text(text)
    command = [sys.executable, "-m", "lorica.cli", "experiment", "study.toml", "--out", "out", "--device", "cpu"]
    with subprocess.Popen(
        [*command, "--jobs", "2"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as study:
        logs = tmp_path / "out" / "runs"
        until(lambda: len(list(logs.glob("*/run.log"))) == 2, lambda: require_running(study), 300)
        children = psutil.Process(study.pid).children(recursive=True)
        if victim == "study":
            study.kill()
        else:
            of_the_server = [child for child in children if child.ppid() != study.pid]
            assert len(of_the_server) == 2
            of_the_server[0].kill()
        _, said = study.communicate()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert len(children) >= 2
    assert not alive
    if victim != "study":
        assert "a process of this study was killed: run the same command again" in said
        assert "Traceback" not in said


def require_running(process: "subprocess.Popen[str]") -> None:
    assert process.poll() is None, process.returncode


# --- further plans of the same federation, which other tests would see: they are the last


FEDNOVA = {
    "aggregation.weighting": "fednova",
    "aggregation.reduction_memory": 0.0,
    "training.fedprox_mu": 0.0,
    "evaluation.every": 0,
    "evaluation.last": "false",
    "schedule.min_silos": 3,
}
MASKED_FEDNOVA = {
    "aggregation.secure_aggregation": "true",
    "aggregation.max_weight": 16.0,
    "schedule.rounds": 1,
    "aggregation.server_rate_at_end": 1,
}
ROUNDING = 1e-6
"""What the rounding of masked numbers, whose draws no two runs share, may add up to."""


def test_rounds_in_turn_over_the_network_give_the_bits_of_a_simulation(
    networked: Federation, silos: Path, tmp_path: Path
) -> None:
    """Silos with labels, then those without, from data that have some: the latter do not read them. The plan is stopped
    on the way and goes on."""
    networked.coordinator("plan", "start", "turns")
    networked.coordinator("plan", "stop")
    networked.wait(lambda: networked.view().look()[0].phase == "stopped")
    networked.coordinator("plan", "start", "turns")
    networked.wait(networked.finished)
    simulated(networked.plans / "turns", silos, tmp_path / "out")
    over_network: list[dict[str, Any]] = json.loads(networked.coordinator("rounds", "--json"))
    here = rounds_of(tmp_path / "out")
    assert [row["model"] for row in here] == [row["model_digest"] for row in over_network]
    assert len({row["model"] for row in here}) == 2, "each round moved it"
    for row, one, other in zip(over_network, ("clinic", "insurer"), ("insurer", "clinic"), strict=True):
        assert {silo["silo"] for silo in row["silos"] if silo["weight"]} == {one}
        assert other not in {silo["silo"] for silo in row["silos"] if silo["outcome"] == "committed"}
        assert row["micro_exact_match"] is not None
        assert [silo["silo"] for silo in row["silos"] if int(silo["dev_examples"])] == ["clinic"]


@pytest.fixture(scope="module")
def three(networked: Federation, silos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A third silo of 20 examples beside two of 64, which joins the federation."""
    folder = tmp_path_factory.mktemp("three") / "silos"
    shutil.copytree(silos, folder)
    shutil.copytree(silos / "clinic", folder / "practice")
    keep_first(folder / "practice" / "train.jsonl", 20)
    networked.data = {**networked.data, "practice": folder / "practice"}
    joins(networked, "practice")
    return folder


def both_ways(
    networked: Federation, three: Path, out: Path, plan: str, **more: object
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rounds of FedNova over the network, and in a simulation."""
    networked.coordinator("plan", "new", plan, "--size", "micro", *settings(**FEDNOVA, **more))
    networked.coordinator("plan", "start", plan)
    networked.wait(networked.finished)
    simulated(networked.plans / plan, three, out)
    over_network: list[dict[str, Any]] = json.loads(networked.coordinator("rounds", "--json"))
    here: list[dict[str, Any]] = rounds_of(out)
    assert {row["outcome"] for row in (*here, *over_network)} == {"applied"}
    return over_network, here


def test_fednova_over_the_network_gives_the_bits_of_a_simulation(
    networked: Federation, three: Path, tmp_path: Path
) -> None:
    """Of silos that make 2, 4 and 2 steps of a round: 64 and 20 examples, of which one silo has 32 in a batch."""
    changed = {"training.overrides.clinic.batch_size": 32}
    over_network, here = both_ways(networked, three, tmp_path / "out", "nova", **changed)
    assert [row["model"] for row in here] == [row["model_digest"] for row in over_network]
    assert len({row["model"] for row in here}) == ROUNDS, "each round moved it"
    weights = [{silo["silo"]: silo["weight"] for silo in row["silos"]} for row in over_network]
    assert weights == [{"clinic": 64 / 2, "insurer": 64 / 4, "practice": 20 / 2}] * ROUNDS


def test_fednova_under_masks_over_the_network_gives_a_simulations_model(
    networked: Federation, three: Path, tmp_path: Path
) -> None:
    """But for the rounding of masked numbers, which each silo draws anew; silos of 4, 4 and 2 steps."""
    (row,), (of_simulation,) = both_ways(networked, three, tmp_path / "out", "masked-nova", **MASKED_FEDNOVA)
    bundle = compile_plan(networked.plans / "masked-nova")
    place, simulation = (
        Workplace.at(it / "state", bundle).models for it in (networked.folder, tmp_path / "out/coordinator")
    )
    begun = stored_vector(place, place.initial())
    there = stored_vector(place, Digest(row["model_digest"]))
    here = stored_vector(simulation, Digest(of_simulation["model"]))
    assert np.abs(there - here).max() < ROUNDING
    assert np.abs(there - begun).max() > 100 * ROUNDING
    assert row["masked"]["weight_sum"] == pytest.approx(64 / 4 + 64 / 4 + 20 / 2, rel=1e-4)
