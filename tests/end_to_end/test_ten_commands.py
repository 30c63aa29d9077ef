"""From CSV files to a federated result with the ten commands of importing.md, typed as they stand there."""

import csv
import re
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from lorica.demo.silos.bank import BANK
from lorica.demo.silos.hospital import HOSPITAL
from lorica.demo.silos.silos import fill_database, questions
from lorica.demo.silos.specification import SiloSpecification
from tests.support.federation import Federation
from tests.support.warm_processes import WarmProcesses

PAGE: Final = Path(__file__).resolve().parents[2] / "ops" / "docs" / "importing.md"
PROGRAMS: Final = {"coordinator", "silo-agent"}
SILOS: Final = {"hospital": (HOSPITAL, "questions.csv", ";"), "bank": (BANK, "enquiries.csv", ",")}
LINES: Final = 40
SHORT: Final = (
    *("schedule.rounds=2", "training.epochs=1", "training.schema_in_input=false", "training.max_input_tokens=32"),
    *("training.max_output_tokens=16", "evaluation.every=2", "evaluation.initial=false"),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def typed() -> list[tuple[str, list[str]]]:
    """Who types what, of the page's block."""
    text = PAGE.read_text(encoding="utf-8")
    block = text.split("in ten commands\n", 1)[1].split("```console\n", 1)[1].split("```", 1)[0]
    lines = (re.fullmatch(r"(\w+)\$ (.+)", line) for line in block.splitlines())
    return [(line[1], shlex.split(line[2])) for line in lines if line]


def test_they_are_ten_at_most() -> None:
    commands = typed()
    assert 0 < len(commands) <= 10
    assert all(words[0] in PROGRAMS for _, words in commands)
    assert {who for who, _ in commands} == {"operator", *SILOS}


def write_source(place: Path, specification: SiloSpecification, name: str, separator: str) -> None:
    """What a spreadsheet exported, and the database that it asks."""
    with closing(sqlite3.connect(place / f"{specification.name}.sqlite")) as database:
        fill_database(specification, database, seed=3)
    with (place / name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(("Question", "SQL", "Patient"))
        for number, record in enumerate(questions(specification, seed=3).train[:LINES]):
            writer.writerow((record.question, record.query, number))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Each command as it stands on the page: folders are put below the test's own, the plan is made short, the address
    and the token are the real ones."""
    root = tmp_path_factory.mktemp("ten")
    for specification, name, separator in SILOS.values():
        write_source(root, specification, name, separator)
    (root / "logs").mkdir()
    tokens: dict[str, str] = {}

    def here(words: list[str]) -> list[str]:
        """Paths of the page, below `root`."""
        named = {name for _, name, _ in SILOS.values()} | set(SILOS)
        return [
            str(root / word) if word in named else word.replace("sqlite:///", f"sqlite:///{root}/") for word in words
        ]

    with WarmProcesses(root / "logs") as processes:
        it = Federation(root, processes, {silo: root / silo for silo in SILOS})
        for who, (_, command, *words) in typed():
            match command:
                case "init":
                    assert words[1:3] == ["--host", "coordinator.example.org"]
                    it.init(*words[3:], *(argument for value in SHORT for argument in ("--set", value)))
                case "invite":
                    tokens[words[0]] = it.coordinator(command, *words).strip()
                case "serve":
                    it.serve(*words)
                case "enroll":
                    assert words == ["TOKEN"]
                    it.agent(who, command, tokens[who])
                case "import":
                    it.agent(who, command, *here(words))
                case "start":
                    assert words[:2] == ["--data", who]
                    it.start_agent(who, *here(words[2:]))
                case _:
                    raise AssertionError(f"the page has a command that this test does not type: {command}")
        yield it


def test_a_federated_model_comes_of_them(federation: Federation) -> None:
    """Both silos trained in each round, and their scores are of SQL that ran on their own databases."""
    federation.wait(federation.finished)
    _, records = federation.view().look()
    applied = [record for record in records if record.outcome == "applied"]
    assert [record.round for record in applied] == [1, 2]
    for record in applied:
        assert {silo.silo for silo in record.silos if silo.outcome == "committed"} == set(SILOS)
    assert {silo.silo: silo.dev_executed > 0 for silo in applied[-1].silos} == dict.fromkeys(SILOS, True)
