"""Which version of the code made a figure or a line."""

import shutil
import subprocess
from pathlib import Path


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
