"""A private PostgreSQL server for one test module: in a folder of its own, reached over a unix socket only."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

SUPERUSER = "owner"


@dataclass(frozen=True, slots=True)
class PostgresqlServer:
    """A running server; `folder` is its socket's and may be written to by the account that it runs as."""

    folder: Path
    process: "subprocess.Popen[bytes]"
    start: "Callable[[], subprocess.Popen[bytes]]"
    port: int = 5432

    def restart(self, *, meanwhile: Callable[[], None]) -> None:
        """Cut all connections and stop, at once; start again once `meanwhile` is done."""
        self.stop()
        meanwhile()
        self.start_again()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)

    def start_again(self) -> None:
        object.__setattr__(self, "process", self.start())
        _wait_until_ready(self, _binaries())

    def url(self, *, user: str, password: str = "", database: str = "postgres") -> str:
        credentials = f"{user}:{quote(password, safe='')}" if password else user
        return f"postgresql://{credentials}@/{database}?host={quote(str(self.folder), safe='')}"

    def execute(self, *commands: str, database: str = "postgres") -> None:
        """Run `commands` as the superuser, each in a transaction of its own."""
        with psycopg.connect(self.url(user=SUPERUSER, database=database), autocommit=True) as connection:
            for command in commands:
                connection.execute(command.encode())

    def rows(self, query: str, *, database: str = "postgres") -> list[tuple[object, ...]]:
        with psycopg.connect(self.url(user=SUPERUSER, database=database), autocommit=True) as connection:
            return connection.execute(query.encode()).fetchall()


def _binaries() -> Path:
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    for folder in [*candidates, *([Path(on_path).parent] if on_path else [])]:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    pytest.skip(
        "PostgreSQL's initdb and postgres are not installed (Debian: apt-get install postgresql): not tested against it"
    )


def _account() -> str | None:
    """The account to run as: PostgreSQL refuses root, so its own; None for the present one."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        pytest.skip(
            "tests run as root and there is no account 'postgres' for the server: not tested against PostgreSQL"
        )


@contextmanager
def running_postgresql(*, tls: tuple[bytes, bytes] | None = None, port: int = 5432) -> Iterator[PostgresqlServer]:
    """Start a server, wait until it answers, stop it at the end; skips where there are no binaries.

    With `tls`, a key and its certificate as PEM, it also listens on 127.0.0.1 at `port`.
    """
    binaries, account = _binaries(), _account()
    # Not under pytest's own folder, which only its owner may enter; a socket's path holds 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "TZ": "UTC"}
    try:
        if account:
            shutil.chown(folder, account)
        data = folder / "data"
        subprocess.run(
            [binaries / "initdb", "-D", data, "-U", SUPERUSER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"],
            check=True, stdout=subprocess.DEVNULL, env=environment, user=account, cwd="/",
        )  # fmt: skip
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(folder),
            "fsync": "off",
            "shared_buffers": "16MB",
        }
        if tls is not None:
            for name, content in zip(("server.key", "server.crt"), tls, strict=True):
                (data / name).write_bytes(content)
                (data / name).chmod(0o600)
                if account:
                    shutil.chown(data / name, account)
            settings |= {"ssl": "on", "listen_addresses": "127.0.0.1", "port": str(port)}

        def start() -> "subprocess.Popen[bytes]":
            options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
            with (folder / "log").open("ab") as log:
                return subprocess.Popen(
                    [binaries / "postgres", "-D", data, *options],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, user=account, cwd="/",
                )  # fmt: skip

        server = PostgresqlServer(folder, start(), start, port)
        try:
            _wait_until_ready(server, binaries)
            yield server
        finally:
            server.process.terminate()  # SIGTERM: waits for clients; SIGINT (fast) where one hangs on
            try:
                server.process.wait(5)
            except subprocess.TimeoutExpired:
                server.process.send_signal(2)
                server.process.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_ready(server: PostgresqlServer, binaries: Path) -> None:
    """pg_ctl's own wait: it watches postmaster.pid, where the server writes `ready`."""
    status = server.folder / "data" / "postmaster.pid"
    for _ in range(600):
        if server.process.poll() is not None:
            raise RuntimeError(f"PostgreSQL ended at start: {(server.folder / 'log').read_text()[-500:]}")
        look = [binaries / "pg_isready", "-q", "-t", "1", "-h", server.folder, "-p", str(server.port)]
        ready = subprocess.run(look, check=False).returncode == 0
        if ready and status.exists():
            return
        try:
            server.process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    raise RuntimeError("PostgreSQL did not answer within a minute")
