"""Which worker trains which silos, and on which device, decided once: a silo's tokenised data stay where they are."""

import os
from collections.abc import Mapping, Sequence

from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import SiloName
from silo_agent.training.device import DeviceSettings, chosen_device


def shared_out(sizes: Mapping[SiloName, int], workers: int) -> tuple[tuple[SiloName, ...], ...]:
    """The silos of each worker: the largest first, each to whoever has least so far. No worker is without a silo."""
    shares: list[list[SiloName]] = [[] for _ in range(min(workers, len(sizes)))]
    load = [0] * len(shares)
    for silo in sorted(sizes, key=lambda silo: (-sizes[silo], silo)):
        least = load.index(min(load))
        shares[least].append(silo)
        load[least] += max(1, sizes[silo])
    return tuple(map(tuple, shares))


def devices_in_turn(devices: Sequence[str], *, device: str, workers: int) -> tuple[str, ...]:
    """The device of each worker: `devices` in turn, the first again after the last; `device` for all without any.

    Raises ConfigurationError for a device that is not there, for one that no worker would have, and for both.
    """
    if not devices:
        return (device,) * workers
    if device != "auto":
        raise ConfigurationError(f"--device {device} is of all workers, and --devices of each: give one of them")
    if len(devices) > workers:
        raise ConfigurationError(
            f"--devices names {len(devices)} devices, and {workers} of them would have a worker: give as many "
            "--workers and silos, or fewer devices"
        )
    for one in devices:
        chosen_device(DeviceSettings(device=one))
    return tuple(devices[number % len(devices)] for number in range(workers))


def threads_of_a_worker(threads: int, workers: int) -> int:
    """Of PyTorch: what was asked for, else an equal share of the cores that this process may use; 0 leaves its default
    to one worker."""
    return threads or (0 if workers == 1 else max(1, len(os.sched_getaffinity(0)) // workers))
