"""The `lorica` commands that start a whole federation leave none of it behind when they are told to end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lorica.demo.processes import environment
from tests.support.background import in_the_background
from tests.support.waiting import until

LONGEST_S = 120.0
DEMO_S = 600.0
"""Its commands load PyTorch one after the other before the silos are at work."""


def processes_with(argument: str) -> set[int]:
    """The pids of those whose command line names `argument`."""
    return {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(argument in word for word in process.info["cmdline"] or ())
    }


def test_a_soak_that_is_told_to_end_stops_its_federation(tmp_path: Path) -> None:
    """SIGTERM is what a service manager or `timeout` sends, SIGHUP a terminal that is closed; the second hurries
    nobody."""
    out = tmp_path / "soak"
    with (tmp_path / "log").open("wb") as log:
        soak = subprocess.Popen(
            [sys.executable, "-m", "lorica.cli", "soak", "--rounds", "1", "--silos", "1", "--out", str(out)],
            env=environment(),
            stdout=log,
            stderr=log,
        )
    try:
        serving = out / "undisturbed/logs/coordinator.log"

        def check() -> None:
            assert soak.poll() is None, (tmp_path / "log").read_text()

        until(lambda: serving.exists() and b'"serving"' in serving.read_bytes(), check, LONGEST_S)
        assert len(processes_with(str(out))) >= 2
        soak.send_signal(signal.SIGTERM)
        soak.send_signal(signal.SIGHUP)
        assert soak.wait(LONGEST_S) in (128 + signal.SIGTERM, 128 + signal.SIGHUP)  # the lower number may come first
        assert processes_with(str(out)) == set()
    finally:
        for pid in processes_with(str(out)):
            os.kill(pid, signal.SIGKILL)
        soak.wait()


@pytest.mark.timeout(900)
def test_ctrl_c_in_the_demo_ends_all_of_it(tmp_path: Path) -> None:
    """Once all silos are at work. It says at once what it does, and is over when the last of its processes is."""
    out = tmp_path / "demo"
    with (tmp_path / "log").open("wb") as log:
        demo = subprocess.Popen(
            in_the_background(sys.executable, "-m", "lorica.cli", "demo", "--out", str(out)),
            env=environment(),
            stdout=log,
            stderr=log,
        )
    try:

        def check() -> None:
            assert demo.poll() is None, (tmp_path / "log").read_text()

        def at_work() -> bool:
            logs = [
                path.read_bytes()
                for path in (out / "logs").glob("*.log")
                if path.stem not in ("commands", "coordinator")
            ]
            return len(logs) == 4 and all(b'"started"' in text for text in logs)

        until(at_work, check, DEMO_S)
        here = psutil.Process(demo.pid).children(recursive=True)
        assert len(here) >= 5
        demo.send_signal(signal.SIGINT)
        assert demo.wait(LONGEST_S) == 128 + signal.SIGINT
        assert "stopping the coordinator and all agents" in (tmp_path / "log").read_text()
        assert not [one for one in here if one.is_running()]
        assert processes_with(str(out)) == set()
    finally:
        for pid in processes_with(str(out)):
            os.kill(pid, signal.SIGKILL)
        demo.kill()
        demo.wait()
