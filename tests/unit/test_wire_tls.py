"""TLS 1.3 alone, whatever is imported first: gRPC reads its cipher list once, when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_SSL_CIPHER_SUITES"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


COMMANDS = {"lorica_coordinator.cli": ["serve"], "silo_agent.cli": ["start"], "lorica.cli": ["silos", "/dev/null/x"]}
"""Of each program one that fails, for want of a folder."""


@pytest.mark.parametrize("program", COMMANDS)
def test_each_program_sets_the_cipher_list_before_grpc_is_imported(program: str, tmp_path: Path) -> None:
    code = f"""
import builtins, os, sys
real = builtins.__import__
def watched(name, *rest):
    if name.split(".")[0] == "grpc" and "grpc" not in sys.modules:
        print(os.environ.get("GRPC_SSL_CIPHER_SUITES", "unset"))
    return real(name, *rest)
builtins.__import__ = watched
from {program} import main
print("grpc" in sys.modules)
os.environ["HOME"] = {str(tmp_path)!r}
sys.argv[1:] = {COMMANDS[program]!r}
try:
    main()
finally:
    import grpc
"""
    done = python(code)
    assert done.stdout.split() == ["False", "ECDHE-RSA-AES128-GCM-SHA256"], done.stdout + done.stderr


def test_no_import_of_ours_changes_the_process() -> None:
    done = python("""
import os, signal, sys
def state():
    return dict(os.environ), signal.getsignal(signal.SIGINT), sys.excepthook, sys.getrecursionlimit()
before = state()
import lorica_coordinator.composition, lorica_coordinator.cli, silo_agent.cli, silo_agent.edges.wire.grpc_client, lorica.cli
import silo_agent.service.agent, lorica_security.daemon.metrics_port, silo_wire.codecs.orders_codec
print(before == state())
""")
    assert done.stdout == "True\n", done.stdout + done.stderr


def test_grpc_imported_first_is_refused() -> None:
    done = python("import grpc; from silo_wire.tls import leave_tls_1_3_alone; leave_tls_1_3_alone()")
    assert done.returncode != 0
    assert "grpc was imported with TLS 1.2 enabled" in done.stderr


def test_nothing_is_dialled_or_served_by_a_process_that_would_speak_tls_1_2() -> None:
    done = python("""
from types import SimpleNamespace
from lorica_coordinator.edges.operator_host.operator_client import OperatorAccess
from lorica_coordinator.edges.server.presented import Presented
from lorica_security.errors import StateError
from lorica_security.identifiers import FederationName
from silo_agent.edges.wire.channel import pinned_channel
nobody = SimpleNamespace()
for opened in (
    lambda: pinned_channel("localhost:1", FederationName("north"), b""),
    lambda: OperatorAccess(address="localhost:1", federation="north", pair=nobody, trust=nobody).call(None),
    lambda: Presented(nobody, nobody).credentials(clients=True),
):
    try:
        opened()
    except StateError as error:
        print("speaks TLS 1.2" in str(error))
""")
    assert done.stdout.split() == ["True"] * 3, done.stdout + done.stderr


def test_a_listener_that_would_speak_tls_1_2_does_not_serve() -> None:
    """gRPC is made to read a wider list behind silo_wire's back: the listener's own probe must notice."""
    done = python("""
import asyncio, os, tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-ECDSA-AES128-GCM-SHA256"
import grpc
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES128-GCM-SHA256"
import grpc.aio
from lorica_coordinator.edges.server.grpc_server import Listener
from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica.demo.ports import free_ports
from lorica_security.errors import StateError
from lorica_security.identifiers import FederationName

async def main():
    folder = Path(tempfile.mkdtemp()) / "keys"
    now = datetime.now(UTC)
    KeyStore.create(folder, FederationName("north"), now)
    day = timedelta(days=1)
    keys = KeyStore.load(folder, hosts=["localhost"], enrolment_host="localhost", enrolment_port=1,
                         silo_certificate_lifetime=day, own_certificate_lifetime=day)
    pair = keys.server_pair(now)
    credentials = grpc.ssl_server_credentials([(pair.key_pem, pair.certificate_pem)])
    listener = Listener(f"127.0.0.1:{free_ports(1)[0]}", grpc.aio.server, lambda: credentials)
    try:
        await listener.start()
    except StateError as error:
        print("refused:", error, listener.listening)
asyncio.run(main())
""")
    assert done.stdout.startswith("refused: 127.0.0.1:"), done.stdout + done.stderr
    assert "accepted TLS 1.2" in done.stdout
    assert done.stdout.rstrip().endswith("False")
