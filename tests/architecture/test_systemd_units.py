"""The systemd units: systemd reads them without a complaint, finds them tight, and they start what there is to
start."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer.main

from lorica_coordinator.cli import app as coordinator_app
from lorica_coordinator.commands.command_line import Dir as CoordinatorDir
from lorica_security.daemon.heartbeat import BEAT_S
from lorica_security.errors import EXIT_CODES, AuthorisationError, StorageError, Unreachable
from silo_agent.cli import app as silo_app
from silo_agent.edges.disk.silo_folder import ENVIRONMENT_VARIABLE
from tests.support import systemd_unit

FOLDER = systemd_unit.ROOT / "ops" / "systemd"
UNITS = {"lorica-coordinator": coordinator_app, "lorica-silo-agent": silo_app}
MOST_EXPOSURE = 20
"""Of 100; systemd calls 20 "OK". What is left: the host's network and its root directory, and files of others that can
be read."""

with_systemd = pytest.mark.skipif(not systemd_unit.CAN, reason=systemd_unit.WHY_NOT)
each_unit = pytest.mark.parametrize("unit", UNITS)


def analysed(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, check=False)


@with_systemd
@each_unit
def test_systemd_reads_the_unit_without_a_complaint(unit: str, tmp_path: Path) -> None:
    text = (FOLDER / f"{unit}.service").read_text()
    there = tmp_path / f"{unit}.service"
    there.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    done = analysed("verify", "--man=no", there)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    there.write_text(there.read_text().replace("ProtectSystem=strict", "ProtectSytem=strict"))
    assert "ProtectSytem" in analysed("verify", "--man=no", there).stderr


@with_systemd
@each_unit
def test_systemd_finds_the_unit_tight(unit: str, tmp_path: Path) -> None:
    there = FOLDER / f"{unit}.service"
    done = analysed("security", "--offline=true", f"--threshold={MOST_EXPOSURE}", there)
    assert done.returncode == 0, done.stdout
    loose = tmp_path / there.name
    loose.write_text(re.sub(r"^SystemCallFilter=.*\n", "", there.read_text(), flags=re.MULTILINE))
    assert analysed("security", "--offline=true", f"--threshold={MOST_EXPOSURE}", loose).returncode != 0


@with_systemd
@each_unit
def test_what_could_undo_the_sandbox_cannot_be_called(unit: str) -> None:
    calls = systemd_unit.allowed_calls(systemd_unit.settings(unit)["SystemCallFilter"])
    assert {"read", "mmap", "futex", "openat"} <= calls
    assert calls.isdisjoint({"mount", "ptrace", "bpf", "init_module", "kexec_load", "setuid", "chroot", "reboot"})


@each_unit
def test_it_starts_a_command_that_exists_on_its_own_state_folder(unit: str) -> None:
    said = systemd_unit.settings(unit)
    (start,) = said["ExecStart"]
    program, command, *options = shlex.split(start)
    assert program == f"/opt/lorica/bin/{unit.removeprefix('lorica-')}"
    group = typer.main.get_command(UNITS[unit])
    known = {name for item in group.commands[command].params for name in item.opts}  # type: ignore[attr-defined]
    assert {option for option in options if option.startswith("--")} <= known
    variable = {"lorica-coordinator": CoordinatorDir.__metadata__[0].envvar, "lorica-silo-agent": ENVIRONMENT_VARIABLE}  # type: ignore[attr-defined]
    environment = dict(value.split("=", 1) for value in said["Environment"])
    assert environment[variable[unit]].startswith(f"/var/lib/{said['StateDirectory'][0]}/")
    assert environment["LORICA_KEY_PASSPHRASE_FILE"] == "%d/passphrase"
    assert said["LoadCredential"][0].startswith("passphrase:/etc/lorica/")


@each_unit
def test_it_is_given_up_only_for_what_people_have_to_mend_and_watched_for_longer_than_a_beat(unit: str) -> None:
    said = systemd_unit.settings(unit)
    assert said["Type"] == ["notify"]
    assert float(said["WatchdogSec"][0]) > 3 * BEAT_S
    given_up = {int(code) for code in " ".join(said.get("RestartPreventExitStatus", [])).split()}
    assert given_up <= set(EXIT_CODES.values())
    assert given_up.isdisjoint({EXIT_CODES[Unreachable], EXIT_CODES[StorageError]})
    assert unit == "lorica-coordinator" or EXIT_CODES[AuthorisationError] in given_up


@each_unit
def test_it_is_started_again_however_often_it_fails(unit: str) -> None:
    said = systemd_unit.settings(unit)
    assert said["Restart"] == ["on-failure"]
    assert said["StartLimitIntervalSec"] == ["0"], "else systemd gives up after some starts, within a minute"
    assert float(said["RestartSec"][0]) >= 10


def test_the_accounts_are_those_of_the_units() -> None:
    lines = (FOLDER / "lorica.sysusers.conf").read_text().splitlines()
    accounts = {line.split()[1]: line.split('"')[2].strip() for line in lines if line.startswith("u ")}
    said = {unit: systemd_unit.settings(unit) for unit in UNITS}
    assert accounts == {one["User"][0]: f"/var/lib/{one['StateDirectory'][0]}" for one in said.values()}
