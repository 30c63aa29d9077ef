"""nvflare: a provisioned server and clients over mutual TLS, and FedAvg on numpy arrays.

Its documented settings for large models: FedAvg adds up results as they come, MALLOC_ARENA_MAX is 4 at the server and
2 at a client, and both collect garbage each round. Of its three transports `tcp` is used, which took a tenth less CPU
than `http`, its default, and a fifth less than `grpc`. Clients train inside their job's process, and the model goes
back whole, which costs the least. Nothing is written to disk as rounds end.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorica.bench.figures import Run
from lorica.bench.peers import virtual_environment
from lorica.bench.peers.deployment import Deployment, environment, run
from lorica.bench.peers.layout import layout, write_layout
from lorica.bench.peers.marks import Marks, follow
from lorica.bench.processes import Meter, imports_bytes
from lorica.demo.ports import free_ports

APP = "constant_app"
SERVER = "localhost"
ADMIN = "admin@bench.example"
SCHEME = "tcp"
_SERVER = ("nvflare.private.fed.app.server.server_train",)
_SERVER_JOB = ("nvflare.private.fed.app.server.runner_process", f"{APP}.nvflare_server")
_CLIENT = ("nvflare.private.fed.app.client.client_train",)
_CLIENT_JOB = ("nvflare.private.fed.app.client.worker_process", f"{APP}.nvflare_client")


@dataclass(frozen=True, slots=True)
class Nvflare:
    """nvflare from PyPI."""

    name: str = "nvflare"
    version: str = "2.9.0"

    def install(self, venv: Path) -> None:
        package = f"nvflare=={self.version}"
        if virtual_environment.is_installed(venv, package):
            return
        virtual_environment.create(venv)
        virtual_environment.pip(venv, package)
        virtual_environment.finish(venv, package)

    def run(self, *, venv: Path, work: Path, silos: int, parameters: int, rounds: int) -> Run:
        work, venv = work.resolve(), venv.resolve()
        env = environment(venv, HOME=str(work))
        (port,) = free_ports(1)
        names = [f"silo-{index}" for index in range(silos)]
        kits = _provision(work, names, port, env)
        _keep_inside(kits / SERVER, work)
        write_layout(work / "layout.json", layout(parameters))
        with Marks(work / "marks") as marks, Deployment(work) as deployment:
            server = _start(deployment, kits / SERVER, env, arenas=4)
            deployment.wait_until_listening(server, port)
            clients = [_start(deployment, kits / name, env, arenas=2) for name in names]
            job = _write_job(work, marks.path, silos=silos, rounds=rounds + 1)
            run(["nvflare", "job", "submit", "-j", job, "--startup-kit", kits / ADMIN], env=env, folder=work)
            with Meter(coordinator=[server], agents=[[pid] for pid in clients]) as meter:
                readings = follow(marks, deployment, meter, rounds + 1)
        beside = {**env, "PYTHONPATH": str(job / "app" / "custom")}
        return Run(
            system=self.name,
            silos=silos,
            parameters=parameters,
            readings=readings,
            coordinator_imports_bytes=_imports(venv, beside, _SERVER, _SERVER_JOB),
            agent_imports_bytes=_imports(venv, beside, _CLIENT, _CLIENT_JOB),
        )


def _provision(work: Path, clients: Sequence[str], port: int, env: Mapping[str, str]) -> Path:
    """The folder of startup kits: one for the server, for each client and for the operator. JSON is YAML."""
    server = {"name": SERVER, "type": "server", "org": "bench", "fed_learn_port": port}
    admin = {"name": ADMIN, "type": "admin", "org": "bench", "role": "project_admin"}
    project = {
        "api_version": 3,
        "name": "bench",
        "description": "a benchmark",
        "participants": [server, *({"name": name, "type": "client", "org": "bench"} for name in clients), admin],
        "builders": [
            {
                "path": "nvflare.lighter.impl.workspace.WorkspaceBuilder",
                "args": {"template_file": ["master_template.yml"]},
            },
            {
                "path": "nvflare.lighter.impl.static_file.StaticFileBuilder",
                "args": {"config_folder": "config", "scheme": SCHEME},
            },
            {"path": "nvflare.lighter.impl.cert.CertBuilder"},
            {"path": "nvflare.lighter.impl.signature.SignatureBuilder"},
        ],
    }
    (work / "project.yml").write_text(json.dumps(project))
    run(["nvflare", "provision", "-p", "project.yml", "-w", "provisioned", "--force"], env=env, folder=work)
    return work / "provisioned" / "bench" / "prod_00"


def _keep_inside(kit: Path, work: Path) -> None:
    """The server's stores lie in /tmp/nvflare unless its local settings say otherwise."""
    settings = json.loads((kit / "local" / "resources.json.default").read_text())
    settings["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(work / "snapshots")
    (manager,) = (component for component in settings["components"] if component["id"] == "job_manager")
    manager["args"]["uri_root"] = str(work / "jobs")
    (kit / "local" / "resources.json").write_text(json.dumps(settings))


def _start(deployment: Deployment, kit: Path, env: Mapping[str, str], *, arenas: int) -> int:
    command = ("bash", kit / "startup" / "sub_start.sh", "--once")
    return deployment.start(kit.name, command, env={**env, "MALLOC_ARENA_MAX": str(arenas)}, folder=kit)


def _write_job(work: Path, marks: Path, *, silos: int, rounds: int) -> Path:
    job = work / "job"
    custom, config = job / "app" / "custom", job / "app" / "config"
    config.mkdir(parents=True)
    shutil.copytree(Path(__file__).parent / "app", custom / APP, ignore=shutil.ignore_patterns("__pycache__"))
    (custom / "train.py").write_text(f"from {APP}.nvflare_client import main\n\nmain({silos})\n")
    persistor = {"layout": str(work / "layout.json"), "marks": str(marks), "rounds": rounds}
    fed_avg = {"num_clients": silos, "num_rounds": rounds, "persistor_id": "persistor", "memory_gc_rounds": 1}
    client = {
        "execution_mode": "in_process",
        "task_script_path": "train.py",
        "params_exchange_format": "numpy",
        "server_expected_format": "numpy",
        "params_transfer_type": "FULL",
        "memory_gc_rounds": 1,
    }
    filters: dict[str, Any] = {"task_data_filters": [], "task_result_filters": []}
    executor = {"path": "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor", "args": client}
    files = {
        job / "meta.json": {
            "name": "constant",
            "resource_spec": {},
            "min_clients": silos,
            "deploy_map": {"app": ["@ALL"]},
        },
        config / "config_fed_server.json": {
            "format_version": 2,
            "components": [{"id": "persistor", "path": f"{APP}.nvflare_server.ConstantPersistor", "args": persistor}],
            "workflows": [{"id": "fed_avg", "path": "nvflare.app_common.workflows.fedavg.FedAvg", "args": fed_avg}],
            **filters,
        },
        config / "config_fed_client.json": {
            "format_version": 2,
            "executors": [{"tasks": ["train"], "executor": executor}],
            "components": [],
            **filters,
        },
    }
    for file, content in files.items():
        file.write_text(json.dumps(content))
    return job


def _imports(venv: Path, env: Mapping[str, str], *processes: tuple[str, ...]) -> int:
    """Of all processes of a side together: each has imported what its program imports."""
    return sum(imports_bytes(venv / "bin" / "python", modules, env) for modules in processes)
