"""A study on a Dask cluster: a scheduler and workers of their own, over mutual TLS on loopback.

Whoever is on the network chooses who answers at the scheduler's address and with which certificate; who starts a
worker, its release, its folder and its threads.
"""

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client
from distributed.security import Security

from lorica.demo.ports import free_ports
from lorica.experiments import dask_cluster
from lorica.experiments.dask_cluster import DaskCluster, Release
from lorica.experiments.definition import Study
from lorica.experiments.results_file import results
from lorica.experiments.run import run_study
from lorica_security.console.strict_toml import parse_toml
from lorica_security.errors import ConfigurationError
from tests.support.certificates import authority_and_server
from tests.support.waiting import until
from tests.unit.test_study_shards import STUDY, data

__all__ = ["data"]
ROOT = Path(__file__).resolve().parents[2]
QUIET = ("--dashboard-address", "127.0.0.1:0")
TWO_RUNS = parse_toml(
    Study, STUDY.replace('["fedopt", "fedopt-lorar", "fedavg"]', '["fedopt", "fedavg"]'), "study.toml"
)


def certificates(folder: Path) -> Path:
    """As --dask-tls has them: one certificate, for all of a cluster."""
    folder.mkdir()
    root, (key, certificate) = authority_and_server("127.0.0.1")
    for name, content in (("ca.pem", root), ("cert.pem", certificate), ("key.pem", key)):
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    return folder


@dataclass(frozen=True, slots=True)
class Running:
    cluster: DaskCluster
    scheduler: "subprocess.Popen[bytes]"
    workers: "dict[str, subprocess.Popen[bytes]]"
    client: Any


def program(*words: str, tls: Path) -> "subprocess.Popen[bytes]":
    parts = ("--tls-ca-file", "ca.pem"), ("--tls-cert", "cert.pem"), ("--tls-key", "key.pem")
    given = [word for option, name in parts for word in (option, str(tls / name))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "dask", *words, *given], cwd=tls,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
    )  # fmt: skip


@contextmanager
def ended(*processes: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(30)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tls = certificates(tmp_path_factory.mktemp("dask") / "tls")
    address = f"tls://127.0.0.1:{free_ports(1)[0]}"
    host, _, port = address.removeprefix("tls://").partition(":")
    scheduler = program("scheduler", "--host", host, "--port", port, *QUIET, "--no-show", tls=tls)
    workers = {
        name: program(
            "worker", address, "--name", name, "--nthreads", threads, "--no-nanny", *QUIET,
            "--memory-limit", "0", "--host", "127.0.0.1", "--local-directory", str(tls.parent / name), tls=tls,
        )
        for name, threads in (("one", "1"), ("two", "1"), ("wide", "2"))
    }  # fmt: skip
    with ended(scheduler, *workers.values()):
        cluster = DaskCluster(address, tls)
        security = Security(  # type: ignore[no-untyped-call]
            tls_ca_file=str(tls / "ca.pem"),
            tls_client_cert=str(tls / "cert.pem"),
            tls_client_key=str(tls / "key.pem"),
            require_encryption=True,
        )
        with Client(address, security=security, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(len(workers), timeout=60)
            yield Running(cluster, scheduler, workers, client)


def test_a_worker_that_would_mix_runs_or_sees_no_folder_or_is_of_another_release_gets_none(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    call = dask_cluster._at_worker
    here = Release.own()
    other = replace(here, source="1234567" * 9)

    def asked(worker: str, *arguments: Any) -> Any:
        return running.client.submit(call, *arguments, workers=[worker], pure=False, retries=0).result(timeout=60)

    assert asked("one", mark, here, sum, [1, 2]) == 3
    for worker, arguments, said in (
        ("wide", (mark, here), "does 2 runs at a time in one process.*--nthreads 1"),
        ("one", (tmp_path / "other" / "mark", here), "does not see .*other: give it the folder of --out"),
        ("one", (mark, other), "runs source .*, this command source 1234567.*: give all the same"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            asked(worker, *arguments, sum, [1, 2])
    monkeypatch.setattr(dask_cluster, "source_digest", lambda: other.source)
    with running.cluster.workers(tmp_path) as executor, pytest.raises(ConfigurationError):
        executor.submit(sum, [1, 2]).result(60)
    assert list(tmp_path.iterdir()) == [mark], "nothing is left of the one that shows the folder"


def test_as_the_page_starts_them_nothing_listens_beyond_loopback(running: Running) -> None:
    page = (ROOT / "ops" / "docs" / "simulation.md").read_text()
    assert page.count(" ".join(QUIET)) == 2
    for process in (running.scheduler, *running.workers.values()):
        found = [one.laddr.ip for one in psutil.Process(process.pid).net_connections("inet") if one.status == "LISTEN"]
        assert set(found) == {"127.0.0.1"}


def lines(out: Path, data: Path, cluster: DaskCluster | None = None) -> dict[str, dict[str, Any]]:
    """By run, but for how long each took and the commit, which may move meanwhile."""
    run_study(TWO_RUNS, out, data=data, device="cpu", threads=1, cluster=cluster)
    left_out = {"seconds", "commit", "commits"}
    return {line["run"]: {key: value for key, value in line.items() if key not in left_out} for line in results(out)}


def test_the_lines_are_those_of_one_machine_also_where_a_worker_is_killed(
    running: Running, data: Path, tmp_path: Path
) -> None:
    out, client = tmp_path / "out", running.client
    client.retire_workers(names=["wide"], close_workers=True)

    def at_work() -> list[str]:
        busy = {address for address, calls in client.processing().items() if calls}
        return [told["name"] for address, told in client.scheduler_info()["workers"].items() if address in busy]

    def kill_one() -> None:
        until(lambda: bool(at_work()) and any((out / "runs").glob("*/of-plan")), lambda: None, 120)
        running.workers[min(at_work())].send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    found = lines(out, data, running.cluster)
    killer.join(60)
    assert sum(process.poll() is not None for process in running.workers.values()) == 2, "the wide one, and one killed"
    assert found == lines(tmp_path / "here", data)
    assert len(found) == 2
    assert (out / "report.md").is_file()


@pytest.mark.parametrize("scheduler", ["tcp://127.0.0.1:8786", "127.0.0.1:8786", "tls://127.0.0.1", "", "tls://a b:1"])
def test_an_address_without_tls_is_refused(scheduler: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no tls://HOST:PORT: .*runs code on its workers"):
        DaskCluster(scheduler, certificates(tmp_path / "tls"))


@pytest.mark.parametrize("missing", ["ca.pem", "cert.pem", "key.pem"])
def test_a_certificate_that_is_missing_is_named(missing: str, tmp_path: Path) -> None:
    tls = certificates(tmp_path / "tls")
    (tls / missing).unlink()
    with pytest.raises(ConfigurationError, match=f"has no {missing}"):
        DaskCluster("tls://127.0.0.1:8786", tls)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    tls = certificates(tmp_path / "tls")
    (tls / "key.pem").chmod(0o640)
    with pytest.raises(ConfigurationError, match=r"key\.pem"):
        DaskCluster("tls://127.0.0.1:8786", tls)


def test_a_cluster_of_another_authority_is_not_spoken_to(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_cluster, "CONNECT_S", 3)
    other = DaskCluster(running.cluster.scheduler, certificates(tmp_path / "tls"))
    with pytest.raises(ConfigurationError, match="no scheduler answers at tls://127"), other.workers(tmp_path):
        pass


def test_who_shows_no_certificate_does_not_reach_the_scheduler(running: Running) -> None:
    context = ssl.create_default_context(cafile=running.cluster.tls / "ca.pem")
    port = int(running.cluster.scheduler.rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
        pytest.raises(ssl.SSLError, match=r"certificate required|handshake failure"),
        context.wrap_socket(plain, server_hostname="127.0.0.1") as stranger,
    ):
        stranger.recv(1)


def test_what_the_cluster_cannot_say_is_asked_for(data: Path, tmp_path: Path) -> None:
    cluster = DaskCluster("tls://127.0.0.1:1", certificates(tmp_path / "tls"))
    for said in ({"jobs": 2, "threads": 1}, {"threads": 0}):
        with pytest.raises(ConfigurationError, match="leave --jobs out, and give --threads"):
            run_study(TWO_RUNS, tmp_path / "out", data=data, cluster=cluster, **said)  # type: ignore[arg-type]
