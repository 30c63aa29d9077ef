"""The quickstart's commands, typed as they stand, on two hosts that a cable joins. Its name and paths are those of the
test."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from lorica.demo.silos.silos import keep_first
from tests.support.network_hosts import Cable, Host, Namespaces, why_not
from tests.support.waiting import until

PAGE = Path(__file__).resolve().parents[2] / "ops" / "docs" / "quickstart.md"
TYPED = re.compile(r"^(one|two)\$ (.*)$", re.MULTILINE)
STAYS = ("coordinator serve", "silo-agent start")
MODULES = {"coordinator": "lorica_coordinator.cli", "silo-agent": "silo_agent.cli", "lorica": "lorica.cli"}
EXAMPLES = 24
"""Of each file of a silo's data: the page has all of them, which takes minutes."""
LONGEST_S = 240.0
NO_NAMESPACES = why_not()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(NO_NAMESPACES), reason=f"two hosts need namespaces: {NO_NAMESPACES}"),
]


@dataclass(slots=True)
class Typist:
    """Types commands on the two hosts, each with its own home and its own `/srv`; `said` has each with what it
    printed."""

    root: Path
    hosts: dict[str, Host]
    said: dict[str, str] = field(default_factory=dict)
    staying: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def __enter__(self) -> Self:
        programs = self.root / "bin"
        programs.mkdir()
        for name, module in MODULES.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            (programs / name).chmod(0o755)
        for name in self.hosts:
            (self.root / name).mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.staying:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.staying:
            process.wait(60)

    def environment(self, name: str) -> dict[str, str]:
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith(("LORICA_", "XDG_"))},
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.root / name),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def log(self, name: str) -> Path:
        return self.root / f"{name}.log"

    def type(self, name: str, command: str) -> str:
        here = command.replace("/srv", str(self.root / name / "srv"))
        here = here.replace("coordinator.example.org", self.hosts["one"].address)
        line = ["bash", "-c", f"cd ~ && {'exec ' if command.startswith(STAYS) else ''}{here}"]
        if command.startswith(STAYS):
            with self.log(f"{name}-{len(self.staying)}").open("ab") as log:
                self.staying.append(self.hosts[name].popen(line, env=self.environment(name), log=log))
            return ""
        if command.startswith("silo-agent ask"):
            line[-1] += " 2>&1 || true"  # after one round a model writes SQL that may not run, and that is told
        return self.hosts[name].run(line, env=self.environment(name))

    def check(self) -> None:
        for number, process in enumerate(self.staying):
            logs = "".join(path.read_text()[-2000:] for path in sorted(self.root.glob("*.log")))
            assert process.poll() is None, f"{number} of {STAYS} ended with {process.returncode}: {logs}"

    def rounds(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.type("one", "coordinator rounds --json"))
        return rows

    def follow(self, page: Path) -> None:
        for name, command in TYPED.findall(page.read_text(encoding="utf-8")):
            if command.startswith("coordinator rounds"):
                until(lambda: any(row["outcome"] == "applied" for row in self.rounds()), self.check, LONGEST_S)
                self.type("one", "coordinator plan stop")  # one round shows it; the page lets it go on meanwhile
            self.said[f"{name}$ {command}"] = self.type(name, command)
            if command.startswith("lorica silos"):
                for file in (self.root / name / "srv").rglob("*.jsonl"):
                    keep_first(file, EXAMPLES)
            if command.startswith("coordinator invite bank"):
                shutil.copy(self.root / "one" / "bank.token", self.root / "two")  # the page: by a way that you trust
            if command == "coordinator serve":
                until(lambda: '"serving"' in self.log("one-0").read_text(), self.check, LONGEST_S)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Typist]:
    with Namespaces() as network:
        hosts = {"one": network.hub, "two": network.host(Cable())}
        with Typist(tmp_path_factory.mktemp("quickstart"), hosts) as typist:
            typist.follow(PAGE)
            yield typist


def test_every_command_of_the_page_was_typed(followed: Typist) -> None:
    assert len(followed.said) >= 15
    assert sum(command.startswith("two$") for command in followed.said) >= 5


def test_both_silos_trained_the_model_that_was_exported(followed: Typist) -> None:
    first = next(row for row in followed.rounds() if row["outcome"] == "applied")
    assert {silo["silo"]: silo["outcome"] for silo in first["silos"]} == {"bank": "committed", "hospital": "committed"}
    assert (followed.root / "one" / "srv" / "lorica" / "model" / "model.safetensors").stat().st_size > 1_000_000


def test_the_bank_answers_from_its_own_database_and_shows_what_left(followed: Typist) -> None:
    said = followed.said['two$ silo-agent ask "how many accounts are there"']
    assert "SELECT" in said.upper() or "SQL refused: it is empty" in said, "after a round or two it may write nothing"
    report = followed.said["two$ silo-agent audit report"]
    assert re.search(r"^[1-9]\d* updates?, [\d,]+ bytes; records, questions", report, re.MULTILINE)
    assert "uploaded, in the clear" in report


def test_nothing_listens_on_the_silos_host(followed: Typist) -> None:
    """What the page's table says of it."""
    lines = followed.hosts["two"].run(["ss", "-Htln"], env=followed.environment("two")).splitlines()
    assert lines == []
