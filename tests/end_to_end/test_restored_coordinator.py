"""A coordinator is lost in the middle of a plan and restored from a backup of an earlier round: its silos, real agents,
go on by themselves."""

import json
from pathlib import Path

import pytest

from lorica.demo.plan import set_arguments
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.silos import keep_first, write_silo
from lorica_coordinator.edges.upkeep.backup_file import PASSPHRASE
from tests.support.federation import Federation
from tests.support.warm_processes import WarmProcesses

SILOS = ("clinic", "insurer")
ROUNDS = 6
VALUES = {
    "schedule.rounds": ROUNDS,
    "schedule.min_silos": len(SILOS),
    "training.epochs": 1,
    "training.schema_in_input": "false",
    "training.max_input_tokens": 32,
    "training.max_output_tokens": 16,
    "evaluation.every": 0,
    "evaluation.initial": "false",
    "evaluation.last": "false",
}
LINES = 8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_silos_go_on_with_a_coordinator_that_came_from_a_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSPHRASE, "five random words, or more of them")
    data = {silo: tmp_path / "data" / silo for silo in SILOS}
    for specification in (CLINIC, INSURER):
        write_silo(data[specification.name], specification, seed=3)
        for file in data[specification.name].glob("*.jsonl"):
            keep_first(file, LINES)
    (tmp_path / "logs").mkdir()
    backup, lost = tmp_path / "north.backup", tmp_path / "lost"
    with WarmProcesses(tmp_path / "logs") as processes:
        it = Federation(tmp_path, processes, data)
        it.init("--no-plan", "--federation", "north")
        it.coordinator("plan", "new", "triage", "--size", "micro", *set_arguments(VALUES))
        it.serve("--plan", "triage")
        for silo in SILOS:
            it.agent(silo, "enroll", it.coordinator("invite", silo).strip())
            it.start_agent(silo)
        it.wait(it.all_ready)
        it.coordinator("plan", "start", "triage")

        it.wait(lambda: it.metric("lorica_round") >= 1)
        it.coordinator("plan", "stop")  # the rounds would be over before a slow machine has asked twice
        at_backup = it.view().look()[0].round
        assert "files" in it.coordinator("backup", str(backup))
        it.coordinator("plan", "start", "triage")
        it.wait(lambda: it.at_round(at_backup + 1))
        processes.kill("coordinator")
        it.folder.rename(lost)
        told = it.coordinator("restore", str(backup), str(it.folder), "--log", str(lost / "audit"))
        assert "its plan is stopped" in told
        assert f"enrolled, as the newer log has it: {', '.join(SILOS)}; " in told
        it.serve("--plan", "triage")
        restored = it.view().look()[0]
        assert (restored.phase, restored.round) == ("stopped", at_backup)
        it.coordinator("plan", "start", "triage")
        it.wait(it.finished)
        processes.check()  # the agents are the ones that began

        records = json.loads(it.coordinator("rounds", "--json"))
        applied = {record["round"]: record["attempt"] for record in records if record["outcome"] == "applied"}
        assert sorted(applied) == list(range(1, ROUNDS + 1))
        assert applied[at_backup] >= 1
        assert {silo["silo"] for record in records for silo in record["silos"]} == set(SILOS)
        heads = tmp_path / "heads.jsonl"
        for silo in SILOS:
            heads.write_text(it.agent(silo, "audit", "show", "--heads"))
            whole = it.coordinator("audit", "verify", "--receipts", str(heads))
            assert "agree with the log" in whole, "no silo holds anything that the restored log does not have"
