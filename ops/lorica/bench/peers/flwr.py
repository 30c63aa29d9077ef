"""flwr: a SuperLink and SuperNodes over TLS with signed requests (SuperNode authentication), and FedAvg.

It has no mutual TLS; its TLS is HTTP/1.1. The SuperLink keeps its state in memory and nothing is written to disk, which
is its default and the cheapest. A ServerApp and, each round, each silo's ClientApp run in processes of their own
(isolation `subprocess`, the default); on a silo's own machine its SuperNode talks to them without TLS, the default too.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lorica.bench.figures import Run
from lorica.bench.peers import virtual_environment
from lorica.bench.peers.deployment import Deployment, environment, run
from lorica.bench.peers.layout import layout, write_layout
from lorica.bench.peers.loopback_tls import write_certificates
from lorica.bench.peers.marks import Marks, follow
from lorica.bench.processes import Meter, imports_bytes
from lorica.demo.ports import free_ports

APP = "constant_app"
HOST = "127.0.0.1"
COSTS = "costs"
"""File in a run's folder in which the application notes what it measures itself."""
_SUPEREXEC = ("flwr.supercore.cli", "flwr.supercore.superexec.run_superexec")
_SUPERLINK = ("flwr.superlink.cli", "flwr.superlink.main")
_SERVERAPP = ("flwr.superlink.cli.flwr_serverapp", "flwr.superlink.runtime.run_serverapp")
_SUPERNODE = ("flwr.supernode.cli", "flwr.supernode.main")
_CLIENTAPP = ("flwr.supernode.cli.flwr_clientapp", "flwr.supernode.runtime.run_clientapp")


@dataclass(frozen=True, slots=True)
class Flwr:
    """flwr from PyPI, its open-source programs alone. `server` and `client` are modules of
    ops/lorica/bench/peers/app."""

    name: str = "flwr"
    version: str = "1.42.0"
    server: str = "flwr_server"
    client: str = "flwr_client"

    def install(self, venv: Path) -> None:
        package = f"flwr=={self.version}"
        if virtual_environment.is_installed(venv, package):
            return
        virtual_environment.create(venv)
        virtual_environment.pip(venv, "--no-deps", package)
        # Its bound on certifi, which has no code that matters here, is newer than some indexes are.
        others = ["certifi" if line.startswith("certifi") else line for line in self._requirements(venv)]
        virtual_environment.pip(venv, *others)
        virtual_environment.finish(venv, package)

    def run(self, *, venv: Path, work: Path, silos: int, parameters: int, rounds: int) -> Run:
        work = work.resolve()
        env = environment(
            venv.resolve(),
            FLWR_HOME=str(work / "home"),
            FLWR_TELEMETRY_ENABLED="0",
            FLWR_DISABLE_UPDATE_CHECK="1",
        )
        certificates = write_certificates(work / "tls")
        app = _write_app(work, server=self.server, client=self.client)
        port, *runtime_ports = free_ports(1 + silos)
        link = f"{HOST}:{port}"
        (work / "home").mkdir()
        (work / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "bench"\n\n[superlink.bench]\naddress = "{link}"\n'
            f'root-certificates = "{certificates.authority}"\n'
        )
        write_layout(work / "layout.json", layout(parameters))
        with Marks(work / "marks") as marks, Deployment(work) as deployment:
            superlink = deployment.start(
                "superlink",
                [
                    *("flower-superlink", "--host", HOST, "--port", str(port)),
                    *("--ssl-ca-certfile", certificates.authority, "--ssl-certfile", certificates.certificate),
                    *("--ssl-keyfile", certificates.key, "--enable-supernode-auth"),
                    "--disable-runtime-dependency-installation",
                ],
                env=env,
                folder=work,
            )
            deployment.wait_until_listening(superlink, port)
            supernodes = []
            for index, runtime_port in enumerate(runtime_ports):
                key = _write_key(work, f"silo-{index}")
                run(["flwr", "supernode", "register", key.with_suffix(".pub"), "bench"], env=env, folder=work)
                supernodes.append(
                    deployment.start(
                        f"supernode-{index}",
                        [
                            *("flower-supernode", "--superlink", link),
                            *("--root-certificates", certificates.authority, "--auth-supernode-private-key", key),
                            *("--host", HOST, "--port", str(runtime_port)),
                            *("--node-config", f"partition-id={index} num-partitions={silos}"),
                        ],
                        env=env,
                        folder=work,
                    )
                )
            config = {"marks": f'"{marks.path}"', "layout": f'"{work / "layout.json"}"', "costs": f'"{work / COSTS}"'}
            config |= {"silos": str(silos), "rounds": str(rounds + 1)}
            words = " ".join(f"{name}={value}" for name, value in config.items())
            run(["flwr", "run", app, "bench", "--run-config", words], env=env, folder=work)
            with Meter(coordinator=[superlink], agents=[[pid] for pid in supernodes]) as meter:
                readings = follow(marks, deployment, meter, rounds + 1)
        return Run(
            system=self.name,
            silos=silos,
            parameters=parameters,
            readings=readings,
            coordinator_imports_bytes=_imports(
                venv, app, env, _SUPERLINK, _SUPEREXEC, (*_SERVERAPP, f"{APP}.{self.server}")
            ),
            agent_imports_bytes=_imports(venv, app, env, _SUPERNODE, _SUPEREXEC, (*_CLIENTAPP, f"{APP}.{self.client}")),
        )

    def _requirements(self, venv: Path) -> list[str]:
        return list(virtual_environment.requirements(venv, "flwr"))


def _write_app(work: Path, *, server: str, client: str) -> Path:
    """A Flower app's folder: the package that both sides load, and the file that names its entry points."""
    folder = work / "app"
    folder.mkdir()
    shutil.copytree(Path(__file__).parent / "app", folder / APP, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pyproject.toml").write_text(
        f"""[project]
name = "constant"
version = "1.0.0"
description = "A constant in the place of training"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "lorica"

[tool.flwr.app.components]
serverapp = "{APP}.{server}:app"
clientapp = "{APP}.{client}:app"

[tool.flwr.app.config]
marks = ""
layout = ""
costs = ""
silos = 0
rounds = 0
"""
    )
    return folder


def _write_key(work: Path, name: str) -> Path:
    """A silo's key pair on P-256, the cheapest curve that flwr takes; the public one lies beside it as `.pub`."""
    key = ec.generate_private_key(ec.SECP256R1())
    file = work / f"{name}.key"
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    )
    file.chmod(0o600)
    file.with_suffix(".pub").write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    return file


def _imports(venv: Path, app: Path, env: dict[str, str], *processes: tuple[str, ...]) -> int:
    """Of all processes of a side together: each has imported what its program imports."""
    beside = {**env, "PYTHONPATH": str(app)}
    return sum(imports_bytes(venv / "bin" / "python", modules, beside) for modules in processes)
