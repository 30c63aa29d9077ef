"""The tables of commands say what the commands say, and load nothing that is not asked for."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from lorica.demo.processes import environment
from lorica_coordinator.cli import app as coordinator_app
from lorica_security.console.command_table import Row, commands_of
from silo_agent.cli import app as silo_app
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import store_credentials
from tests.support.federation_peer import TestNet

PROGRAMS = {"coordinator": coordinator_app, "silo-agent": silo_app}
HEAVY = {"torch", "transformers", "numpy", "scipy", "sqlalchemy", "alembic", "opacus", "peft", "sqlglot", "structlog"}
LOADED = """
import sys
from {module}.cli import main
sys.argv[1:] = {words!r}
try:
    main()
except SystemExit:
    pass
print("LOADED", *sys.modules)
"""


def loaded_by(module: str, *words: str) -> set[str]:
    """Modules that a process has after such a command, whatever came of that."""
    code = LOADED.format(module=module, words=list(words))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    return set(done.stdout.rpartition("LOADED ")[2].split())


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_summary_is_the_first_paragraph_of_the_command_itself(program: str) -> None:
    group: Any = typer.main.get_command(PROGRAMS[program])
    listed = group.get_help(typer.Context(group, max_content_width=10_000, terminal_width=10_000))
    for name, command in group.commands.items():
        said = " ".join(inspect.cleandoc(command.short_help).split())
        assert f"{name} {said}" in " ".join(listed.split())


@pytest.mark.parametrize(
    ("module", "commands"),
    [("lorica_coordinator", "lorica_coordinator.commands"), ("silo_agent", "silo_agent.commands")],
)
def test_help_loads_no_command(module: str, commands: str) -> None:
    assert not {name for name in loaded_by(module, "--help") if name.startswith((commands, "pydantic", "cryptography"))}


def test_a_silos_status_loads_no_more_than_it_tells_of(tmp_path: Path) -> None:
    silo = SiloFolder(tmp_path)
    store_credentials(silo, TestNet.create().credentials("localhost:1"))
    silo.make()
    loaded = loaded_by("silo_agent", "status", "--dir", str(tmp_path))
    assert not (HEAVY | {"grpc", "asyncio"}) & loaded
    assert "silo_agent.edges.disk.round_journal" in loaded, "it came to its end"


def test_a_coordinators_status_asks_by_a_call_and_loads_nothing_of_what_answers(tmp_path: Path) -> None:
    loaded = loaded_by("lorica_coordinator", "status", "--dir", str(tmp_path))
    answers = ("silo_wire.messages", "silo_wire.codecs", "silo_wire.plans", "lorica_security.secure_aggregation")
    assert not {name for name in loaded if name in HEAVY or name.startswith((*answers, "lorica_coordinator.rounds"))}
    assert "lorica_coordinator.edges.operator_host.operator_client" in loaded


def test_a_mistyped_command_is_told_of_the_nearest_and_an_unknown_one_is_refused() -> None:
    group: Any = typer.main.get_command(coordinator_app)
    with pytest.raises(Exception, match="Did you mean 'status'"):
        group.resolve_command(typer.Context(group), ["statsu"])


def test_a_row_may_be_a_function_or_a_group() -> None:
    table = commands_of(
        Row("stop", "lorica_coordinator.commands.plan_commands:plan_stop", "Stop."),
        Row("plan", "lorica_coordinator.commands.plan_commands:plan_app", "Plans."),
    )
    app = typer.Typer(cls=table)
    app.callback()(lambda: None)
    group: Any = typer.main.get_command(app)
    assert list(group.commands) == ["stop", "plan"]
    assert "new" in group.commands["plan"].commands
    assert not hasattr(group.commands["stop"], "commands")
