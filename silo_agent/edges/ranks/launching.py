"""The command that starts the ranks of a silo's training, and what can be known to be wrong with it beforehand."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lorica_security.errors import ConfigurationError
from silo_agent.settings import TrainingSection

_NOT_FOR_RANKS: Final = ("LORICA_", "PG", "PET_")
"""How variables begin that a rank has no use for: passphrases of keys, how to get into a database, options of torchrun
that silo.toml does not show."""
_INTERFACES: Final = Path("/sys/class/net")
LOOPBACK: Final = "lo"


def rank_command(section: TrainingSection, folder: Path) -> list[str]:
    """What is run. Without `launch`, that is this package's own launcher."""
    python, processes = [sys.executable, "-P", "-m"], str(section.processes)
    if not section.launch:
        return [*python, "silo_agent.edges.ranks.launcher", str(folder), processes]
    begun = [word.replace("{processes}", processes) for word in section.launch]
    return [*begun, *python, "silo_agent.edges.ranks.rank_process", str(folder)]


def check_launch(section: TrainingSection) -> str:
    """What would start ranks; raises ConfigurationError where it is not there, or they had nothing to listen on."""
    if not section.processes:
        return "training is in the agent's own process"
    if section.launch and shutil.which(section.launch[0]) is None:
        raise ConfigurationError(
            f"[training] launch begins with {section.launch[0]!r}, and no such program is found: install it, give its "
            "whole path, or leave launch out where all ranks run on this machine"
        )
    # Of another node nobody knows what its interfaces are called.
    if not section.launch and _INTERFACES.is_dir() and not (_INTERFACES / section.rank_interface).exists():
        there = ", ".join(sorted(path.name for path in _INTERFACES.iterdir()))
        raise ConfigurationError(
            f"[training] rank_interface = {section.rank_interface!r} is no network interface of this machine: give one "
            f"of {there}, or leave it out: ranks on one machine need loopback alone"
        )
    by = f" by {section.launch[0]}" if section.launch else ""
    heard = "" if section.rank_interface == LOOPBACK else ", which has neither TLS nor authentication: keep others off"
    return f"{section.processes} ranks{by}, on {section.rank_interface}{heard}"


def threads_of_a_rank(section: TrainingSection) -> int:
    """What [training] threads says, else an equal share of this machine's cores; ranks elsewhere have as many."""
    return section.threads or max(1, len(os.sched_getaffinity(0)) // max(1, section.processes))


def rank_environment(own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The agent's, but for what ranks are not to know."""
    return {name: value for name, value in own.items() if not name.startswith(_NOT_FOR_RANKS)}
