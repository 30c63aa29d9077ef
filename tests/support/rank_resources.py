"""What ranks of whole models and of shards take of this machine, beside one rank alone.

    unshare --net sh -c 'ip link set lo up; exec python -m tests.support.rank_resources FOLDER SIZE RANKS TIMES'

Each way trains the same round by turns, TIMES times after one that is not counted, with one thread a process. Printed
is a JSON object of medians for each: CPU seconds of the rank that took most, and a clock's; MB that all ranks read and
wrote by system calls (/proc/PID/io), files and sockets alike, and that loopback carried, which is that of no others in
a network namespace of its own; and MB of the largest rank: PSS and RSS at their highest in a call, sampled, and PSS
beyond what it was before the first call.
"""

import json
import statistics
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.query_log import query_log
from lorica.demo.silos.silos import write_silo
from silo_agent.edges.ranks import frames
from silo_agent.edges.ranks.rank_trainer import RankTrainer
from tests.support.rank_costs import RECORDS, Sized, cpu_s

MB = 1e6
SAMPLE_S = 0.1


@dataclass
class Way:
    silo: Sized
    trainer: RankTrainer
    ranks: list[psutil.Process]
    before: int
    found: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def started(cls, root: Path, size: str, batches: int, processes: int, *, sharded: bool) -> "Way":
        silo = Sized(root, processes, own={"sharded": sharded}).grown(size, batches, private=False)
        trainer = silo.trainer()
        trainer.prepare(silo.bundle, None)
        hellos = [frames.Hello.read(path) for path in silo.ranks.glob("group-*/hello-*.json")]
        ranks = [psutil.Process(hello.pid) for hello in hellos if hello is not None]
        return cls(silo, trainer, ranks, max(_pss(rank) for rank in ranks))

    def take_turn(self, *, counted: bool) -> None:
        over, peaks = threading.Event(), [[0, 0] for _ in self.ranks]

        def sample() -> None:
            while not over.wait(SAMPLE_S):
                for rank, peak in zip(self.ranks, peaks, strict=True):
                    with suppress(psutil.Error):
                        told = rank.memory_full_info()
                        peak[:] = max(peak[0], told.pss), max(peak[1], told.rss)

        sampler = threading.Thread(target=sample)
        sampler.start()
        cpu, io, sent = list(map(cpu_s, self.ranks)), _moved(self.ranks), _carried()
        began = time.monotonic()
        self.silo.train(self.trainer)
        took = {
            "wall_s": time.monotonic() - began,
            "rank_cpu_s": max(cpu_s(rank) - then for rank, then in zip(self.ranks, cpu, strict=True)),
            "moved_mb": (_moved(self.ranks) - io) / MB,
            "loopback_mb": (_carried() - sent) / MB,
        }
        over.set()
        sampler.join()
        took["pss_mb"], took["rss_mb"] = (max(peak[which] for peak in peaks) / MB for which in (0, 1))
        took["pss_more_mb"] = took["pss_mb"] - self.before / MB
        if counted:
            for name, value in took.items():
                self.found.setdefault(name, []).append(value)


def _pss(process: psutil.Process) -> int:
    return int(process.memory_full_info().pss)


def _moved(processes: list[psutil.Process]) -> float:
    told = [process.io_counters() for process in processes]
    return float(sum(one.read_chars + one.write_chars for one in told))


def _carried() -> float:
    return float(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def main(folder: str, size: str, ranks: str, times: str) -> None:
    root, world = Path(folder), int(ranks)
    write_silo(root / "data", CLINIC, seed=3, splits=query_log(CLINIC, records=RECORDS, seed=3).log)
    ways: dict[str, Way] = {}
    try:
        for name, processes, sharded in (("one", 1, False), ("whole", world, False), ("shards", world, True)):
            (root / name).mkdir()
            (root / name / "data").symlink_to(root / "data")
            ways[name] = Way.started(root / name, size, world, processes, sharded=sharded)
        for number in range(int(times) + 1):
            for way in ways.values():
                way.take_turn(counted=number > 0)
    finally:
        for way in ways.values():
            way.trainer.close()
    parameters = ways["one"].silo.bundle.layout.parameters
    medians = {
        name: {what: round(statistics.median(values), 3) for what, values in way.found.items()}
        for name, way in ways.items()
    }
    print(json.dumps({"size": size, "parameters": parameters, "ranks": world, **medians}))


if __name__ == "__main__":
    main(*sys.argv[1:])
