"""The peers' half of the benchmark, as far as it goes without a peer: the work, its check, the pipe, the processes."""

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from math import prod
from pathlib import Path

import numpy as np
import pytest

from lorica.bench.figures import Reading
from lorica.bench.peers import PEERS, virtual_environment
from lorica.bench.peers.app.constant_work import Vector, difference, initial, mark, read_layout, step
from lorica.bench.peers.deployment import Deployment, environment, run
from lorica.bench.peers.layout import T5_BASE_PARAMETERS, layout, t5_base, write_layout
from lorica.bench.peers.loopback_tls import write_certificates
from lorica.bench.peers.marks import Marks, follow
from lorica.bench.processes import Meter, loopback_bytes
from lorica.demo.ports import free_ports
from lorica_security.errors import ConfigurationError, StateError

ROOT = Path(__file__).resolve().parents[2]
SMALL = [("a", (700, 768)), ("b", (700, 768)), ("c", (3,))]


# --- the model


def test_t5_base_has_its_published_number_of_parameters() -> None:
    assert sum(prod(shape) for _, shape in t5_base()) == T5_BASE_PARAMETERS
    assert layout(T5_BASE_PARAMETERS) == t5_base()


@pytest.mark.parametrize("parameters", [1_000_000, 2_000_001, 25_000_000, 50_000_000, T5_BASE_PARAMETERS])
def test_a_layout_has_exactly_the_parameters_that_were_asked_for(parameters: int) -> None:
    tensors = layout(parameters)
    assert sum(prod(shape) for _, shape in tensors) == parameters
    assert all(min(shape) > 0 for _, shape in tensors)
    assert len({name for name, _ in tensors}) == len(tensors)


def test_too_few_parameters_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="1,000,000 or more"):
        layout(200_000)


def test_a_layout_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_layout(tmp_path / "layout.json", layout(1_000_000))
    assert read_layout(tmp_path / "layout.json") == layout(1_000_000)


def test_no_two_tensors_and_no_two_silos_send_the_same_bytes() -> None:
    """flwr stores equal chunks once: a constant model would not be sent at all."""
    tensors = dict(initial([tensor for tensor in layout(5_000_000) if prod(tensor[1]) > 1]))
    assert len({tensor.tobytes() for tensor in tensors.values()}) == len(tensors)
    assert len({float(step(silo, 8)) for silo in range(8)}) == 8


@pytest.mark.parametrize("silos", [1, 2, 3, 4, 8, 100])
def test_the_silos_add_one_on_average(silos: int) -> None:
    steps = [float(step(silo, silos)) for silo in range(silos)]
    assert np.mean(steps) == pytest.approx(1.0, abs=1e-6)
    assert min(steps) > 0.5 - 1e-6
    assert max(steps) < 1.5 + 1e-6


def averaged(silos: int, rounds: int) -> list[Vector]:
    """What rounds of FedAvg make of the initial values."""
    tensors = [tensor for _, tensor in initial(SMALL)]
    for _ in range(rounds):
        for tensor in tensors:
            tensor[:] = sum((tensor + step(silo, silos)) * np.float32(1 / silos) for silo in range(silos))
    return tensors


@pytest.mark.parametrize(("silos", "rounds"), [(2, 4), (3, 4), (8, 21)])
def test_fedavg_gives_what_the_check_expects(silos: int, rounds: int) -> None:
    assert difference(SMALL, averaged(silos, rounds), rounds) == ""


def test_a_round_too_few_is_found() -> None:
    assert "a is off by up to 1.0 after 4 rounds" in difference(SMALL, averaged(2, 3), 4)


def test_one_wrong_value_is_found() -> None:
    tensors = averaged(2, 3)
    tensors[1][699, 767] += np.float32(0.01)
    assert difference(SMALL, tensors, 3).startswith("b is off")


def test_nan_another_shape_and_another_type_are_found() -> None:
    first, second, last = averaged(2, 1)
    assert "c is off" in difference(SMALL, [first, second, last * np.float32("nan")], 1)
    assert "c is float32 (1,)" in difference(SMALL, [first, second, last[:1]], 1)
    assert "c is float64" in difference(SMALL, [first, second, last.astype(np.float64)], 1)


def test_a_missing_tensor_is_found() -> None:
    with pytest.raises(ValueError, match="shorter"):
        difference(SMALL, averaged(2, 1)[:2], 1)


# --- the application inside a peer


def test_what_runs_inside_a_peer_imports_nothing_of_lorica() -> None:
    code = (
        "import sys; import constant_app.constant_work; "
        "print(sorted(name for name in sys.modules if name.split('.')[0] in "
        "{'lorica', 'lorica_security', 'silo_wire', 'lorica_coordinator', 'silo_agent', 'torch', 'grpc'}))"
    )
    folder = ROOT / "ops" / "lorica" / "bench" / "peers"
    for file in (folder / "app").glob("*.py"):
        words = [line.split()[1] for line in file.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert {word.split(".")[0] for word in words} <= {
            *("", "flwr", "nvflare", "numpy"),
            *("json", "os", "pathlib", "collections", "time", "typing"),
        }, file
    done = subprocess.run(
        [sys.executable, "-c", code.replace("constant_app", "app")],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


# --- the pipe


WRITER = """
import sys, threading
sys.path.insert(0, {app!r})
from constant_work import mark
for words in {lines!r}:
    mark({pipe!r}, *words)
threading.Event().wait({stay})
"""


class Application:
    """A child process that writes marks, with the real `mark`, and stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def follow(self, *lines: tuple[object, ...], rounds: int) -> int:
        """The number of readings."""
        app = ROOT / "ops" / "lorica" / "bench" / "peers" / "app"
        with Marks(self.folder / "marks") as marks, Deployment(self.folder) as deployment:
            idle = [sys.executable, "-c", "import threading; threading.Event().wait()"]
            root = deployment.start("root", idle, env=dict(os.environ), folder=self.folder)
            code = WRITER.format(app=str(app), lines=lines, pipe=str(marks.path), stay=None)
            writer = subprocess.Popen([sys.executable, "-c", code])
            try:
                with Meter(coordinator=[root], agents=[[root]]) as meter:
                    return len(follow(marks, deployment, meter, rounds))
            finally:
                writer.kill()
                writer.wait()


@pytest.fixture
def application(tmp_path: Path) -> Application:
    return Application(tmp_path)


def test_a_reading_is_taken_as_each_round_ends(application: Application) -> None:
    assert application.follow(("round", 0), ("round", 1), ("round", 2), ("end", ""), rounds=2) == 2


def test_what_the_application_found_wrong_is_told(application: Application) -> None:
    with pytest.raises(StateError, match=r"shared is off by up to 1\.0"):
        application.follow(("round", 0), ("round", 1), ("end", "shared is off by up to\n1.0"), rounds=1)


def test_an_end_before_the_last_round_is_an_error(application: Application) -> None:
    with pytest.raises(StateError, match="root"):
        application.follow(("round", 0), ("round", 1), ("end", ""), rounds=2)


def test_a_round_left_out_is_an_error(application: Application) -> None:
    with pytest.raises(StateError, match="after 0 of 2 rounds the application wrote"):
        application.follow(("round", 0), ("round", 2), rounds=2)


def test_an_application_that_is_gone_is_noticed(tmp_path: Path) -> None:
    """It writes to the pipe while the follower reads, and then ends without a word."""
    app = ROOT / "ops" / "lorica" / "bench" / "peers" / "app"
    with Marks(tmp_path / "marks") as marks, Deployment(tmp_path) as deployment:
        idle = [sys.executable, "-c", "import threading; threading.Event().wait()"]
        root = deployment.start("root", idle, env=dict(os.environ), folder=tmp_path)
        lines = (("round", 0), ("round", 1))
        code = WRITER.format(app=str(app), lines=lines, pipe=str(marks.path), stay=0)
        subprocess.run([sys.executable, "-c", code], check=True)  # waited for: its id is gone
        with (
            Meter(coordinator=[root], agents=[[root]]) as meter,
            pytest.raises(StateError, match="the application ended after 1 rounds"),
        ):
            follow(marks, deployment, meter, 2)


def test_an_application_that_was_killed_is_noticed_though_nobody_waits_for_it(tmp_path: Path) -> None:
    """As the kernel kills a ServerApp that takes too much memory: its parent, the peer's, keeps its number."""
    app = ROOT / "ops" / "lorica" / "bench" / "peers" / "app"
    with Marks(tmp_path / "marks") as marks, Deployment(tmp_path) as deployment:
        idle = [sys.executable, "-c", "import threading; threading.Event().wait()"]
        root = deployment.start("root", idle, env=dict(os.environ), folder=tmp_path)
        code = WRITER.format(app=str(app), lines=(("round", 0), ("round", 1)), pipe=str(marks.path), stay=None)
        writer = subprocess.Popen([sys.executable, "-c", code])

        class Killing(Meter):
            def read(self) -> Reading:
                writer.kill()
                os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
                return super().read()

        with (
            Killing(coordinator=[root], agents=[[root]]) as meter,
            pytest.raises(StateError, match="the application ended after 1 rounds"),
        ):
            follow(marks, deployment, meter, 2)
        writer.wait()


def test_a_process_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    with Marks(tmp_path / "marks") as marks, Deployment(tmp_path) as deployment:
        words = [sys.executable, "-c", "raise SystemExit('the disk is full')"]
        root = deployment.start("server", words, env=dict(os.environ), folder=tmp_path)
        with (
            Meter(coordinator=[root], agents=[[root]]) as meter,
            pytest.raises(StateError, match=r"server ended with exit code 1(.|\n)*the disk is full"),
        ):
            follow(marks, deployment, meter, 1)


def test_lines_that_come_together_are_read_one_by_one(tmp_path: Path) -> None:
    with Marks(tmp_path / "marks") as marks:
        mark(marks.path, "round", 1)
        mark(marks.path, "round", 2)
        assert marks.read(1) == [str(os.getpid()), "round", "1"]
        assert marks.read(1) == [str(os.getpid()), "round", "2"]
        assert marks.read(0) is None


# --- processes


FAMILY = """
import os, subprocess, sys, threading
if sys.argv[1] == "0":
    child = [sys.executable, __file__, "1"]
    for detached in (False, True):
        subprocess.Popen(child, start_new_session=detached)
os.write(1, f"{os.getpid()} ".encode())  # whole, however the three take turns
threading.Event().wait()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def family(tmp_path: Path, deployment: Deployment) -> list[int]:
    """A process with two children, of which one is in a session of its own: their ids, once all three run."""
    (tmp_path / "family.py").write_text(FAMILY)
    command = [sys.executable, tmp_path / "family.py", "0"]
    deployment.start("family", command, env=dict(os.environ), folder=tmp_path)
    while len(pids := (tmp_path / "family.log").read_text().split()) < 3:
        deployment.check()
        time.sleep(0.01)
    return [int(pid) for pid in pids]


def test_all_that_a_process_started_is_ended_with_it(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        pids = family(tmp_path, deployment)
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


def test_all_is_ended_on_an_interrupt(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupted() -> None:
        with Deployment(tmp_path) as deployment:
            pids.extend(family(tmp_path, deployment))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorica.bench.peers.deployment.STOP_TIMEOUT_S", 0.2)
    code = (
        "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('deaf', flush=True); threading.Event().wait()"
    )
    with Deployment(tmp_path) as deployment:
        pid = deployment.start("deaf", [sys.executable, "-c", code], env=dict(os.environ), folder=tmp_path)
        while "deaf" not in (tmp_path / "deaf.log").read_text():
            time.sleep(0.01)
    assert not alive(pid)


def test_sigterm_ends_what_was_started(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    pids: list[int] = []

    def terminated() -> None:
        with Deployment(tmp_path) as deployment:
            pids.extend(family(tmp_path, deployment))
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()

    with pytest.raises(SystemExit) as left:
        terminated()
    assert left.value.code == 128 + signal.SIGTERM
    assert not any(alive(pid) for pid in pids)
    assert signal.getsignal(signal.SIGTERM) == before


def test_waiting_until_a_process_listens(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    code = f"import socket, threading; s = socket.create_server(('127.0.0.1', {port})); threading.Event().wait()"
    with Deployment(tmp_path) as deployment:
        pid = deployment.start("server", [sys.executable, "-c", code], env=dict(os.environ), folder=tmp_path)
        deployment.wait_until_listening(pid, port)


def test_a_server_that_ends_before_it_listens_is_told(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        words = [sys.executable, "-c", "raise SystemExit('the port is taken')"]
        pid = deployment.start("server", words, env=dict(os.environ), folder=tmp_path)
        with pytest.raises(StateError, match="the port is taken"):
            deployment.wait_until_listening(pid, free_ports(1)[0])


def test_a_command_that_fails_says_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"-c failed with exit code 1:\nno such index"):
        run([sys.executable, "-c", "raise SystemExit('no such index')"], env=dict(os.environ))


def test_a_peers_environment_has_nothing_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LORICA_SECRET", "x")
    made = environment(tmp_path, HOME=str(tmp_path))
    assert "PYTHONPATH" not in made
    assert "LORICA_SECRET" not in made
    assert made["HOME"] == str(tmp_path)
    assert made["PATH"].split(os.pathsep)[0] == str(tmp_path / "bin")


# --- certificates, namespaces, installation


@pytest.fixture
def served(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    made = write_certificates(tmp_path / "tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    return made.authority, context


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_the_servers_certificate_is_good_for_loopback(served: tuple[Path, ssl.SSLContext], name: str) -> None:
    authority, context = served
    client = ssl.create_default_context(cafile=authority)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        context.wrap_bio(to_server, to_client, server_side=True),
    ]
    open_sides = list(sides)
    for _ in range(10):
        for side in list(open_sides):
            try:
                side.do_handshake()
                open_sides.remove(side)
            except ssl.SSLWantReadError:
                continue
    assert not open_sides
    assert sides[0].version() == "TLSv1.3"


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_a_private_loopback_counts_its_own_bytes_alone() -> None:
    code = (
        "import json, socket, threading\n"
        "from lorica.bench.private_loopback import enter\n"
        "from lorica.bench.processes import loopback_bytes\n"
        "entered, before = enter(), loopback_bytes()\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\n"
        "client.sendall(bytes(50_000)); server.accept()[0].recv(50_000, socket.MSG_WAITALL)\n"
        "seen = []\n"
        "reader = threading.Thread(target=lambda: seen.append(loopback_bytes())); reader.start(); reader.join()\n"
        "print(json.dumps([entered, before, seen[0]]))\n"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    entered, before, after = json.loads(done.stdout)
    assert entered
    assert before == 0
    assert 50_000 <= after < 60_000


def test_an_installation_that_is_whole_is_left_alone_and_another_is_not_taken_for_it(tmp_path: Path) -> None:
    for name in ("flwr", "nvflare"):
        peer, venv = PEERS[name], tmp_path / name
        venv.mkdir()
        assert not virtual_environment.is_installed(venv, f"{name}=={peer.version}")
        virtual_environment.finish(venv, f"{name}=={peer.version}")
        peer.install(venv)  # would otherwise make a virtual environment
        assert [file.name for file in venv.iterdir()] == [".installed"]
        assert not virtual_environment.is_installed(venv, f"{name}==0.0.1")


def test_the_pinned_versions_are_the_issues() -> None:
    assert {name: PEERS[name].version for name in ("flwr", "nvflare")} == {"flwr": "1.42.0", "nvflare": "2.9.0"}


def test_the_floor_moves_every_byte_both_ways_and_its_sum_is_right(tmp_path: Path) -> None:
    floor = PEERS["floor"]
    floor.install(tmp_path / "venv")
    parameters, silos, rounds = 700_001, 2, 2
    before = loopback_bytes()
    run = floor.run(venv=tmp_path / "venv", work=tmp_path, silos=silos, parameters=parameters, rounds=rounds)
    assert len(run.readings) == rounds + 1
    # Not round by round: such small rounds end faster than a busy machine reads, and one round's bytes count for
    # another.
    assert run.readings[-1].wire_bytes - before > (rounds + 1) * 2 * silos * 4 * parameters
    assert run.readings[-1].cpu_s > 0
