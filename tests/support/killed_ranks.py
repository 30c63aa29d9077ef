"""A launcher of ranks in which one process is killed at one point of a training, once.

It is forked from a process that has imported PyTorch, where a launcher's own import would take seconds; all else is as
silo_agent/edges/ranks/launcher.py has it. What is put around the product's functions counts, and kills.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Final

import pytest

from silo_agent.edges.ranks import launcher, rank_group
from silo_agent.training import checkpoint
from silo_agent.training.model.vector_file import PieceWriter, VectorWriter
from silo_agent.training.private.exact_noise import StepNoise
from silo_agent.training.private.private_optimizer import PrivateOptimizer
from silo_agent.training.ranks.ranks import Together
from silo_agent.training.ranks.sharded_ranks import ShardedRanks
from silo_agent.training.update import client_update

BEFORE, AFTER = "before", "after"

POINTS: Final[dict[str, tuple[Any, str, str]]] = {
    "sum": (Together, "sum_gradients", BEFORE),
    "summed": (Together, "sum_gradients", AFTER),
    "gathered": (ShardedRanks, "computed", AFTER),
    "scattered": (ShardedRanks, "sum_gradients", AFTER),
    "checkpoint": (checkpoint.CheckpointFile, "save", BEFORE),
    "checkpoint-begun": (checkpoint, "_write", BEFORE),
    "checkpoint-half": (checkpoint, "_bytes_of", AFTER),
    "checkpoint-written": (checkpoint, "_write", AFTER),
    "checkpoint-part": (checkpoint.CheckpointFile, "_put", AFTER),
    "checkpoint-committed": (checkpoint.CheckpointFile, "_replace", AFTER),
    "checkpoint-renamed": (checkpoint.CheckpointFile, "save", AFTER),
    "clipped": (PrivateOptimizer, "pre_step", BEFORE),
    "noise": (StepNoise, "add", BEFORE),
    "noised": (StepNoise, "add", AFTER),
    "released": (PrivateOptimizer, "pre_step", AFTER),
    "update": (VectorWriter, "write", BEFORE),
    "update-written": (VectorWriter, "sync", BEFORE),
    "update-synced": (VectorWriter, "sync", AFTER),
    "piece": (PieceWriter, "write", BEFORE),
    "pieces-written": (PieceWriter, "close", AFTER),
    "pieces-read": (client_update, "bound_file", AFTER),
}
"""Whose function it is, and on which side of it the point lies."""


@dataclass(frozen=True)
class Kill:
    """Rank `rank` reaches `point` for the `number`th time, and `who` is killed: that "rank", its "launcher", or the
    "agent" that started it. `marker` is a file that says that it happened: the next ranks live."""

    point: str
    number: int
    rank: int
    who: str
    marker: Path

    def plant(self, whom: int) -> None:
        owner, name, side = POINTS[self.point]
        original: Callable[..., Any] = getattr(owner, name)
        count = 0

        def around(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            made = original(*arguments, **named) if side == AFTER else None
            count += 1
            if count == self.number and not self.marker.exists():
                self.marker.write_text(str(whom))
                os.kill(whom, signal.SIGKILL)
                signal.pause()  # where it was another's life
            return made if side == AFTER else original(*arguments, **named)

        setattr(owner, name, around)


def launched(patch: pytest.MonkeyPatch, kill: Kill | None = None, seen: Callable[[], None] = lambda: None) -> None:
    """Have launchers forked from now on, with `kill` planted; `seen` is called before each."""

    def popen(command: Sequence[str], *, stdin: int, env: dict[str, str], start_new_session: bool, cwd: Path) -> Forked:
        assert stdin == subprocess.PIPE
        assert start_new_session
        seen()
        return Forked(kill, command, env=env, cwd=cwd)

    patch.setattr(rank_group, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))


class Forked:
    """What rank_group asks of subprocess.Popen, of a launcher that is forked here."""

    def __init__(self, kill: Kill | None, command: Sequence[str], *, env: dict[str, str], cwd: Path) -> None:
        read, write = os.pipe()
        agent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(write)
            _launched(kill, command, env, cwd, read, agent)
        os.close(read)
        self.stdin: IO[bytes] = os.fdopen(write, "wb")

    def wait(self) -> int:
        return os.waitpid(self.pid, 0)[1]


def _launched(
    kill: Kill | None, command: Sequence[str], env: dict[str, str], cwd: Path, stdin: int, agent: int
) -> None:
    code = 1
    try:
        os.setsid()
        os.dup2(stdin, 0)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        if kill is not None:
            be_rank = launcher._be_rank

            def planted(folder: str, rank: int, processes: int, parent: int) -> None:
                if rank == kill.rank:
                    kill.plant({"rank": os.getpid(), "launcher": parent, "agent": agent}[kill.who])
                be_rank(folder, rank, processes, parent)

            launcher._be_rank = planted  # type: ignore[assignment]
        code = launcher.launch(command[-2], int(command[-1]))
    finally:
        os._exit(code if code >= 0 else 1)
