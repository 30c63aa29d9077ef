"""Which version of the code made a figure or a line."""

import shutil
import subprocess
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

_OURS = ("lorica", "lorica_coordinator", "lorica_security", "silo_agent", "silo_wire")


def commit() -> str:
    """Of the code that runs, with a `+` where it was changed since; empty outside a repository."""
    git = shutil.which("git")
    if git is None:
        return ""
    try:
        done = subprocess.run(
            [git, "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


@cache
def source_digest() -> str:
    """SHA-256 of every module of ours, in hexadecimal, as it lies on the disk when this is first asked."""
    digest = sha256()
    for package in _OURS:
        spec = find_spec(package)
        for root in sorted(spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(root).rglob("*.py")):
                content = path.read_bytes()
                digest.update(f"{package}/{path.relative_to(root)}\0{len(content)}\0".encode())
                digest.update(content)
    return digest.hexdigest()
