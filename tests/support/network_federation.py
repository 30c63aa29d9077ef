"""A federation of real processes, each silo on a host of its own behind a cable that a test can spoil."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lorica.demo.plan import set_arguments
from lorica.demo.ports import free_ports
from tests.support.json_logs import logged
from tests.support.network_hosts import Cable, Host, Network
from tests.support.waiting import until

LONGEST_S = 600.0
SCHEMA = {
    "db_id": "places",
    "source": "test",
    "tables": [
        {
            "name": "PEOPLE",
            "columns": [
                {"name": name, "sql_type": "text", "type": "text", "primary_key": False, "foreign_key": False}
                for name in ("NAME", "CITY")
            ],
        }
    ],
}


def data_folder(folder: Path) -> Path:
    """Eight questions to train on and one to be asked."""
    folder.mkdir(parents=True)
    lines = [
        json.dumps(
            {
                "id": f"q{number}",
                "question": f"how many people live in city {number} ?",
                "db_id": "places",
                "query": f"SELECT COUNT ( * ) FROM PEOPLE WHERE CITY = '{number}' ;",
            }
        )
        for number in range(9)
    ]
    (folder / "train.jsonl").write_text("\n".join(lines[:8]) + "\n")
    (folder / "dev.jsonl").write_text(lines[8] + "\n")
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    return folder


@dataclass(slots=True)
class SiloHost:
    """A silo, its cable and its agent's process; `before` are the cables that it had before it moved."""

    name: str
    cable: Cable
    host: Host
    process: "subprocess.Popen[bytes] | None" = None
    before: list[Cable] = field(default_factory=list)


class NetworkFederation:
    """`with NetworkFederation(...) as federation`: the coordinator serves on the hub; silos are added one by one."""

    def __init__(self, root: Path, network: Network, *, size: str, plan: Mapping[str, object]) -> None:
        self.root = root
        self.network = network
        self.silos: dict[str, SiloHost] = {}
        self._size = size
        self._plan = plan
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ports = free_ports(3)  # free on this host, which is where they are used when there are no namespaces
        (root / "home").mkdir(parents=True)
        (root / "logs").mkdir()
        self._environment = {
            **{name: value for name, value in os.environ.items() if name.lower() not in ("https_proxy", "all_proxy")},
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
            "HOME": str(root / "home"),
            "XDG_CONFIG_HOME": str(root / "home" / "config"),
            "XDG_DATA_HOME": str(root / "home" / "data"),
        }

    # ---- processes ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        silos, enrolment, metrics = map(str, self._ports)
        self.coordinator(
            *(
                "init",
                str(self.root / "federation"),
                "--host",
                self.network.hub.address,
                "--no-plan",
                "--status-port",
                "0",
            ),
            *("--silos-port", silos, "--enrolment-port", enrolment, "--metrics-port", metrics),
        )
        self.coordinator("plan", "new", "net", "--size", self._size, *set_arguments(self._plan))
        self._start(self.network.hub, "coordinator", "lorica_coordinator.cli", "serve", "--plan", "net")
        until(lambda: self.metric("lorica_round") is not None, self.check, LONGEST_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                if process.poll() is None:
                    os.killpg(process.pid, number)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)

    def _start(self, host: Host, name: str, module: str, *arguments: str) -> "subprocess.Popen[bytes]":
        environment = {**self._environment, "LORICA_SILO_DIR": str(self.root / "agents" / name)}
        with (self.root / "logs" / f"{name}.log").open("ab") as log:
            process = host.popen([sys.executable, "-m", module, *arguments], env=environment, log=log)
        self._processes.append(process)
        return process

    def check(self) -> None:
        for process in self._processes:
            assert process.poll() is None, f"{process.args} ended with {process.returncode}: {self.log_tails()}"

    def log_tails(self) -> str:
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-12:])
            for path in sorted((self.root / "logs").glob("*.log"))
        )

    def wait(self, reached: Callable[[], bool]) -> None:
        try:
            until(reached, self.check, LONGEST_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log_tails()}") from error

    def coordinator(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "lorica_coordinator.cli", *arguments]
        return self.network.hub.run(command, env=self._environment)

    # ---- silos ----------------------------------------------------------------------------------------------------

    def enrol(self, name: str, cable: Cable) -> SiloHost:
        """A new silo on a host of its own, enrolled over its cable; its agent is not started."""
        token = self.coordinator("invite", name).strip().splitlines()[-1]
        silo = SiloHost(name, cable, self.network.host(cable))
        data_folder(self.root / "data" / name)
        environment = {**self._environment, "LORICA_SILO_DIR": str(self.root / "agents" / name)}
        silo.host.run([sys.executable, "-m", "silo_agent.cli", "enroll", token], env=environment)
        self.silos[name] = silo
        return silo

    def start_agent(self, silo: SiloHost) -> None:
        data = self.root / "data" / silo.name
        silo.process = self._start(silo.host, silo.name, "silo_agent.cli", "start", "--data", str(data))

    def lose(self, silo: SiloHost) -> None:
        """The silo's host loses its power: nothing of it is ever heard again."""
        assert silo.process is not None
        silo.cable.cut()
        os.killpg(silo.process.pid, signal.SIGKILL)
        silo.process.wait()
        self._processes.remove(silo.process)
        silo.process = None

    def move(self, silo: SiloHost, cable: Cable) -> None:
        """The silo comes back from its disk, on a new host with a new address."""
        silo.before.append(silo.cable)
        silo.cable, silo.host = cable, self.network.host(cable)
        self.start_agent(silo)

    # ---- looking ---------------------------------------------------------------------------------------------------

    def metric(self, sample: str) -> float | None:
        """One sample of /metrics, such as `lorica_round`; None while nothing answers."""
        try:
            with (
                self.network.hub.entered(),
                urllib.request.urlopen(f"http://127.0.0.1:{self._ports[2]}/metrics", timeout=10) as reply,
            ):
                text = reply.read().decode()
        except OSError:
            return None
        for line in text.splitlines():
            if line.startswith(f"{sample} "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {sample}")

    def in_phase(self, phase: str) -> bool:
        return self.metric(f'lorica_phase{{phase="{phase}"}}') == 1.0

    def rounds(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = json.loads(self.coordinator("rounds", "--json"))
        return records

    def logged(self, name: str, event: str) -> list[dict[str, Any]]:
        """The log lines of one kind of the coordinator, or of a silo's agent."""
        return logged(self.root / "logs" / f"{name}.log", event)
