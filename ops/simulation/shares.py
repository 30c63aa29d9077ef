"""Which worker trains which silos, decided once: a silo's tokenised data stay where they are."""

import gzip
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from security.identifiers import SiloName


def shared_out(sizes: Mapping[SiloName, int], workers: int) -> tuple[tuple[SiloName, ...], ...]:
    """The silos of each worker: the largest first, each to whoever has least so far. No worker is without a silo."""
    shares: list[list[SiloName]] = [[] for _ in range(min(workers, len(sizes)))]
    load = [0] * len(shares)
    for silo in sorted(sizes, key=lambda silo: (-sizes[silo], silo)):
        least = load.index(min(load))
        shares[least].append(silo)
        load[least] += max(1, sizes[silo])
    return tuple(map(tuple, shares))


def training_lines(folder: Path) -> int:
    """Lines of the silo's train.jsonl or train.jsonl.gz, good or bad; 0 where it cannot be read, which its own agent tells."""
    path = folder / "train.jsonl"
    try:
        with path.open("rb") if path.exists() else gzip.open(f"{path}.gz") as file:
            return sum(1 for _ in file)
    except (OSError, EOFError, zlib.error):
        return 0


def threads_of_a_worker(threads: int, workers: int) -> int:
    """Of PyTorch: what was asked for, else an equal share of the cores that this process may use; 0 leaves its default to one worker."""
    return threads or (0 if workers == 1 else max(1, len(os.sched_getaffinity(0)) // workers))
