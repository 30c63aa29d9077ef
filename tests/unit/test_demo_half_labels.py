"""The demo with labels hidden at half of its silos: what the branches have, what the plan asks, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from lorica.cli import main
from lorica.demo.half_labels import BRANCHES, LABELLED, NAMES, judged_on, overrides, write_silos
from lorica_coordinator.plans.plan_folder import require_valid
from lorica_security.errors import ConfigurationError
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.settings import Settings
from tests.support.command_line import run_command


def lines(folder: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("half")
    write_silos(folder / "silos", folder / "answers", seed=1)
    return folder / "silos", folder / "answers"


def test_no_answer_is_in_a_file_of_a_branch(made: tuple[Path, Path]) -> None:
    silos, answers = made
    assert sorted(path.name for path in silos.iterdir()) == sorted(NAMES)
    for branch in BRANCHES:
        told = b"".join(path.read_bytes() for path in (silos / branch).iterdir() if path.suffix in (".jsonl", ".json"))
        assert b"SELECT" not in told
        for split in ("train", "test"):
            known = lines(answers / branch, split)
            hidden = [line.pop("query") for line in known]
            assert lines(silos / branch, split) == known
            assert all(query.startswith("SELECT") for query in hidden)
        sources = SiloSources(Settings.model_validate({"data": {"folder": str(silos / branch)}}), silos / "scratch")
        assert not sources.data().labelled, "its agent takes it for what it is"


def test_branches_ask_what_no_silo_with_labels_was_told(made: tuple[Path, Path]) -> None:
    silos, answers = made
    for name, branch in zip(LABELLED, BRANCHES, strict=True):
        trained = {line["query"] for line in lines(silos / name, "train")}
        judged = {line["query"] for place in judged_on(silos, answers).values() for line in lines(place, "test")}
        assert trained.isdisjoint(judged)
        assert {line["id"] for line in lines(silos / name, "train")}.isdisjoint(
            line["id"] for line in lines(answers / branch, "train")
        )
    assert judged_on(silos, answers)[LABELLED[0]] == silos / LABELLED[0]
    assert judged_on(silos, answers)[BRANCHES[0]] == answers / BRANCHES[0]


@pytest.mark.parametrize("teacher", [True, False])
def test_both_plans_are_ones_that_can_be_made(teacher: bool) -> None:
    require_valid(name="it", federation="demo", overrides=overrides(teacher=teacher))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--labels", "half", "--secure"), ("2 silos with labels train alone", "masks take 3")),
        (("--labels", "half", "--epsilon", "8"), ("record-level privacy", "leave DP or LABELS out")),
        (("--labels", "third"), ("'third' is no share", "half")),
    ],
)
def test_what_it_does_not_go_with_is_refused_before_anything_is_made(
    tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    run_command(main, "demo", "--out", out, *arguments).is_refusal(ConfigurationError, *words)
    assert not out.exists()
