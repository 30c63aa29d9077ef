"""What a shell gets when somebody presses Tab, from both commands, as bash asks."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


async def test_names_of_plans_and_silos_are_offered(folder: Path) -> None:
    def ask(line: str) -> "asyncio.Future[list[str]]":
        where = {"LORICA_COORDINATOR_DIR": str(folder)}
        return asyncio.get_running_loop().run_in_executor(
            None, lambda: offered("coordinator.cli", "coordinator", line, **where)
        )

    assert await asyncio.gather(
        ask("coordinator plan start "), ask("coordinator revoke h"), ask("coordinator revoke "), ask("coordinator wa")
    ) == [["default"], [HOSPITAL], [BANK, HOSPITAL], ["watch"]]


def test_where_no_federation_is_known_nothing_is_offered_and_nothing_complains(tmp_path: Path) -> None:
    home = {"XDG_CONFIG_HOME": str(tmp_path), "LORICA_COORDINATOR_DIR": str(tmp_path / "nowhere")}
    assert offered("coordinator.cli", "coordinator", "coordinator revoke ", **home) == []


def test_the_agent_completes_its_commands() -> None:
    assert "start" in offered("silo_agent.cli", "silo-agent", "silo-agent sta")
