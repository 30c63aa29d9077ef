"""Two silos train adapters under record-level privacy: real processes, mutual TLS, one killed in the middle of it
all."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from transformers import T5ForConditionalGeneration

from lorica.demo.plan import set_arguments
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.query_log import query_log
from lorica.demo.silos.silos import write_silo
from lorica.verify import key_of
from lorica_security.errors import StateError
from lorica_security.on_disk.provenance import verified
from tests.support.federation import Federation
from tests.support.warm_processes import WarmProcesses

SILOS = ("clinic", "insurer")
ROUNDS = 3
RECORDS = 300
VALUES = {
    "schedule.rounds": ROUNDS,
    "schedule.min_silos": len(SILOS),
    "adapters.rank": 2,
    "adapters.train": "b",
    "training.epochs": 1,
    "training.schema_in_input": "false",
    "training.max_input_tokens": 64,
    "training.max_output_tokens": 64,
    "privacy.level": "record",
    "privacy.target_epsilon": 6.0,
    "privacy.nominal_records": RECORDS,
    "privacy.expected_batch_size": 32,
    "privacy.steps": 3,
    "evaluation.every": 0,
    "evaluation.initial": "false",
    "evaluation.last": "false",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def settings(**values: object) -> list[str]:
    return list(set_arguments(VALUES | values))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A plan that has run to its end; the second silo's agent was killed while it ran, and started again."""
    root = tmp_path_factory.mktemp("private")
    data = {silo: root / "data" / silo for silo in SILOS}
    for specification in (CLINIC, INSURER):
        log = query_log(specification, records=RECORDS, seed=3).log
        write_silo(data[specification.name], specification, seed=3, splits=log)
    (root / "logs").mkdir()
    with WarmProcesses(root / "logs") as processes:
        it = Federation(root, processes, data)
        it.init("--no-plan")
        it.coordinator("plan", "new", "private", "--size", "micro", *settings())
        it.serve("--plan", "private")
        for silo in SILOS:
            it.agent(silo, "enroll", it.coordinator("invite", silo).strip())
            (root / "agents" / silo / "silo.toml").write_text(
                '[policy]\nrequire_privacy = "record"\nmax_epsilon = 7.5\n'
            )
            it.start_agent(silo)
        it.wait(it.all_ready)
        it.coordinator("plan", "start", "private")
        it.wait(lambda: it.at_round(2))
        processes.kill(SILOS[1])
        it.start_agent(SILOS[1])
        it.wait(it.finished)
        yield it


def shown(it: Federation, silo: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(it.agent(silo, "privacy", "show", "--json"))
    return facts


def test_the_ledger_has_each_round_and_a_kill_forgets_none(federation: Federation) -> None:
    plan = json.loads(federation.coordinator("rounds", "--json"))
    # Noise may take every weight below zero, and no seed decides the noise.
    assert [record["round"] for record in plan if record["outcome"] in ("applied", "zero_weight")] == [1, 2, 3]
    for silo in SILOS:
        releases = shown(federation, silo)["releases"]
        rounds = {release["round"] for release in releases}
        assert rounds == {1, 2, 3}
        assert {release["mechanism"] for release in releases} == {"gradients", "loss_reduction"}
        assert len(releases) >= 2 * ROUNDS, "a kill may waste an entry, and never take one back"
        assert "the ledger is whole" in federation.agent(silo, "privacy", "verify")
    assert len(shown(federation, SILOS[0])["releases"]) == 2 * ROUNDS
    assert shown(federation, SILOS[0])["spent"]["as_one_schedule"] <= 6.0


def test_what_the_coordinator_knows_is_the_same_for_both_silos_but_for_noise(federation: Federation) -> None:
    with closing(sqlite3.connect(federation.folder / "state" / "state.sqlite")) as database:
        told = database.execute("SELECT examples, loss_min FROM updates WHERE outcome = 'committed'").fetchall()
        assert database.execute("SELECT count(*) FROM evaluations").fetchall() == [(0,)]
    assert len(told) >= ROUNDS * len(SILOS)
    assert set(told) == {(RECORDS, 0.0)}, "the nominal number of records, and no loss"


def test_what_the_coordinator_shows_is_nothing_of_one_silo(federation: Federation) -> None:
    records = json.loads(federation.coordinator("rounds", "--json"))
    assert sum(record["outcome"] == "applied" for record in records) == ROUNDS
    silos = [silo for record in records for silo in record["silos"]]
    assert len(silos) >= ROUNDS * len(SILOS)
    for silo in silos:
        for number in ("examples", "loss_min", "loss_max", "loss_reduction", "weight", "share", "delta_norm"):
            assert float(silo[number]) == 0, number


def test_adapters_alone_went_over_the_wire_and_the_export_is_a_whole_model(federation: Federation) -> None:
    folder = federation.root / "exported"
    federation.coordinator("export", str(folder))
    statement = verified(folder, key_of("", federation.root / "agents" / SILOS[0]))
    assert (statement.promise.level, statement.promise.epsilon) == ("record", 6.0)
    assert statement.exact_match is None, "no score of private silos is told"
    loaded, report = T5ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    models = list((federation.root / "agents" / SILOS[0] / "models").glob("*.model"))
    bases = list((federation.root / "agents" / SILOS[0] / "models" / "base").glob("*.model"))
    assert len(bases) == 1
    assert bases[0].stat().st_size == 4 * sum(parameter.numel() for parameter in loaded.parameters())
    assert models
    assert all(model.stat().st_size < bases[0].stat().st_size / 3 for model in models)


def test_a_round_more_is_refused_and_the_model_is_kept(federation: Federation) -> None:
    with pytest.raises(StateError, match=r"exit code 8.*privacy budget is spent"):
        federation.agent(SILOS[0], "privacy", "forecast")
    assert "epsilon" in federation.agent(SILOS[0], "status")
    federation.coordinator("plan", "new", "again", "--size", "micro", "--seed", "5", *settings())
    federation.coordinator("plan", "start", "again")
    federation.wait(lambda: "budget" in federation.coordinator("status"))
    assert len(shown(federation, SILOS[0])["releases"]) == 2 * ROUNDS


def test_an_agent_answers_with_base_and_adapters_from_its_own_disk(federation: Federation) -> None:
    """What so small a model writes is rarely SQL, and then it is refused as such: an answer all the same."""

    def said() -> str:
        try:
            return federation.agent(SILOS[0], "ask", "how many visits were there in 2021")
        except StateError as refused:
            return str(refused).rpartition("silo-agent: ")[2]

    answer = said()
    assert "is not here" not in answer
    assert "no global model" not in answer
