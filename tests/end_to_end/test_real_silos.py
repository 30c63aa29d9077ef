"""Three of the paper's silos in one federation: real processes, mutual TLS, a small T5 from scratch, a few rounds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorica.demo.plan import set_arguments
from tests.support.federation import Federation
from tests.support.warm_processes import WarmProcesses

SILOS = ("geoquery", "restaurants", "academic")
ROUNDS = 4

# The whole federation runs inside the first test's set-up.
pytestmark = [pytest.mark.real_data, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, shared_text2sql: Path) -> Iterator[Federation]:
    root = tmp_path_factory.mktemp("real")
    (root / "logs").mkdir()
    with WarmProcesses(root / "logs") as processes:
        it = Federation(root, processes, {silo: shared_text2sql / silo for silo in SILOS})
        it.init("--no-plan")
        values = {
            "schedule.rounds": ROUNDS,
            "schedule.min_silos": len(SILOS),
            "schedule.start_when_ready": "true",
            "aggregation.momentum": 0.0,
            "training.learning_rate": 3e-3,
            "training.epochs": 3,
            "training.schema_in_input": "false",
            "training.max_input_tokens": 64,
            "training.max_output_tokens": 160,
            "training.dropout": 0.0,
            "training.overrides.academic.batch_size": 8,
            "evaluation.every": 0,
            "evaluation.initial": "false",
        }
        it.coordinator("plan", "new", "real", "--size", "mini", *set_arguments(values))
        it.serve("--plan", "real")
        for silo in SILOS:
            it.agent(silo, "enroll", it.coordinator("invite", silo).strip())
            it.start_agent(silo)
        it.wait(it.finished)
        yield it


def logged(federation: Federation, event: str) -> list[dict[str, Any]]:
    """The coordinator's log lines of one kind."""
    lines = (federation.root / "logs" / "coordinator.log").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


def test_training_loss_falls_on_every_silo(federation: Federation) -> None:
    records = json.loads(federation.coordinator("rounds", "--json"))
    assert [(record["round"], record["outcome"]) for record in records] == [
        (n, "applied") for n in range(1, ROUNDS + 1)
    ]
    for silo in SILOS:
        losses = [s["loss_min"] for record in records for s in record["silos"] if s["silo"] == silo]
        assert len(losses) == ROUNDS
        assert losses == sorted(losses, reverse=True), f"{silo}: {losses}"
        assert losses[-1] < 0.5 * losses[0], f"{silo}: {losses}"


def test_lorars_weights_are_examples_times_loss_reduction_recomputed_from_the_log(federation: Federation) -> None:
    examples = {silo: sum(1 for _ in (federation.data[silo] / "train.jsonl").open()) for silo in SILOS}
    updates = logged(federation, "update committed")
    weights = logged(federation, "silo weight")
    assert len(updates) == len(weights) == ROUNDS * len(SILOS)
    for number in range(1, ROUNDS + 1):
        of_round = {entry["silo"]: entry for entry in updates if entry["round"] == number}
        assert {silo: entry["examples"] for silo, entry in of_round.items()} == examples
        raw = {silo: examples[silo] * entry["loss_reduction"] for silo, entry in of_round.items()}
        for entry in weights:
            if entry["round"] == number:
                assert entry["weight"] == pytest.approx(raw[entry["silo"]], rel=1e-9)
                assert entry["share"] == pytest.approx(raw[entry["silo"]] / sum(raw.values()), rel=1e-9)
