"""`lorica simulate` with silos that have no labels beside ones that have: together or in turn they train, the latter
alone are scored."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorica.demo.plan import set_arguments
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.silos import keep_first, write_silo
from lorica.simulation.forecast.dry_run import dry_run
from lorica.simulation.run import silos_in, simulate
from lorica.simulation.workers.one_bench import NOBODYS_ENTROPY
from lorica_coordinator.plans.plan_folder import compile_plan
from lorica_coordinator.service.records import RoundRow
from lorica_security.errors import StateError
from lorica_security.host.files import write_private
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_wire.canonical import Digest
from tests.support.coordinator_edges import Workplace, make_plan, stored_vector
from tests.support.federation import Federation
from tests.support.warm_processes import WarmProcesses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OVERRIDES: dict[str, Any] = {
    "schedule.rounds": 2,
    "schedule.min_silos": 2,
    "evaluation.every": 1,
    "evaluation.max_examples": 8,
    "training.max_output_tokens": 16,
    "aggregation.weighting": "equal",
    "semi_supervised.unlabelled": ["ward-*"],
    "semi_supervised.order": "together",
    "semi_supervised.loss": "answer",
}


@pytest.fixture
def silos(tmp_path: Path) -> Path:
    folder = tmp_path / "silos"
    for name, specification in (("clinic", CLINIC), ("ward-1", INSURER)):
        write_silo(folder / name, specification, seed=3)
        keep_first(folder / name / "train.jsonl", 32)
    ward = folder / "ward-1"
    lines = [json.loads(line) for line in (ward / "train.jsonl").read_text().splitlines()]
    (ward / "train.jsonl").write_text("".join(json.dumps({**line, "query": 0}) + "\n" for line in lines))
    (ward / "dev.jsonl").unlink()
    return folder


def test_silos_without_labels_train_and_are_not_scored(silos: Path, tmp_path: Path) -> None:
    make_plan(tmp_path, overrides=OVERRIDES)
    plan = tmp_path / "plans" / "first"
    simulated = simulate(plan, silos_in(silos), tmp_path / "out", device="cpu", threads=1)
    rows = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["outcome"] == "applied"]
    assert [sorted(row["silos"]) for row in trained] == [["clinic", "ward-1"]] * 2
    for row in trained:
        assert {silo["outcome"] for silo in row["silos"].values()} == {"committed"}, "neither fails, in either round"
        assert row["micro_exact_match"] is not None, "one silo's scores are enough"
        assert ["dev_examples" in row["silos"][silo] for silo in ("clinic", "ward-1")] == [True, False]
    assert simulated.best is not None
    told = dry_run(plan, silos_in(silos), tmp_path / "dry", device="cpu", threads=1)
    told.require_no_problem()


IN_TURN = {
    **{key: value for key, value in OVERRIDES.items() if key != "semi_supervised.order"},
    "schedule.rounds": 2,
    "schedule.min_silos": 1,
    "aggregation.momentum": 0.0,
}


def test_rounds_in_turn_are_of_one_kind_and_go_on_where_a_simulation_was_cut_off(silos: Path, tmp_path: Path) -> None:
    make_plan(tmp_path, overrides=IN_TURN)
    plan = tmp_path / "plans" / "first"

    def cut(row: RoundRow) -> None:
        if row.round == 1:  # what ends after it is told on the way out
            raise KeyboardInterrupt

    whole = simulate(plan, silos_in(silos), tmp_path / "whole", device="cpu", threads=1)
    with pytest.raises(KeyboardInterrupt):
        simulate(plan, silos_in(silos), tmp_path / "cut", device="cpu", threads=1, on_round=cut)
    assert simulate(plan, silos_in(silos), tmp_path / "cut", device="cpu", threads=1).final == whole.final
    rows = [json.loads(line) for line in (tmp_path / "whole" / "rounds.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["outcome"] == "applied"]
    shown = [[name for name, silo in row["silos"].items() if silo["outcome"] == "committed"] for row in trained]
    assert shown == [["clinic"], ["ward-1"]]
    assert len({row["model"] for row in trained}) == 2, "each round moved it"
    assert all(row["micro_exact_match"] is not None for row in trained), "by the silo with labels"


def test_a_plan_for_which_a_kind_of_rounds_has_nobody_is_not_begun(silos: Path, tmp_path: Path) -> None:
    make_plan(tmp_path, overrides={**IN_TURN, "schedule.min_silos": 2})
    plan = tmp_path / "plans" / "first"
    with pytest.raises(StateError, match="min_silos = 2 for rounds of silos without labels, and 1 of 2 enrolled"):
        simulate(plan, silos_in(silos), tmp_path / "out", device="cpu", threads=1)


MASKED: dict[str, Any] = {
    **IN_TURN,
    "schedule.min_silos": 3,
    "aggregation.secure_aggregation": True,
    "aggregation.max_weight": 16.0,
    "evaluation.every": 0,
    "evaluation.initial": False,
    "semi_supervised.teacher": "mlm",
    "semi_supervised.loss": "probabilities",
    "semi_supervised.min_labelled": 3,
}
SIX = (*(f"clinic-{n}" for n in range(3)), *(f"ward-{n}" for n in range(3)))
ROUNDING = 1e-5
"""What the rounding of masked numbers, whose draws no two runs share, may come to in a round that begins at what the
rounding of the one before it left."""


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("six") / "silos"
    write_silo(folder / SIX[0], CLINIC, seed=3)
    keep_first(folder / SIX[0] / "train.jsonl", 8)
    keep_first(folder / SIX[0] / "dev.jsonl", 2)
    for name in SIX[1:]:
        shutil.copytree(folder / SIX[0], folder / name)
    return folder


@pytest.fixture(scope="module")
def over_network(six: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Six processes over mutual TLS go through the masked plan; the coordinator's is killed in the first round of silos
    without labels, when the one of those with labels is closed."""
    root = tmp_path_factory.mktemp("networked")
    (root / "logs").mkdir()
    with WarmProcesses(root / "logs") as processes:
        it = Federation(root, processes, {name: six / name for name in SIX})
        it.init("--no-plan", "--federation", "north")
        it.coordinator("plan", "new", "first", "--size", "micro", "--seed", "7", *set_arguments(MASKED))
        it.serve("--plan", "first")
        for name in SIX:
            it.agent(name, "enroll", it.coordinator("invite", name).strip())
            folder = SiloFolder(root / "agents" / name)
            folder.settings.write_text("[policy]\ntrust_on_first_use = true\n")
            write_private(folder.own_entropy, NOBODYS_ENTROPY)
            it.start_agent(name)
        it.wait(it.all_ready)
        it.coordinator("plan", "start", "first")
        for name in SIX:
            approves_its_group(it, name)
        it.wait(lambda: it.at_round(2))
        processes.kill("coordinator")
        it.serve("--plan", "first")
        it.wait(it.finished)
        yield it


def approves_its_group(federation: Federation, silo: str) -> None:
    """As its people do, who were told that somebody else chose whom it is summed with."""

    def proposed() -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(federation.agent(silo, "groups", "show", "--json"))
        return shown

    federation.wait(lambda: bool(proposed()["waits_for_people"]))
    link = proposed()["proposed"]
    assert sorted(map(sorted, link["groups"])) == [list(SIX[:3]), list(SIX[3:])], "each of one kind"
    federation.agent(silo, "groups", "approve", link["digest"])


def kinds(rows: list[dict[str, Any]]) -> dict[int, list[str]]:
    """By round that was made, which silos are in its sum."""
    return {
        row["round"]: [name for name, outcome in row["silos"].items() if outcome == "committed"]
        for row in rows
        if row["outcome"] in ("applied", "scored")
    }


def test_masked_rounds_in_turn_are_of_groups_of_one_kind_each(
    over_network: Federation, six: Path, tmp_path: Path
) -> None:
    """Three silos with labels and three without, each kind a release group, and a closing round of those with scores.
    Every silo makes chunks of each model again before it trains from it. In a simulation and over the network, where
    it is the same model but for rounding."""
    plan = over_network.plans / "first"
    simulate(plan, silos_in(six), tmp_path / "out", device="cpu", threads=1)
    rows = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    made = {row["round"]: row for row in rows if row["outcome"] in ("applied", "scored")}
    expected = {1: list(SIX[:3]), 2: list(SIX[3:]), 3: list(SIX[:3])}
    assert (
        kinds([{**row, "silos": {name: it["outcome"] for name, it in row["silos"].items()}} for row in rows])
        == expected
    )
    assert [row["outcome"] for row in made.values()] == ["applied", "applied", "scored"]
    assert made[1]["model"] != made[2]["model"]
    assert made[2]["micro_exact_match"] is not None, "by the closing round's sum"

    there = json.loads(over_network.coordinator("rounds", "--json"))
    assert kinds([{**row, "silos": {it["silo"]: it["outcome"] for it in row["silos"]}} for row in there]) == expected
    by_round = {row["round"]: row for row in there if row["outcome"] == "applied"}
    bundle = compile_plan(plan)
    networked, here = (
        Workplace.at(it / "state", bundle).models for it in (over_network.folder, tmp_path / "out" / "coordinator")
    )
    final = stored_vector(networked, Digest(by_round[2]["model_digest"]))
    assert np.abs(final - stored_vector(here, Digest(made[2]["model"]))).max() < ROUNDING
    assert np.abs(final - stored_vector(networked, networked.initial())).max() > 100 * ROUNDING
