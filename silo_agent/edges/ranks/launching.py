"""The command that starts the ranks of a silo's training, and what can be known to be wrong with it beforehand."""

import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lorica_security.errors import ConfigurationError
from silo_agent.policy.rank_limits import LOOPBACK
from silo_agent.settings import TrainingSection

_NOT_FOR_RANKS: Final = ("LORICA_", "PG", "PET_")
"""How variables begin that a rank has no use for: passphrases of keys, how to get into a database, options of torchrun
that silo.toml does not show."""
_NUMBERED_BY: Final = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("JOB_COMPLETION_INDEX", "", ""),
)
"""By which launchers number ranks: the rank, how many there are, the rank on its machine. Slurm stands behind Open MPI,
which may have started its daemons by srun."""
_OF_SRUN_TOO: Final = "SLURM_NTASKS"
"""Which srun takes for its option; read only where SLURM_PROCID is there, and that srun alone sets."""
_DIGITS: Final = re.compile(r"[0-9]{1,6}")


def rank_command(section: TrainingSection, folder: Path) -> list[str]:
    """What is run. Without `launch`, that is this package's own launcher."""
    python, processes = [sys.executable, "-P", "-m"], str(section.processes)
    if not section.launch:
        return [*python, "silo_agent.edges.ranks.launcher", str(folder), processes]
    program, *words = [word.replace("{processes}", processes) for word in section.launch]
    # It is run in another folder than that in which it was looked for.
    found = shutil.which(program)
    return [
        os.path.abspath(found) if found else program,
        *words,
        *python,
        "silo_agent.edges.ranks.rank_process",
        str(folder),
    ]


def check_launch(section: TrainingSection) -> str:
    """What would start ranks; raises ConfigurationError where it is not there, or they had nothing to listen on."""
    if not section.processes:
        return "training is in the agent's own process"
    if section.launch and shutil.which(section.launch[0]) is None:
        raise ConfigurationError(
            f"[training] launch begins with {section.launch[0]!r}, and no such program is found: install it, give its "
            "whole path, or leave launch out where all ranks run on this machine"
        )
    if not section.launch:  # of another node that node's rank will say it
        require_interface(section.rank_interface)
    by = f" by {section.launch[0]}" if section.launch else ""
    heard = "" if section.rank_interface == LOOPBACK else ", which has neither TLS nor authentication: keep others off"
    return f"{section.processes} ranks{by}, on {section.rank_interface}{heard}"


def require_interface(name: str) -> None:
    """Raise ConfigurationError where this machine has no such network interface."""
    there = sorted(interface for _, interface in socket.if_nameindex())
    if name not in there:
        raise ConfigurationError(
            f"[training] rank_interface = {name!r} is no network interface of {socket.gethostname()}: give one of "
            f"{', '.join(there)}, by a name that all machines of the ranks have, or leave it out: ranks on one machine "
            "need loopback alone"
        )


def threads_of_a_rank(section: TrainingSection) -> int:
    """What [training] threads says, else an equal share of this machine's cores; ranks elsewhere have as many."""
    return section.threads or max(1, len(os.sched_getaffinity(0)) // max(1, section.processes))


def rank_environment(own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The agent's, but for what ranks are not to know, and for a number that the agent itself was given."""
    numbers = {name for names in _NUMBERED_BY for name in names} - {_OF_SRUN_TOO}
    return {name: value for name, value in own.items() if not name.startswith(_NOT_FOR_RANKS) and name not in numbers}


@dataclass(frozen=True, slots=True)
class Place:
    """`local` is the rank among those of its machine."""

    rank: int
    world: int
    local: int


def place_of(environment: Mapping[str, str], world: int) -> Place:
    """Of the process that has `environment`; `world` where that does not say it. Raises ConfigurationError."""
    for rank, ranks, local in _NUMBERED_BY:
        if rank in environment:
            place = Place(
                rank=_number(environment, rank, 0),
                world=_number(environment, ranks, world),
                local=_number(environment, local, 0),
            )
            if place.rank >= place.world:
                raise ConfigurationError(
                    f"{rank} = {place.rank} is no rank of {place.world}: have [training] launch start as many ranks "
                    "as [training] processes says"
                )
            return place
    named = ", ".join(rank for rank, _, _ in _NUMBERED_BY)
    raise ConfigurationError(
        f"[training] launch started a rank without its number: have it set one of {named} for each, as torchrun, "
        "mpirun and srun do"
    )


def device_of_rank(wanted: str, local: int, gpus: int) -> str:
    """Rank `local` of a machine has its GPU of that number. Raises ConfigurationError where there are fewer."""
    if wanted not in ("auto", "cuda") or (wanted == "auto" and not gpus):
        return wanted
    if local >= gpus:
        raise ConfigurationError(
            f"rank {local} of this machine finds {gpus} GPUs, and ranks do not share one: set [training] processes to "
            'the number of GPUs, have the launcher show each rank all GPUs of its machine, or set device = "cpu"'
        )
    return f"cuda:{local}"


def heard_on(interface: str) -> dict[str, str]:
    """The variables by which gloo and NCCL listen there alone; to NCCL a name without "=" is how names begin."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    value = environment.get(name, str(otherwise))
    if not _DIGITS.fullmatch(value):
        raise ConfigurationError(f"{name} = {value[:40]!r} is no number from 0 to 999999: see what launches the ranks")
    return int(value)
