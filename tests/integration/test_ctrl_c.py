"""What Ctrl-C does is each program's choice, wherever it was started: in a terminal, a script, cron or CI.

The others that run for long are pressed Ctrl-C in their own tests: `silo-agent start`, `coordinator watch`, `lorica
simulate` and `demo`.
"""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lorica.cli import main as lorica
from lorica.demo.processes import environment
from lorica_coordinator.cli import main as coordinator
from silo_agent.cli import main as silo_agent
from tests.support.background import in_the_background
from tests.support.command_line import run_command
from tests.support.coordinator import FederationTemplate
from tests.support.coordinator import federation_template as federation_template

LONGEST_S = 120.0


@pytest.fixture
def handlers() -> Iterator[None]:
    """As they were before, afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("main", [coordinator, silo_agent, lorica])
def test_each_program_hears_ctrl_c_also_where_it_was_ignored(main: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert run_command(main, "--version").code == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_at_its_end_a_program_looks_through_nothing() -> None:
    """Python's own last search for circles took seconds, where PyTorch was loaded."""
    script = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "from lorica.cli import main; sys.argv[1:] = ['--version']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("asked", [signal.SIG_IGN, signal.SIG_DFL])
def test_nohup_is_for_whoever_starts_it_to_choose(asked: signal.Handlers) -> None:
    signal.signal(signal.SIGHUP, asked)
    assert run_command(lorica, "--version").code == 0
    assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) is (asked is signal.SIG_IGN)


def test_the_coordinator_ends_in_order(federation_template: FederationTemplate, tmp_path: Path) -> None:
    folder = federation_template.copy(tmp_path / "coordinator")
    with subprocess.Popen(
        in_the_background(
            *(sys.executable, "-m", "lorica_coordinator.cli", "serve", "--plan", "", "--dir", str(folder.root))
        ),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert any('"serving"' in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LONGEST_S)
        assert process.returncode == 0
        assert '"stopping"' in said


class Waiting(io.StringIO):
    """A terminal at which somebody presses Ctrl-C in place of a line."""

    def readline(self, size: int | None = -1, /) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return super().readline(size)


@pytest.mark.usefixtures("handlers")
def test_an_agent_that_waits_for_its_token_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr(sys, "stdin", Waiting())
    done = run_command(silo_agent, "enroll", "-", "--dir", tmp_path / "silo")
    assert done.code == 128 + signal.SIGINT
    assert "error" not in done.err
    assert not (tmp_path / "silo").exists()
