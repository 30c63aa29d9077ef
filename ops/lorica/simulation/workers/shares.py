"""Which worker trains which silos, decided once: a silo's tokenised data stay where they are."""

import os
from collections.abc import Mapping

from lorica_security.identifiers import SiloName


def shared_out(sizes: Mapping[SiloName, int], workers: int) -> tuple[tuple[SiloName, ...], ...]:
    """The silos of each worker: the largest first, each to whoever has least so far. No worker is without a silo."""
    shares: list[list[SiloName]] = [[] for _ in range(min(workers, len(sizes)))]
    load = [0] * len(shares)
    for silo in sorted(sizes, key=lambda silo: (-sizes[silo], silo)):
        least = load.index(min(load))
        shares[least].append(silo)
        load[least] += max(1, sizes[silo])
    return tuple(map(tuple, shares))


def threads_of_a_worker(threads: int, workers: int) -> int:
    """Of PyTorch: what was asked for, else an equal share of the cores that this process may use; 0 leaves its default
    to one worker."""
    return threads or (0 if workers == 1 else max(1, len(os.sched_getaffinity(0)) // workers))
