"""What a shell gets when somebody presses Tab, from both commands, as bash asks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import typer.main

from lorica_coordinator.cli import app
from lorica_coordinator.commands.completion import plan_names, silo_names
from tests.support.coordinator import BANK, HOSPITAL, FederationTemplate
from tests.support.coordinator import federation_template as federation_template

ASKING = "from {module} import main; import sys; sys.argv[0] = {name!r}; main()"


def offered(module: str, name: str, line: str, **environment: str) -> list[str]:
    words = line.split(" ")
    done = subprocess.run(
        [sys.executable, "-c", ASKING.format(module=module, name=name)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            f"_{name.upper().replace('-', '_')}_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.fixture(scope="module")
def folder(federation_template: FederationTemplate, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federation_template.copy(tmp_path_factory.mktemp("completion") / "coordinator").root


def context(monkeypatch: pytest.MonkeyPatch, folder: Path) -> typer.Context:
    monkeypatch.setenv("LORICA_COORDINATOR_DIR", str(folder))
    return typer.Context(typer.main.get_command(app))


def test_names_of_plans_are_offered_to_the_shell(folder: Path) -> None:
    where = {"LORICA_COORDINATOR_DIR": str(folder)}
    assert offered("lorica_coordinator.cli", "coordinator", "coordinator plan start ", **where) == ["default"]


def test_names_of_silos_are_offered_by_how_they_begin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = context(monkeypatch, folder)
    assert silo_names(asked, "") == [BANK, HOSPITAL]
    assert silo_names(asked, "h") == [HOSPITAL]
    assert plan_names(asked, "x") == []


def test_where_no_federation_is_known_nothing_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = context(monkeypatch, tmp_path / "nowhere")
    assert silo_names(asked, "") == plan_names(asked, "") == []


def test_the_agent_completes_its_commands() -> None:
    assert "start" in offered("silo_agent.cli", "silo-agent", "silo-agent sta")
