"""From nothing to a trained model with the nine commands of the README: real processes, mutual TLS, no file edited by
hand.

How cold programs do is for tests/network/test_quickstart.py and test_wheel.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, T5ForConditionalGeneration

from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.silos import keep_first, write_silo
from lorica.verify import key_of
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_security.on_disk.provenance import verified
from silo_agent.training.data.schema import Schema, serialise
from silo_agent.training.data.serialisation import model_input
from tests.support.federation import Federation
from tests.support.warm_processes import WarmProcesses

SILOS = ("hospital-a", "bank-b")
TRAIN_LINES = 48
HELD_OUT_LINES = 10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def shortened(folder: Path) -> None:
    for split, lines in (("train", TRAIN_LINES), ("dev", HELD_OUT_LINES), ("test", HELD_OUT_LINES)):
        keep_first(folder / f"{split}.jsonl", lines)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """The nine commands, up to a plan that runs; the plan is made short, as an operator would, in its plan.toml."""
    root = tmp_path_factory.mktemp("nine")
    data = {silo: root / "data" / silo for silo in SILOS}
    for silo, specification in zip(SILOS, (CLINIC, INSURER), strict=True):
        write_silo(data[silo], specification, seed=3)
        shortened(data[silo])
    (root / "logs").mkdir()
    with WarmProcesses(root / "logs") as processes:
        it = Federation(root, processes, data)
        it.init()
        plan = it.plans / "default" / "plan.toml"
        text = plan.read_text()
        for old, new in (
            ("rounds = 30", "rounds = 4"),
            ("every = 5", "every = 2"),
            ("\nlearning_rate = 0.0025", "\nlearning_rate = 0.005"),
            ("epochs = 2", "epochs = 6"),
        ):
            assert old in text, old
            text = text.replace(old, new)
        plan.write_text(text)
        tokens = {silo: it.coordinator("invite", silo).strip() for silo in SILOS}
        it.serve()
        for silo in SILOS:
            it.agent(silo, "enroll", tokens[silo])
        for silo in SILOS:
            it.start_agent(silo)
        it.wait(it.all_ready)
        it.coordinator("plan", "start")
        yield it


def test_two_silos_train_one_model_and_both_processes_may_stop_and_start_between_rounds(federation: Federation) -> None:
    it = federation
    it.wait(lambda: it.at_round(2))
    before = it.view().look()[1]
    it.processes.stop("coordinator")
    it.processes.stop(SILOS[0])
    it.serve()
    it.start_agent(SILOS[0])
    it.wait(it.finished)

    records = json.loads(it.coordinator("rounds", "--json"))
    applied = [record for record in records if record["outcome"] == "applied"]
    assert [record["round"] for record in applied] == [1, 2, 3, 4]
    kept = {(r.round, r.attempt): r for r in before if r.outcome == "applied"}
    assert kept
    for record in applied:
        shares_are_lorars(record["silos"])
        earlier = kept.get((record["round"], record["attempt"]))
        assert earlier is None or earlier.model_digest.hex() == record["model_digest"]
    assert {r["round"] for r in records if r["micro_exact_match"] >= 0} == {0, 2, 4}

    losses = {silo: [s["loss_min"] for r in applied for s in r["silos"] if s["silo"] == silo] for silo in SILOS}
    for silo in SILOS:
        assert losses[silo][-1] < losses[silo][0], f"{silo} learns nothing: {losses[silo]}"


def shares_are_lorars(silos: list[dict[str, Any]]) -> None:
    """Weight = |D| dL, share = weight / sum, recomputed from what the coordinator recorded."""
    weights = {s["silo"]: int(s["examples"]) * (s["loss_max"] - s["loss_min"]) for s in silos}
    assert set(weights) == set(SILOS)
    for silo in silos:
        assert int(silo["examples"]) == TRAIN_LINES
        assert silo["weight"] == pytest.approx(weights[silo["silo"]], rel=1e-9)
        assert silo["share"] == pytest.approx(weights[silo["silo"]] / sum(weights.values()), rel=1e-9)


def test_the_exported_folder_loads_and_gives_the_answers_that_the_silos_get(
    federation: Federation,
) -> None:
    it = federation
    it.wait(it.finished)
    folder = it.root / "exported"
    it.coordinator("export", str(folder))
    shown = json.loads(it.coordinator("status", "--json"))
    records = json.loads(it.coordinator("rounds", "--json"))
    statement = verified(folder, key_of("", it.root / "agents" / SILOS[0]))
    assert (statement.plan, statement.model) == (shown["plan_digest"], shown["best_model_digest"])
    applied = [record for record in records if record["outcome"] == "applied"]
    assert [(made.round, made.silos, made.model) for made in statement.rounds] == [
        (record["round"], len(SILOS), record["model_digest"]) for record in applied
    ]
    assert statement.exact_match is None, "of two silos one knows its own, and so the other's"
    model = T5ForConditionalGeneration.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bundle = Coordinator.load(CoordinatorFolder(it.folder)).shelf.compile("default")
    with (it.root / "data" / SILOS[0] / "test.jsonl").open() as lines:
        question = json.loads(next(lines))["question"]
    (it.root / "data" / SILOS[0] / "db.sqlite").rename(it.root / "db.sqlite")  # the SQL is asked for, not its rows
    answer = it.agent(SILOS[0], "ask", question, "--data", str(it.root / "data" / SILOS[0]))
    (it.root / "db.sqlite").rename(it.root / "data" / SILOS[0] / "db.sqlite")

    path = it.root / "data" / SILOS[0] / "schema.json"
    section = bundle.plan.training
    text = model_input(question, serialise(Schema.from_json(path.read_bytes(), path)))
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=section.max_input_tokens)
    with torch.inference_mode():
        out = model.generate(**ids, max_new_tokens=section.max_output_tokens, num_beams=1, do_sample=False)
    sql = tokenizer.decode(out[0], skip_special_tokens=True)
    assert sql.strip()
    assert sql in answer


def test_the_folder_answers_without_a_running_coordinator_too(federation: Federation) -> None:
    it = federation
    it.wait(it.finished)
    live = json.loads(it.coordinator("status", "--json"))
    assert live["running"]
    assert {silo["silo"] for silo in live["silos"]} == set(SILOS)
    assert it.metric("lorica_round") == 4
    assert it.metric("lorica_received_bytes_total") > 0
    it.processes.stop("coordinator")
    offline = json.loads(it.coordinator("status", "--json"))
    assert not offline["running"]
    assert offline["phase"] == "finished"
    assert offline["model_digest"] == live["model_digest"]
    it.serve()


def test_the_agents_commands(federation: Federation) -> None:
    it = federation
    silo = SILOS[1]
    assert json.loads(it.agent(silo, "status", "--json"))["silo"] == silo
    it.agent(silo, "pause")
    assert json.loads(it.agent(silo, "status", "--json"))["paused"]
    it.agent(silo, "resume")
    assert not json.loads(it.agent(silo, "status", "--json"))["paused"]
    it.agent(silo, "check", "--data", str(it.root / "data" / silo))
    it.processes.check()


def test_the_audit_logs_are_whole_and_agree(federation: Federation, tmp_path: Path) -> None:
    it = federation
    it.wait(it.finished)
    (tmp_path / "silos.heads").write_text(it.coordinator("audit", "show", "--heads"))
    for silo in SILOS:
        assert "heads that the other side holds agree" in it.agent(
            silo, "audit", "verify", "--receipts", str(tmp_path / "silos.heads")
        )
        assert "in the clear" in it.agent(silo, "audit", "report")
        (tmp_path / "heads").write_text(it.agent(silo, "audit", "show", "--heads"))
        it.coordinator("audit", "verify", "--receipts", str(tmp_path / "heads"))


def test_no_private_key_ever_left_its_silo(federation: Federation) -> None:
    it = federation
    keys = [(it.root / "agents" / silo / name).read_bytes() for silo in SILOS for name in ("identity.key", "tls.pem")]
    bodies = [b"".join(key.partition(b"-----END")[0].splitlines()[1:]) for key in keys]
    elsewhere = [path for folder in ("federation", "logs") for path in (it.root / folder).rglob("*") if path.is_file()]
    assert elsewhere
    for path in elsewhere:
        content = path.read_bytes()
        assert not any(body in content for body in bodies), path
