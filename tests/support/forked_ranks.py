"""Ranks that are processes forked from a test, which meet as those of a silo do: FSDP2 has one group a process."""

import os
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp  # once, and not in each rank: it takes seconds

from silo_agent.training.ranks.ranks import met_over
from silo_agent.training.ranks.sharded_ranks import ShardedRanks


def in_forked_ranks(world: int, work: Callable[[ShardedRanks], Any], timeout_s: float = 60.0) -> list[Any]:
    """What `work` gives, or raises, at each of `world` sharded ranks on CPUs with one thread each. One that ended
    without either is an EOFError."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, children = [], []
        for rank in range(world):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                _be_rank(folder, rank, world, work, write, timeout_s)
            os.close(write)
            pipes.append(read)
            children.append(child)
        outcomes = [_told(pipe) for pipe in pipes]
        for child in children:
            os.waitpid(child, 0)
        return outcomes


def _be_rank(
    folder: str, rank: int, world: int, work: Callable[[ShardedRanks], Any], write: int, timeout_s: float
) -> None:
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        device = torch.device("cpu")
        try:
            group, backend = met_over(folder, rank, world, device, timeout_s=timeout_s)
            outcome = work(ShardedRanks(group, device, backend))
        except BaseException as error:
            outcome = error
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(outcome, pipe)
    finally:
        os._exit(0)


def _told(pipe: int) -> Any:
    with os.fdopen(pipe, "rb") as file:
        try:
            return pickle.load(file)
        except EOFError as error:
            return error
