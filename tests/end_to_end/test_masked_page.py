"""The commands of the page on masks, from nothing to a masked sum, typed as they stand. Ports, folders and sizes are
the test's."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorica.demo.silos.bank import BANK
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.hospital import HOSPITAL
from lorica.demo.silos.silos import keep_first, write_silo
from tests.support.federation import Federation
from tests.support.warm_processes import WarmProcesses

PAGE = Path(__file__).resolve().parents[2] / "ops" / "docs" / "secure-aggregation.md"
TYPED = re.compile(r"^(operator|bank|clinic|hospital)\$ (.*)$", re.MULTILINE)
SETTINGS = re.compile(r"```toml\n(.*?)```", re.DOTALL)
SILOS = {"bank": BANK, "clinic": CLINIC, "hospital": HOSPITAL}
EXAMPLES = 24
"""Of each file of a silo's data: all of them take minutes."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Typist:
    """`said` has each command with what it printed; `stands_for` what the page's words in capitals mean."""

    def __init__(self, federation: Federation, settings: str) -> None:
        self.federation = federation
        self.settings = settings
        self.said: dict[str, str] = {}
        self.stands_for: dict[str, str] = {}

    def type(self, who: str, command: str) -> None:
        program, *words = (self.stands_for.get(word, word) for word in shlex.split(command))
        self.said[f"{who}$ {command}"] = said = self._run(who, program, words)
        match words:
            case ["invite", silo]:
                self.stands_for[f"TOKEN-OF-{silo.upper()}"] = said.strip()
            case ["enroll", _]:
                (self.federation.root / "agents" / who / "silo.toml").write_text(self.settings)
            case ["trust", "own"]:
                self.stands_for[f"KEY-OF-{who.upper()}"] = said.split()[1]
            case ["plan", "show", plan]:
                (self.stands_for[f"DIGEST-OF-{plan.upper()}"],) = re.findall(r"^digest +([0-9a-f]{64})$", said, re.M)

    def _run(self, who: str, program: str, words: list[str]) -> str:
        it = self.federation
        if who != "operator":
            assert program == "silo-agent"
            if words[0] == "start":
                it.start_agent(who)
                return ""
            if words[0] == "plan":  # people look again until the agent has fetched it, as the page says
                it.wait(lambda: self.stands_for["DIGEST-OF-FIRST"] in it.agent(who, "plan", "show"))
            return it.agent(who, *words)
        assert program == "coordinator"
        match words:
            case ["init", _, *more]:
                it.init(*more)
            case ["serve"]:
                it.serve()
            case ["rounds"]:
                it.wait(it.finished)
                return it.coordinator(*words)
            case _:
                return it.coordinator(*words)
        return ""


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Typist]:
    root = tmp_path_factory.mktemp("masked-page")
    data = {silo: root / "data" / silo for silo in SILOS}
    for silo, specification in SILOS.items():
        write_silo(data[silo], specification, seed=3)
        for file in data[silo].glob("*.jsonl"):
            keep_first(file, EXAMPLES)
    (root / "logs").mkdir()
    text = PAGE.read_text(encoding="utf-8")
    with WarmProcesses(root / "logs") as processes:
        typist = Typist(Federation(root, processes, data), SETTINGS.findall(text)[0])
        for who, command in TYPED.findall(text):
            typist.type(who, command)
        yield typist


def test_every_command_of_the_page_leads_to_masked_sums_of_all_three(typed: Typist) -> None:
    assert len(typed.said) >= 29
    first, *rounds = json.loads(typed.federation.coordinator("rounds", "--json"))
    assert (first["round"], first["outcome"]) == (0, "evaluated"), (
        "the scores of the initial model came with the first sum"
    )
    assert [row["outcome"] for row in rounds] == ["applied", "applied", "scored"], rounds
    for row in rounds:
        assert {silo["silo"]: silo["outcome"] for silo in row["silos"]} == dict.fromkeys(SILOS, "committed")
        assert "masked" in row


def test_what_people_read_on_the_way(typed: Typist) -> None:
    assert "bank, clinic, hospital" in typed.said["operator$ coordinator groups show"]
    assert f"silo-agent plan approve {typed.stands_for['DIGEST-OF-FIRST']}" in typed.said["bank$ silo-agent plan show"]
    report = typed.said["bank$ silo-agent audit report"]
    assert "masked" in report
    assert report.count("closing round, without training") == 1
