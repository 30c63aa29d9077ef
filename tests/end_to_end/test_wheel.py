"""The wheel, as somebody has it who has nothing else: installed into a fresh environment, it is whole and a round runs
with it.

The environment's dependencies are this one's, linked; Lorica is there from the wheel alone. Where these tests are root,
everything runs as in a hardened container: another user without any privilege, a root file system that cannot be
written to, one folder that can; and under the filters of the systemd units, where what they are made with is there.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

from lorica.demo.observer import FederationView
from lorica.demo.ports import free_ports
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.silos import keep_first, write_silo
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from tests.support import read_only_root, systemd_unit
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("coordinator", "silo-agent", "lorica")
UNITS = {"silo-agent": "lorica-silo-agent"}
PACKAGES = ("lorica", "lorica_coordinator", "lorica_security", "silo_agent", "silo_wire")
"""All that may be imported once the wheel is installed. `ops` and `security`, of which others have distributions, are
not among them."""
SOURCES = ("coordinator/", "ops/lorica/", "security/lorica_security/", "silo_agent/", "proto/silo_wire/")
PASSPHRASE = "long enough and of nobody's"
LONGEST_S = 240.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (ROOT / ".git").exists() or not shutil.which("git") or not shutil.which("make"),
        reason="the wheel is made with make of what git tracks: needs make, git and a clone",
    ),
]


def made_wheel(folder: Path) -> Path:
    """What `make wheel` leaves in `folder`, with this environment taken as it is."""
    here = ("-o", f"{sys.prefix}/.installed", f"VENV={sys.prefix}", f"PYTHON={sys.executable}")
    subprocess.run(["make", "--silent", *here, "wheel", f"OUT={folder}"], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_wheel(tmp_path_factory.mktemp("dist"))


@dataclass(frozen=True, slots=True)
class Installed:
    root: Path
    """Of the environment; beside it lie what is written, and the root that is seen from inside."""

    @property
    def state(self) -> Path:
        return self.root.with_name("state")

    @property
    def passphrase(self) -> Path:
        return self.root / "passphrase"

    def inside(self, name: str) -> str:
        """What the commands call `name` of the state folder."""
        return str((read_only_root.STATE if read_only_root.CAN else self.state) / name)

    def words(self, words: tuple[str, ...]) -> list[str]:
        program = shutil.which(words[0], path=str(self.root / "bin")) or words[0]
        if not read_only_root.CAN:
            self.state.mkdir(mode=0o700, exist_ok=True)
            return [program, *words[1:]]
        readable = [self.root, Path(sys.prefix), Path(sys.base_prefix)]
        run = [program, *words[1:]]
        if systemd_unit.CAN and words[0] in COMMANDS:
            run = systemd_unit.sandboxed(run, unit=UNITS.get(words[0], "lorica-coordinator"))
        built = self.root.with_name("root")
        return read_only_root.confined(run, root=built, state=self.state, readable=readable)

    @property
    def environment(self) -> dict[str, str]:
        """Nothing of this process's that could lead to another Lorica, or to another folder."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LORICA", "XDG"))}
        threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.passphrase.exists():
            kept["LORICA_KEY_PASSPHRASE_FILE"] = str(self.passphrase)
        return {**kept, **threads, "HOME": self.inside(""), "PATH": f"{self.root / 'bin'}:/usr/bin:/bin"}

    def run(self, *words: str) -> str:
        done = self.done(*words)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def done(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.words(words),
            env=self.environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    @contextmanager
    def running(self, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Ended with SIGTERM on the way out, and then with exit code 0."""
        with self.log(words[0]).open("wb") as log:
            process = subprocess.Popen(
                self.words(words),
                env=self.environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            try:
                yield process
            finally:
                process.terminate()
                code = process.wait(60)
        assert code == 0, self.log(words[0]).read_text()

    def log(self, command: str) -> Path:
        return self.root.with_name(f"{command}.log")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    root = tmp_path_factory.mktemp("wheel") / "fresh"
    venv.create(root, with_pip=False)
    dependencies = root / "dependencies"
    dependencies.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("lorica", "__editable__")) and path.suffix != ".pth":
            (dependencies / path.name).symlink_to(path)
    python = root / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
    (root / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages" / "dependencies.pth").write_text(
        f"{dependencies}\n"
    )
    return Installed(root)


def test_the_same_commit_gives_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    assert made_wheel(tmp_path).read_bytes() == wheel.read_bytes()


def test_the_wheel_has_what_git_tracks_of_the_packages_and_nothing_else(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    tracked = {re.sub("^(proto|security|coordinator|ops)/", "", path) for path in listed if path.startswith(SOURCES)}
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if not re.match(r"[^/]*\.(dist-info|data)/", name)}
    assert shipped == tracked
    assert {name.partition("/")[0] for name in shipped} == set(PACKAGES)


def test_units_rules_and_dashboards_come_with_it(wheel: Path) -> None:
    (data,) = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".data/" in name}
    with zipfile.ZipFile(wheel) as archive:
        for kind, pattern in {
            "systemd": "systemd/*",
            "prometheus": "prometheus/*",
            "grafana": "grafana/dashboards/*.json",
        }.items():
            files = {path.name: path.read_bytes() for path in (ROOT / "ops").glob(pattern)}
            assert files
            for name, content in files.items():
                assert archive.read(f"{data}/data/share/lorica/{kind}/{name}") == content


OF_A_SIDE = {"coordinator": ("lorica_coordinator", "coordinator"), "silo-agent": ("silo_agent", "silo")}
"""By command: its package, and its extra."""


@pytest.mark.parametrize("command", OF_A_SIDE)
def test_the_wheel_of_an_image_has_one_side_alone(command: str, tmp_path: Path) -> None:
    """Made as the Dockerfile makes it, by its own line of sed."""
    package, extra = OF_A_SIDE[command]
    stage = (
        (ROOT / "Dockerfile")
        .read_text(encoding="utf-8")
        .split(f"FROM build AS build-{command}\n")[1]
        .split("\nFROM ")[0]
    )
    assert re.search(rf"'lorica\[{extra}(,[a-z]+)*\]'", stage), "and what else the image has"
    folders = ("proto", "security", re.search(r"^COPY (\w+)", stage, re.MULTILINE)[1])  # type: ignore[index]
    edit = re.search(r"sed -i -E '([^']+)' pyproject.toml", stage)
    assert edit is not None
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in folders:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["sed", "-i", "-E", edit[1], "pyproject.toml"], cwd=tmp_path, check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*build, "--no-build-isolation", "--wheel-dir", "out", "."], cwd=tmp_path, check=True)
    (made,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" not in name}
        (points,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert tops == {package, "lorica_security", "silo_wire"}
    assert re.findall(r"^([\w-]+) = ", points, re.MULTILINE) == [command]


def test_no_private_key_is_in_the_wheel(wheel: Path) -> None:
    marks = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{40}")
    with zipfile.ZipFile(wheel) as archive:
        held = [name for name in archive.namelist() if marks.search(archive.read(name))]
        named = [name for name in archive.namelist() if name.endswith((".key", ".pem", ".p12", ".env", ".sqlite"))]
    assert held + named == []


LOOK = """
import json, importlib.metadata as metadata, pathlib, lorica, lorica_coordinator, lorica_security, silo_agent, silo_wire
names = ("lorica", "lorica_coordinator", "lorica_security", "silo_agent", "silo_wire")
owners = metadata.packages_distributions()
print(json.dumps({
    "owners": {name: owners[name] for name in names},
    "files": {name: globals()[name].__file__ for name in names},
    "version": metadata.version("lorica"),
}))
"""


def test_every_import_name_is_of_one_distribution_and_of_this_wheel(installed: Installed) -> None:
    found = json.loads(installed.run("python", "-c", LOOK))
    assert {tuple(owners) for owners in found["owners"].values()} == {("lorica",)}
    assert all(Path(file).is_relative_to(installed.root / "lib") for file in found["files"].values())
    assert not any(Path(file).is_symlink() for file in found["files"].values())


NEIGHBOURS = ("ops", "security", "coordinator==1.0.0b1")
"""Distributions of others whose names our folders have: Canonical's, pixee's, and a task runner."""


def test_neighbours_with_the_names_of_our_folders_change_nothing(wheel: Path, tmp_path: Path) -> None:
    root = tmp_path / "environment"
    venv.create(root, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", root / "bin" / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)

    def ours() -> dict[str, bytes]:
        (packages,) = (root / "lib").glob("python*/site-packages")
        return {str(path): path.read_bytes() for name in PACKAGES for path in (packages / name).rglob("*.py")}

    before = ours()
    added = subprocess.run([*pip, "install", "--quiet", "--no-deps", *NEIGHBOURS], capture_output=True, text=True)
    if added.returncode:
        pytest.skip(f"no package index gives {' and '.join(NEIGHBOURS)}: {added.stderr.strip()[-200:]}")
    assert ours() == before
    subprocess.run(
        [*pip, "uninstall", "--quiet", "--yes", *(name.partition("==")[0] for name in NEIGHBOURS)], check=True
    )
    assert ours() == before


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_says_what_it_does_and_which_version_it_is(
    installed: Installed, wheel: Path, command: str
) -> None:
    assert "Usage" in installed.run(command, "--help")
    assert installed.run(command, "--version").split() == [command, wheel.name.split("-")[1]]


def made_short(plan: Path) -> None:
    """One round of one silo, which begins by itself; two questions are evaluated, the fewest that a silo answers."""
    text = plan.read_text()
    short = {"rounds": "1", "min_silos": "1", "start_when_ready": "true", "epochs": "1"}
    text = text.replace("\ninitial = true", "\ninitial = false", 1)  # the model has a key of this name too
    for key, value in {**short, "max_examples": "2"}.items():
        text, found = re.subn(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
        assert found == 1, key
    plan.write_text(text)


def test_a_round_runs_with_nothing_but_the_wheel(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    if read_only_root.CAN:  # as Kubernetes hands over a secret: root's, for a group
        installed.passphrase.write_text(PASSPHRASE)
        os.chown(installed.passphrase, 0, read_only_root.UID)
        installed.passphrase.chmod(0o440)
        monkeypatch.setenv("LORICA_KEY_PASSPHRASE", PASSPHRASE)  # for what looks from here
    folder, data = installed.state / "federation", installed.root / "data"
    at_coordinator, at_silo = ("--dir", installed.inside("federation")), ("--dir", installed.inside("silo"))
    write_silo(data, CLINIC, seed=3)
    for file in data.glob("*.jsonl"):
        keep_first(file, 8)
    silos, enrolment, metrics, status = (str(port) for port in free_ports(4))
    installed.run(
        *("coordinator", "init", installed.inside("federation"), "--host", "127.0.0.1"),
        *("--silos-port", silos, "--enrolment-port", enrolment, "--metrics-port", metrics),
        *("--status-port", status),
    )
    made_short(folder / "state" / "plans" / "default" / "plan.toml")
    token = installed.run("coordinator", "invite", "clinic", *at_coordinator).strip()
    view = FederationView(Coordinator.load(CoordinatorFolder(folder)).operator_access())
    with ExitStack() as running:
        processes = [running.enter_context(installed.running("coordinator", "serve", *at_coordinator))]

        def check() -> None:
            for process in processes:
                assert process.poll() is None, [log.read_text() for log in installed.root.parent.glob("*.log")]

        view.wait_until_serving(check, LONGEST_S)
        installed.run("silo-agent", "enroll", token, *at_silo)
        processes.append(running.enter_context(installed.running("silo-agent", "start", "--data", str(data), *at_silo)))
        until(lambda: view.look()[0].phase == "finished", check, LONGEST_S)
        (record,) = view.look()[1]
        assert record.outcome == "applied"
        assert [(one.silo, one.examples) for one in record.silos] == [("clinic", 8)]
        for path, word in (
            ("", b"clinic"),
            ("page.css", b"color-scheme"),
            ("page.js", b"use strict"),
            ("charts.js", b"uPlot"),
            ("uPlot.iife.min.js", b"uPlot"),
            ("uPlot.min.css", b".uplot"),
            ("uPlot.LICENSE.txt", b"MIT License"),
            ("runbook.html", b"LoricaRoundStuck"),
            ("curves", b'"plans"'),
            ("icon.svg", b"<svg"),
        ):
            with urlopen(f"http://127.0.0.1:{status}/{path}") as reply:
                assert word in reply.read()
        assert_healthy(installed, True)
    keys = [file.read_bytes() for file in (folder / "keys" / "ca.key", installed.state / "silo" / "identity.key")]
    assert all((b"ENCRYPTED" in key) == read_only_root.CAN for key in keys)
    for lock in ("federation/coordinator.lock", "silo/agent.lock"):
        os.utime(installed.state / lock, (0, 0))
    assert_healthy(installed, False)


def assert_healthy(installed: Installed, healthy: bool) -> None:
    """The health checks of both images, where there is a /var/lib/lorica for them to look at."""
    if read_only_root.CAN:
        checks = re.findall(r"HEALTHCHECK .*?CMD (\[.*?\])\n", (ROOT / "Dockerfile").read_text(), re.DOTALL)
        assert len(checks) == 2
        assert [installed.done(*json.loads(check)).returncode == 0 for check in checks] == [healthy] * 2


@pytest.mark.skipif(not read_only_root.CAN, reason=read_only_root.WHY_NOT)
def test_what_the_round_ran_in_is_as_tight_as_it_says(installed: Installed) -> None:
    tries = "for at in / /usr /etc $0 $1; do touch $at/x 2>/dev/null && echo $at; done; id -u; grep -E 'CapEff|NoNewPrivs' /proc/self/status"
    said = installed.run("sh", "-c", tries, str(installed.root), sys.prefix).split()
    assert said == [str(read_only_root.UID), "CapEff:", "0" * 16, "NoNewPrivs:", "1"]
