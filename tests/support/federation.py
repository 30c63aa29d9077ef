"""A federation of real processes over mutual TLS on loopback, driven by its own commands as an operator would.

Where its processes are warm (warm_processes.py), the commands run in this one: a cold start takes seconds of a core.
"""

import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from lorica.demo.observer import FederationView
from lorica.demo.ports import free_ports
from lorica.demo.processes import Processes, run
from lorica_coordinator.cli import main as coordinator_main
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_security.errors import StateError
from silo_agent.cli import main as agent_main
from tests.support.command_line import run_command
from tests.support.waiting import until
from tests.support.warm_processes import WarmProcesses

LONGEST_S = 800.0
_MAINS = {"lorica_coordinator.cli": coordinator_main, "silo_agent.cli": agent_main}


class Federation:
    """`data` maps silo names to their data folders; everything is kept below `root`. `more` is of every process's
    environment."""

    def __init__(self, root: Path, processes: Processes, data: Mapping[str, Path], **more: str) -> None:
        self.root = root
        self.data = data
        self.processes = processes
        self.ports = free_ports(4)
        self._environment = {
            "HOME": str(root / "home"),
            "XDG_CONFIG_HOME": str(root / "home" / "config"),
            "XDG_DATA_HOME": str(root / "home" / "data"),
            **more,
        }
        (root / "home").mkdir()

    @property
    def folder(self) -> Path:
        return self.root / "federation"

    @property
    def plans(self) -> Path:
        return self.folder / "state" / "plans"

    def coordinator(self, *arguments: str) -> str:
        """What the command prints; raises StateError when it fails."""
        return self._run("lorica_coordinator.cli", arguments, self._environment)

    def agent(self, silo: str, *arguments: str, extra: Mapping[str, str] | None = None) -> str:
        """As `coordinator`; `extra` is added to the environment."""
        return self._run("silo_agent.cli", arguments, {**self._of(silo), **(extra or {})})

    def _run(self, module: str, arguments: tuple[str, ...], extra: Mapping[str, str]) -> str:
        if not isinstance(self.processes, WarmProcesses):
            return run(module, *arguments, extra=extra)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in extra.items():
                patch.setenv(name, value)
            done = run_command(_MAINS[module], *arguments)
        if done.code:
            words = done.err.strip().splitlines() or ["no output"]
            raise StateError(f"{module} {arguments[0]} failed with exit code {done.code}: {words[-1]}")
        return done.out

    def init(self, *more: str) -> None:
        silos, enrolment, metrics, status = (str(port) for port in self.ports)
        self.coordinator(
            *("init", str(self.folder), "--host", "127.0.0.1", *more),
            *("--silos-port", silos, "--enrolment-port", enrolment),
            *("--metrics-port", metrics, "--status-port", status),
        )

    def serve(self, *arguments: str) -> None:
        self.processes.start("coordinator", "lorica_coordinator.cli", ["serve", *arguments], self._environment)
        self.view().wait_until_serving(self.processes.check, LONGEST_S)

    def start_agent(self, silo: str, *more: str, extra: Mapping[str, str] | None = None) -> None:
        """`more`: further arguments."""
        environment = {**self._of(silo), **(extra or {})}
        self.processes.start(silo, "silo_agent.cli", ["start", "--data", str(self.data[silo]), *more], environment)

    def _of(self, silo: str) -> dict[str, str]:
        return {**self._environment, "LORICA_SILO_DIR": str(self.root / "agents" / silo)}

    def view(self) -> FederationView:
        return FederationView(Coordinator.load(CoordinatorFolder(self.folder)).operator_access())

    def wait(self, reached: Callable[[], bool]) -> None:
        until(reached, self.processes.check, LONGEST_S)

    def all_ready(self) -> bool:
        status, _ = self.view().look()
        return [silo.state for silo in status.silos].count("ready") == len(self.data)

    def finished(self) -> bool:
        return self.view().look()[0].phase == "finished"

    def at_round(self, number: int) -> bool:
        status, _ = self.view().look()
        return status.round >= number or status.phase == "finished"

    def metric(self, sample: str) -> float:
        """The value of one sample on /metrics, such as `lorica_round`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[2]}/metrics") as reply:
            for line in reply.read().decode().splitlines():
                if line.startswith(f"{sample} "):
                    return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {sample}")
