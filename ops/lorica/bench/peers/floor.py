"""The floor: a bare gRPC loop over mutual TLS with one accumulator. No digest, no signature, nothing written to disk.

What any system pays that moves the same bytes through gRPC in Python. It says how fast the machine is just now, so that
figures from different machines, and from different hours of a shared one, can be compared.
"""

import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from lorica.bench.figures import Run
from lorica.bench.peers.deployment import Deployment
from lorica.bench.peers.loopback_tls import write_certificates
from lorica.bench.peers.marks import Marks, follow
from lorica.bench.processes import Meter, imports_bytes
from lorica.demo.ports import free_ports
from lorica.demo.processes import environment

_MODULE = "lorica.bench.peers.floor_process"


@dataclass(frozen=True, slots=True)
class Floor:
    """The grpcio that is installed here."""

    name: str = "floor"
    version: str = version("grpcio")

    def install(self, venv: Path) -> None:
        """Nothing is needed but what Lorica has."""

    def run(self, *, venv: Path, work: Path, silos: int, parameters: int, rounds: int) -> Run:
        write_certificates(work / "tls")
        (port,) = free_ports(1)
        words = [str(work / "tls"), str(port), str(silos), str(parameters), str(rounds + 1)]
        with Marks(work / "marks") as marks, Deployment(work) as deployment:

            def start(name: str, role: str) -> int:
                command = [sys.executable, "-m", _MODULE, role, *words, str(marks.path)]
                return deployment.start(name, command, env=environment(), folder=work)

            server = start("server", "serve")
            deployment.wait_until_listening(server, port)
            clients = [start(f"client-{index}", "exchange") for index in range(silos)]
            with Meter(coordinator=[server], agents=[[pid] for pid in clients]) as meter:
                readings = follow(marks, deployment, meter, rounds + 1)
        imports = imports_bytes(sys.executable, [_MODULE], environment())
        return Run(
            system=self.name,
            silos=silos,
            parameters=parameters,
            readings=readings,
            coordinator_imports_bytes=imports,
            agent_imports_bytes=imports,
        )
