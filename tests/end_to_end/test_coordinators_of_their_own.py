"""Two coordinators on two machines, as far as that goes on one: each with a folder and addresses of its own, one
PostgreSQL, one bucket, one folder of keys of attempts, and a Service in front that leads silos to whoever is ready.

The leader is stopped in a round (SIGSTOP: a host that hangs). The other one takes the round over. Then the first one
goes on, and writes nothing.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from lorica.demo.observer import FederationView
from lorica.demo.plan import set_arguments
from lorica.demo.ports import free_ports
from lorica.demo.processes import environment
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.hospital import HOSPITAL
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.query_log import query_log
from lorica.demo.silos.silos import write_silo
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from tests.support.federation import Federation
from tests.support.postgresql import SUPERUSER, PostgresqlServer, running_postgresql
from tests.support.s3_server import S3Server, running_moto
from tests.support.waiting import until
from tests.support.warm_processes import WarmProcesses

VALUES = {
    "schedule.rounds": 3,
    "schedule.min_silos": 2,
    "training.epochs": 1,
    "training.batch_size": 4,
    "training.schema_in_input": "false",
    "training.max_input_tokens": 32,
    "training.max_output_tokens": 32,
    "evaluation.initial": "false",
}
MASKED = {"schedule.min_silos": 3, "aggregation.secure_aggregation": "true", "aggregation.max_weight": 100.0}
LONGEST_S = 300.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Service:
    """What sends silos to the pod that is ready: TCP passed through to `target`. `lead` cuts what went elsewhere."""

    target: int
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    open: "list[socket.socket]" = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def lead(self, target: int) -> None:
        self.target, former = target, self.open
        self.open = []
        for one in former:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                inside, _ = self.listener.accept()
                try:
                    outside = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                except OSError:
                    inside.close()
                    continue
                outside.settimeout(None)
                self.open += [inside, outside]
                for source, sink in ((inside, outside), (outside, inside)):
                    threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while content := source.recv(65536):
            sink.sendall(content)
    for one in (source, sink):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@contextmanager
def service_to(target: int) -> Iterator[Service]:
    service = Service(target)
    thread = threading.Thread(target=service.serve, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.listener.shutdown(socket.SHUT_RDWR)
        service.listener.close()
        service.lead(0)
        thread.join(10)


@dataclass
class Machine:
    """One coordinator, with its folder."""

    root: Path
    log: Path
    process: "subprocess.Popen[bytes] | None" = None

    def serve(self, *words: str) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lorica_coordinator.cli", "serve", "--dir", str(self.root), *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(),
            )  # fmt: skip

    def said(self, words: str) -> bool:
        return words in self.log.read_text()

    def check(self) -> None:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-1500:]

    def view(self) -> FederationView:
        return FederationView(Coordinator.load(CoordinatorFolder(self.root)).operator_access())

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as server:
        yield server


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_moto(tmp_path_factory.mktemp("moto")) as moto:
        yield moto


def settings_of(file: Path, **values: str) -> None:
    lines = file.read_text().splitlines()
    for key, value in values.items():
        (at,) = (number for number, line in enumerate(lines) if line.partition(" =")[0] == key)
        lines[at] = f"{key} = {value}"
    file.write_text("\n".join([*lines, ""]))


def everything_outside(server: PostgresqlServer, moto: S3Server, keys: Path, name: str) -> tuple[object, ...]:
    tables = server.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1", database=name)
    rows = [sorted(map(repr, server.rows(f'SELECT * FROM "{table}"', database=name))) for (table,) in tables]
    return rows, sorted(moto.bucket(name).names()), sorted(path.name for path in keys.rglob("*"))


EVERY = pytest.mark.skipif(not os.environ.get("LORICA_EVERY_KILL"), reason="make crash-postgresql")


@pytest.mark.parametrize("name", ["clear", pytest.param("masked", marks=EVERY)])
def test_a_round_goes_on_elsewhere_when_its_leader_hangs_and_that_one_writes_nothing_after(
    name: str, server: PostgresqlServer, moto: S3Server, tmp_path: Path
) -> None:
    server.execute(f"CREATE DATABASE {name}")
    data = {}
    for silo in (CLINIC, INSURER) if name == "clear" else (CLINIC, INSURER, HOSPITAL):
        data[silo.name] = tmp_path / "data" / silo.name
        write_silo(data[silo.name], silo, seed=3, splits=query_log(silo, records=24, seed=3).log)
    (tmp_path / "logs").mkdir()
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    url = f"postgresql+psycopg://{SUPERUSER}@/{name}?host={server.folder}"
    with WarmProcesses(tmp_path / "logs") as processes:
        it = Federation(tmp_path, processes, data)
        it.init("--no-plan", "--database", url)
        machines = [Machine(it.folder, tmp_path / "logs" / "first.log")]
        with service_to(it.ports[0]) as service:
            settings_of(
                it.folder / "federation.toml",
                blobs=f'"{moto.url(name)}"', attempt_keys=f'"{keys}"', silos_port=str(service.port),
            )  # fmt: skip
            second = tmp_path / "second"
            second.mkdir(mode=0o700)
            shutil.copytree(it.folder / "keys", second / "keys")
            shutil.copy2(it.folder / "federation.toml", second)
            silos, enrolment, metrics, status = free_ports(4)
            settings_of(
                second / "federation.toml",
                silos=f'"127.0.0.1:{silos}"', enrolment=f'"127.0.0.1:{enrolment}"',
                metrics=f'"127.0.0.1:{metrics}"', status=f'"127.0.0.1:{status}"',
            )  # fmt: skip
            machines.append(Machine(second, tmp_path / "logs" / "second.log"))
            try:
                outside = partial(everything_outside, server, moto, keys, name)
                _take_over(it, machines[0], machines[1], service, silos, outside, masked=name == "masked")
            finally:
                for machine in machines:
                    machine.end()


def _take_over(
    it: Federation,
    first: Machine,
    second: Machine,
    service: Service,
    silos_port: int,
    outside: Callable[[], tuple[object, ...]],
    *,
    masked: bool,
) -> None:
    values = VALUES | (MASKED if masked else {})
    it.coordinator("plan", "new", "plain", "--size", "micro", *set_arguments(values))
    first.serve("--plan", "plain")
    first.view().wait_until_serving(first.check, LONGEST_S)
    second.serve()
    until(lambda: second.said("stands by"), second.check, LONGEST_S)
    assert not (second.root / "state" / "plans").exists()
    for silo in it.data:
        folder = it.root / "agents" / silo
        folder.mkdir(mode=0o700, parents=True)
        (folder / "silo.toml").write_text("[policy]\ntrust_on_first_use = true\n")
        it.agent(silo, "enroll", it.coordinator("invite", silo).strip())
        it.start_agent(silo)
    it.wait(it.all_ready)
    it.coordinator("plan", "start", "plain")
    phase = "masking" if masked else "collecting"
    it.wait(lambda: it.view().look()[0].phase == phase and it.at_round(2))
    assert first.process is not None
    assert second.process is not None

    first.process.send_signal(signal.SIGSTOP)
    second.view().wait_until_serving(second.check, LONGEST_S)
    service.lead(silos_port)
    until(lambda: second.view().look()[0].phase == "finished", second.check, LONGEST_S)
    _, rounds = second.view().look()
    last = [(4, 1, "scored")] if masked else []
    assert [(one.round, one.attempt, one.outcome) for one in rounds] == [
        *((n, 1, "applied") for n in (1, 2, 3)), *last,
    ]  # fmt: skip
    assert all({silo.silo for silo in one.silos} == set(it.data) for one in rounds)

    before = outside()
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(60) != 0
    assert first.said("another coordinator leads, in a later term")
    assert outside() == before
    assert second.process.poll() is None
    second.process.terminate()
    assert second.process.wait(60) == 0, second.log.read_text()[-1500:]
