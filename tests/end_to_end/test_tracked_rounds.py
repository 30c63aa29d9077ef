"""Rounds of a real federation, told to a real MLflow server and to TensorBoard, and read back from both."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pytest

from lorica.cli import main as lorica_main
from lorica.demo.ports import free_ports
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.silos import keep_first, write_silo
from tests.support.command_line import run_command
from tests.support.deployment_tools import tracking_tool
from tests.support.federation import Federation
from tests.support.waiting import until
from tests.support.warm_processes import WarmProcesses

SILOS: Final = ("clinic", "insurer")
ROUNDS: Final = 2
LONGEST_S: Final = 120.0
VALUES: Final = (
    *(f"schedule.rounds={ROUNDS}", "schedule.min_silos=2", "schedule.start_when_ready=true", "training.epochs=1"),
    *("training.schema_in_input=false", "training.max_input_tokens=32", "training.max_output_tokens=8"),
    *("evaluation.every=1", "evaluation.initial=false"),
)
READ_BACK: Final = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
read.Reload()
tags = read.Tags()["scalars"]
print(json.dumps({tag: [(one.step, one.value, one.wall_time) for one in read.Scalars(tag)] for tag in tags}))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Its plan has run to its end; coordinator and agents run on."""
    root = tmp_path_factory.mktemp("tracking")
    data = {silo: root / "data" / silo for silo in SILOS}
    for specification in (CLINIC, INSURER):
        write_silo(data[specification.name], specification, seed=3)
        for file in data[specification.name].glob("*.jsonl"):
            keep_first(file, 12)
    (root / "logs").mkdir()
    with WarmProcesses(root / "logs") as processes:
        it = Federation(root, processes, data)
        it.init("--no-plan", "--federation", "north")
        chosen = [argument for value in VALUES for argument in ("--set", value)]
        it.coordinator("plan", "new", "notes", "--size", "micro", *chosen)
        it.serve("--plan", "notes")
        for silo in SILOS:
            it.agent(silo, "enroll", it.coordinator("invite", silo).strip())
            it.start_agent(silo)
        it.wait(it.finished)
        yield it


def track(*arguments: str) -> str:
    done = run_command(lorica_main, "track", "--once", *arguments)
    assert done.code == 0, done.err
    return done.out


def applied(federation: Federation) -> list[dict[str, Any]]:
    """What people are shown."""
    records = json.loads(federation.coordinator("rounds", "--json"))
    return [record for record in records if record["outcome"] == "applied"]


def test_json_lines_have_each_round_as_people_are_shown_it(federation: Federation, tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    for new in (ROUNDS, 0):
        assert f"{new} new" in track("--coordinator", str(federation.folder), "--json-lines", str(file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    shown = applied(federation)
    assert [(line["round"], line["outcome"], line["run"]["name"]) for line in lines] == [
        (record["round"], "applied", "notes") for record in shown
    ]
    for line, record in zip(lines, shown, strict=True):
        assert line["values"]["macro_exact_match"] == record["macro_exact_match"]
        for silo in record["silos"]:
            assert line["values"][f"silo/{silo['silo']}/loss_reduction"] == silo["loss_reduction"]


def test_a_silo_has_what_left_it(federation: Federation, tmp_path: Path) -> None:
    """Beside the agent, which runs."""
    file = tmp_path / "rounds.jsonl"
    track("--silo", str(federation.root / "agents" / "clinic"), "--json-lines", str(file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(line["round"], line["what"]) for line in lines} == {
        (number, what) for number in (1, 2) for what in ("training", "evaluation")
    }
    reductions = {
        line["round"]: line["values"]["loss_max"] - line["values"]["loss_min"]
        for line in lines
        if line["what"] == "training"
    }
    for record in applied(federation):
        (told,) = (silo for silo in record["silos"] if silo["silo"] == "clinic")
        assert reductions[record["round"]] == pytest.approx(told["loss_reduction"])


def test_tensorboard_reads_what_was_written(federation: Federation, tmp_path: Path) -> None:
    python = Path(tracking_tool("tensorboard")).with_name("python")
    for _ in range(2):
        track("--coordinator", str(federation.folder), "--tensorboard", str(tmp_path / "runs"))
    (run,) = (tmp_path / "runs").iterdir()
    done = subprocess.run(
        [python, "-c", READ_BACK, str(run)], env=_alone(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    shown = applied(federation)
    expected = [(record["round"], record["macro_exact_match"], record["closed_unix_s"]) for record in shown]
    assert [tuple(one) for one in read["round/macro_exact_match"]] == [pytest.approx(one, rel=1e-6) for one in expected]
    assert len(read["round/silo/clinic/loss_reduction"]) == ROUNDS


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with a database of its own."""
    program = tracking_tool("mlflow")
    place = tmp_path_factory.mktemp("mlflow")
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    at = ("--backend-store-uri", f"sqlite:///{place}/mlflow.db", "--default-artifact-root", str(place / "artifacts"))
    with (place / "log").open("wb") as log:
        server = subprocess.Popen(
            [program, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *at],
            cwd=place,
            env=_alone(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:

        def check() -> None:
            assert server.poll() is None, (place / "log").read_text()

        until(lambda: _answers(f"{address}/health"), check, LONGEST_S)
        yield address
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def test_mlflow_has_each_round_once(federation: Federation, mlflow: str) -> None:
    """Also where the tracker was killed before the server had noted how far it was: numbers that come again are kept
    once."""
    arguments = ("--coordinator", str(federation.folder), "--mlflow", mlflow, "--experiment", "north's rounds")
    assert f"{ROUNDS} new" in track(*arguments)
    assert "0 new" in track(*arguments)
    (run,) = _runs(mlflow, "north's rounds")
    _call(mlflow, "runs/delete-tag", {"run_id": run["info"]["run_id"], "key": "lorica.tracked"})
    assert f"{ROUNDS} new" in track(*arguments)
    (run,) = _runs(mlflow, "north's rounds")
    assert run["info"]["run_name"].startswith("coordinator-notes-")
    assert {tag["key"]: tag["value"] for tag in run["data"]["tags"]}["lorica.federation"] == "north"
    shown = applied(federation)
    for key, expected in {
        "round/macro_exact_match": [record["macro_exact_match"] for record in shown],
        "round/silo/clinic/share": [
            silo["share"] for record in shown for silo in record["silos"] if silo["silo"] == "clinic"
        ],
    }.items():
        history = _call(mlflow, "metrics/get-history", {"run_id": run["info"]["run_id"], "metric_key": key}, get=True)
        assert [(one["step"], one["value"]) for one in history["metrics"]] == [
            (number, pytest.approx(value)) for number, value in enumerate(expected, 1)
        ]


def test_a_silo_is_another_run(federation: Federation, mlflow: str) -> None:
    track("--silo", str(federation.root / "agents" / "clinic"), "--mlflow", mlflow, "--experiment", "at the clinic")
    (run,) = _runs(mlflow, "at the clinic")
    metrics = {one["key"]: one["value"] for one in run["data"]["metrics"]}
    assert metrics["training/bytes"] > 0
    assert "training/loss_last" in metrics


def _runs(address: str, experiment: str) -> list[dict[str, Any]]:
    named = _call(address, "experiments/get-by-name", {"experiment_name": experiment}, get=True)
    found = _call(address, "runs/search", {"experiment_ids": [named["experiment"]["experiment_id"]]})
    runs: list[dict[str, Any]] = found.get("runs", [])
    return runs


def _call(address: str, call: str, content: dict[str, Any], *, get: bool = False) -> dict[str, Any]:
    url = f"{address}/api/2.0/mlflow/{call}" + (f"?{urlencode(content)}" if get else "")
    body = None if get else json.dumps(content).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as reply:
        read: dict[str, Any] = json.loads(reply.read())
    return read


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _alone() -> dict[str, str]:
    """Of programs of another environment."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return {**kept, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "NO_PROXY": "*"}
