"""A Slurm of a test's own: a controller and one node on loopback, with a key and a configuration that are nobody else's.

As far as this machine knows Slurm, it is Debian's slurmctld, slurmd, slurm-client and munge; what one is started here
ends with the test, and none of the machine's own configuration is read.
"""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lorica.demo.ports import free_ports
from tests.support.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scancel", "squeue", "sinfo")
START_S = 60.0


def _settings(root: Path, controller: int, node: int) -> dict[str, str]:
    user = getpass.getuser()
    return {
        "ClusterName": "lorica",
        "SlurmctldHost": "localhost(127.0.0.1)",
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={root}/munge/socket",
        "CredType": "cred/munge",
        "StateSaveLocation": f"{root}/state",
        "SlurmdSpoolDir": f"{root}/spool",
        "SlurmctldPidFile": f"{root}/slurmctld.pid",
        "SlurmdPidFile": f"{root}/slurmd.pid",
        "SlurmctldPort": str(controller),
        "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",  # else both listen on all addresses
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MailProg": "/bin/true",
        "ReturnToService": "2",
        "NodeName": f"here NodeHostname={socket.gethostname().partition('.')[0]} NodeAddr=127.0.0.1 Port={node} CPUs=2",
        "PartitionName": "all Nodes=here Default=YES State=UP",
    }


@contextmanager
def running_slurm() -> Iterator[Path]:
    """Its configuration, as SLURM_CONF names it; skips where a program is missing."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(
            f"{', '.join(missing)} not found (Debian: apt-get install slurmctld slurmd slurm-client munge): "
            "ranks are not started by a real srun"
        )
    # A socket's path holds 107 bytes at most.
    root = Path(tempfile.mkdtemp(prefix="slurm-"))
    started: list[subprocess.Popen[bytes]] = []
    try:
        for name in ("munge", "state", "spool"):
            (root / name).mkdir(mode=0o700)
        (root / "munge" / "key").write_bytes(secrets.token_bytes(128))
        (root / "munge" / "key").chmod(0o600)
        settings = _settings(root, *free_ports(2))
        config = root / "slurm.conf"
        config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        environment = {"PATH": os.environ["PATH"], "SLURM_CONF": str(config)}

        def start(*words: str) -> None:
            with (root / "log").open("ab") as log:
                started.append(
                    subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
                )

        def check() -> None:
            for process in started:
                assert process.poll() is None, (process.args, (root / "log").read_text(errors="replace")[-2000:])

        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        start("munged", "--foreground", "--force", *(f"--{name}={root}/munge/{file}" for name, file in files.items()))
        until((root / "munge" / "socket").exists, check, START_S)
        start("slurmctld", "-D", "-i")
        start("slurmd", "-D", "-N", "here")
        until(lambda: "idle" in _told(environment, "sinfo", "--noheader"), check, START_S)
        yield config
    finally:
        if len(started) == 3:  # slurmd would leave behind what runs
            _told(environment, "scancel", "--signal=KILL", f"--user={getpass.getuser()}")
            with suppress(AssertionError):
                until(lambda: not jobs(config), lambda: None, START_S)
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        shutil.rmtree(root, ignore_errors=True)


def jobs(config: Path) -> list[str]:
    """Name and state of each that Slurm has, but for those that are over or nearly so."""
    told = _told({"PATH": os.environ["PATH"], "SLURM_CONF": str(config)}, "squeue", "-h", "-o", "%j %t")
    return [line for line in told.splitlines() if not line.endswith(" CG")]


def _told(environment: dict[str, str], *words: str) -> str:
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False).stdout
