"""The jobs that srun makes for ranks: each has the name of its group's folder, by which it is ended when the group is.

srun ends its job itself, but not where it and the process that it has for that are killed at once, as an agent's whole
service is. Slurm then keeps the nodes for a job in which nothing runs, and the next group waits for them without end.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from silo_agent.settings import words_of_launch

_NOT_TOLD: Final = ("LORICA_", "SCANCEL_")
"""Variables with secrets of the agent's, and those by which scancel does something else."""
ANSWER_S: Final = 10.0
"""For Slurm to take it; what it does not take stays in its queue, as `squeue` shows."""


def by_srun(launch: Sequence[str]) -> bool:
    """Whether a word of [training] launch, or of a shell's script among them, is srun; a script's file is not read."""
    return any(Path(word).name == "srun" for word in words_of_launch(launch))


def named_for(folder: Path) -> dict[str, str]:
    """The variable by which srun names a job; its option --job-name goes before, and then nobody else ends that job."""
    return {"SLURM_JOB_NAME": _name(folder)}


def cancel_of(folder: Path) -> None:
    """Whatever is left of the job for the group in `folder`: running, or waiting for nodes."""
    if (scancel := shutil.which("scancel")) is None:
        return
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [scancel, "--quiet", "--name", _name(folder)],
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith(_NOT_TOLD)},
            timeout=ANSWER_S,
            check=False,
        )


def _name(folder: Path) -> str:
    return f"lorica-{folder.name}"
