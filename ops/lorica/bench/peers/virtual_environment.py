"""A virtual environment with one released version of a peer."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from lorica.bench.peers.deployment import environment, run

_PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "install")


def is_installed(venv: Path, requirement: str) -> bool:
    return (venv / ".installed").is_file() and (venv / ".installed").read_text() == requirement


def create(venv: Path) -> None:
    """An empty one; what an interrupted installation left is removed."""
    if venv.exists():
        shutil.rmtree(venv)
    run([sys.executable, "-m", "venv", venv], env=environment(venv))


def pip(venv: Path, *arguments: str) -> None:
    run([venv / "bin" / "python", *_PIP, *arguments], env=environment(venv))


def requirements(venv: Path, package: str) -> Sequence[str]:
    """What an installed package asks for, without its extras."""
    code = f"from importlib.metadata import requires\nfor line in requires({package!r}): print(line)"
    lines = run([venv / "bin" / "python", "-c", code], env=environment(venv)).splitlines()
    return [line for line in lines if "extra ==" not in line]


def finish(venv: Path, requirement: str) -> None:
    """Written last: it says that the environment is whole."""
    (venv / ".installed").write_text(requirement)
