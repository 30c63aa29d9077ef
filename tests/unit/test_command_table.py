"""The tables of commands say what the commands say, and load nothing that is not asked for."""

import inspect
import subprocess
import sys
from typing import Any

import pytest
import typer
import typer.main

from lorica.demo.processes import environment
from lorica_coordinator.cli import app as coordinator_app
from lorica_security.console.command_table import Row, commands_of
from silo_agent.cli import app as silo_app

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


@pytest.mark.parametrize(
    ("module", "needed"),
    [("lorica_coordinator", set[str]()), ("silo_agent", {"sqlalchemy"})],  # the journal is a database
)
def test_status_loads_nothing_that_computes(module: str, needed: set[str], tmp_path: Any) -> None:
    assert not (HEAVY - needed) & loaded_by(module, "status", "--dir", str(tmp_path))


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
