"""What Prometheus sees of the host that a coordinator or an agent runs on: what is installed, its process, its folder's
disk, its GPUs' memory.

All but what is installed is looked up at each scrape. A GPU is asked for only once the program has begun to use it: a
scrape loads no torch and takes no memory of a device.
"""

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from lorica_security.host.software_version import software_version

FOLDER: Final = {
    "lorica_disk_free_bytes": "Bytes that may still be written to the file system of the folder.",
    "lorica_disk_size_bytes": "Bytes of that file system, those included that only root may write.",
    "lorica_folder_bytes": "Bytes on disk of all files in the folder: models, spools, records.",
}
GPU: Final = {
    "lorica_gpu_memory_free_bytes": "Bytes of a GPU that nobody uses; absent until the program uses a GPU.",
    "lorica_gpu_memory_size_bytes": "Bytes of a GPU.",
    "lorica_gpu_memory_reserved_bytes": "Bytes of a GPU that this process holds.",
}
BUILD: Final = {
    "lorica_build_info": "Always 1: the versions of Lorica, of the wire that it speaks, of Python and of PyTorch."
}
_BLOCK_BYTES: Final = 512  # of st_blocks, whatever the file system's own are


class BuildCollector(Collector):
    """`wire` is the version that this program speaks. PyTorch's is read from what is installed: a scrape loads no
    torch."""

    def __init__(self, wire: str) -> None:
        self._versions = {
            "version": software_version(),
            "wire": wire,
            "python": platform.python_version(),
            "torch": version("torch"),
        }

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return (GaugeMetricFamily(name, meaning, labels=list(self._versions)) for name, meaning in BUILD.items())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for family in self.describe():
            family.add_metric(list(self._versions.values()), 1)
            yield family


class FolderCollector(Collector):
    """`folder`: where models, spools and records are; nothing is told of one that is not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return (GaugeMetricFamily(name, meaning) for name, meaning in FOLDER.items())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        try:
            disk = os.statvfs(self._folder)
        except OSError:
            return
        values = (disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize, bytes_in(self._folder))
        for (name, meaning), value in zip(FOLDER.items(), values, strict=True):
            yield GaugeMetricFamily(name, meaning, value=value)


def bytes_in(folder: Path) -> int:
    """On disk, of all files at any depth; of those that go while it counts, nothing."""
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    total += bytes_in(Path(entry.path))
                else:
                    total += _size(entry)
    except OSError:
        return total
    return total


def _size(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES
    except OSError:
        return 0


class GpuCollector(Collector):
    """By `device`, its number in torch."""

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return (GaugeMetricFamily(name, meaning, labels=["device"]) for name, meaning in GPU.items())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        torch: Any = sys.modules.get("torch")
        families = list(self.describe())
        try:
            if torch is None or not torch.cuda.is_initialized():
                return
            for device in range(torch.cuda.device_count()):
                free, size = torch.cuda.mem_get_info(device)
                for family, value in zip(families, (free, size, torch.cuda.memory_reserved(device)), strict=True):
                    family.add_metric([str(device)], value)
        except (
            AttributeError,
            RuntimeError,
        ):  # torch is half imported; or the GPU is gone, when the rest is wanted most
            return
        yield from families


def register_host(registry: CollectorRegistry, folder: Path, wire: str) -> None:
    """Have `registry` tell of what is installed, of this process, of `folder` and of the GPUs as well; `wire` is the
    version of the wire."""
    own = (BuildCollector(wire), FolderCollector(folder), GpuCollector())
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR, *own):
        registry.register(collector)
