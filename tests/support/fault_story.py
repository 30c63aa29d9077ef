"""Full disks and damaged files in a federation of three silos with a quorum of two: real processes, one story.

    round 1   insurer's cache is on a full disk: it declines, the other two send their updates
              the coordinator's disk has no room for the model: the sum is tried again, until there is
    round 2   the coordinator's disk is full when insurer's update comes: it is refused, the other two make a model
    round 3   the coordinator is killed when it begins to sum; meanwhile insurer's spool is damaged: it is left out
    round 4   killed so again; the round's own model is damaged: the sum waits until the file is restored
    round 5   killed when the round opens; the round's model is damaged: nobody can fetch it, until it is restored

In between the disks have room again and all three are in. The coordinator dies of the test's own kills alone.
"""

import math
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorica.soak.federation import COORDINATOR, MortalFederation, Shape
from lorica_coordinator.rounds.states import course_of
from lorica_coordinator.service.records import RoundRow, SiloRow
from tests.support.json_logs import logged
from tests.support.kill_run import LONGEST_S, Death, Executioner, Kill, KillRun, processes_in
from tests.support.waiting import until

CLINIC, HOSPITAL, INSURER = "clinic-a", "hospital-b", "insurer-c"
MIB = 1 << 20
MODEL_BYTES = 6.5 * MIB  # about, of size tiny
LAST_ROUND = 6

SHAPE = Shape(
    federation="faults",
    silos=(CLINIC, HOSPITAL, INSURER),
    size="tiny",
    lines=8,
    dev_lines=1,
    values={
        "schedule.rounds": LAST_ROUND,
        "schedule.min_silos": 2,
        "training.batch_size": 8,
        "training.schema_in_input": "false",
        "training.max_input_tokens": 48,
        "training.max_output_tokens": 24,
        "evaluation.every": 0,
        "evaluation.initial": "false",
        "evaluation.last": "false",
    },
)

KILLS = (
    Kill(process=COORDINATOR, point="round-closed", round=1),
    Kill(process=INSURER, point="update-journalled", round=2),
    Kill(process=COORDINATOR, point="round-closed", round=2),
    Kill(process=COORDINATOR, point="aggregating-entered", round=3),
    Kill(process=COORDINATOR, point="aggregating-entered", round=4),
    Kill(process=COORDINATOR, point="round-closed", round=4),
)


class SmallDisk:
    """A file system of its own at `folder`, for the time of the `with`."""

    def __init__(self, folder: Path, *, size: float) -> None:
        self.folder, self._size = folder, size

    def __enter__(self) -> "SmallDisk":
        self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._mount(f"size={self._size:.0f},mode=0700")
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)

    def grow(self, size: float) -> None:
        self._mount(f"remount,size={size:.0f}")

    def _mount(self, options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)], check=True)


@dataclass
class Damage:
    """One byte of a file is changed; `mend` changes it back."""

    path: Path

    def __post_init__(self) -> None:
        self._flip()

    def mend(self) -> None:
        self._flip()

    def _flip(self) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.path.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x01]))


@dataclass
class Story:
    """What happened; `damaged` by round, the file."""

    root: Path
    federation: MortalFederation
    cache: SmallDisk
    spools: SmallDisk
    models: SmallDisk
    damaged: dict[int, Damage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._executioner = Executioner(self.federation, KILLS, self.at_death)

    def at_death(self, death: Death) -> None:
        match death.kill.process, death.round:
            case "coordinator", 1:
                self.cache.grow(10 * MODEL_BYTES)
            case "insurer-c", 2:
                self.wait_for_updates(2, of_round=2)
            case "coordinator", 2:
                self.spools.grow(10 * MODEL_BYTES)
            case "coordinator", 3:
                (spool,) = self.spools.folder.rglob(f"{INSURER}.delta")
                self.damaged[3] = Damage(spool)
            case "coordinator", int(number):
                assert death.coordinator is not None
                course = course_of(death.coordinator.state)
                assert course is not None
                (model,) = (self.federation.state / "models").rglob(f"{course.model}.safetensors")
                # Killed as the sum of this round begins, or as the next round opens.
                self.damaged[number if death.kill.point == "aggregating-entered" else number + 1] = Damage(model)

    def wait_for_updates(self, count: int, *, of_round: int) -> None:
        def in_time() -> bool:
            rounds = [record["round"] for record in self.logged(COORDINATOR, "update committed")]
            return rounds.count(of_round) == count

        until(in_time, lambda: None, LONGEST_S)

    def logged(self, process: str, event: str) -> list[dict[str, Any]]:
        return logged(self.federation.log(process), event)

    def failed_sums(self, words: str) -> list[str]:
        """The reasons with these words for which a sum was put off."""
        failures = self.logged(COORDINATOR, "aggregation failed, it is tried again")
        return [record["error"] for record in failures if words in record["error"]]

    def unready(self) -> set[str]:
        """Silos whose agents have given up for now, after failures in a row."""
        last = {silo: self.logged(silo, "readiness")[-1:] for silo in SHAPE.silos}
        return {silo for silo, records in last.items() if records and not records[0]["ready"]}

    def give_up(self) -> None:
        self._executioner.give_up()

    def tell(self) -> "Told":
        """The story at the head of this file."""
        executioner = self._executioner
        executioner.begin()
        executioner.until(lambda: bool(self.failed_sums("No space left on device")))
        self.models.grow(10 * MODEL_BYTES)
        executioner.until(lambda: bool(self.failed_sums("damaged")))
        self.damaged[4].mend()
        executioner.until(lambda: 5 in self.damaged and len(self.unready()) >= 2)
        self.damaged[5].mend()
        for silo in SHAPE.silos:
            self.federation.processes.stop(silo)
            executioner.start(silo)
        return Told(self, executioner.finish())


@dataclass(frozen=True)
class Told:
    story: Story
    run: KillRun

    def row(self, number: int, attempt: int | None = None) -> RoundRow:
        """One attempt; the last by default."""
        rows = [row for row in self.run.result.rounds if row.round == number and attempt in (None, row.attempt)]
        return rows[-1]

    def silo(self, number: int, silo: str) -> SiloRow:
        (row,) = [row for row in self.row(number).silos if row.silo == silo]
        return row

    def check_made_by(self, number: int, *committed: str) -> None:
        """This round made a model at its first attempt, from the updates of `committed` alone."""
        row = self.row(number)
        assert (row.attempt, row.outcome) == (1, "applied"), row
        assert [silo.silo for silo in row.silos if silo.weight] == list(committed)
        assert math.isclose(sum(silo.share for silo in row.silos), 1.0)


@contextmanager
def story_in(root: Path) -> Iterator[Story]:
    """Set up and ready to be told; its disks are there for as long."""
    with ExitStack() as stack:
        processes = processes_in(root)
        federation = MortalFederation(root, SHAPE, processes)
        federation.set_up()
        federation.agent(INSURER).root.mkdir(mode=0o700)
        cache = stack.enter_context(SmallDisk(federation.agent(INSURER).models, size=0.5 * MODEL_BYTES))
        spools = stack.enter_context(SmallDisk(federation.state / "spools", size=2.5 * MODEL_BYTES))
        models = stack.enter_context(SmallDisk(federation.state / "models", size=1.5 * MODEL_BYTES))
        stack.enter_context(processes)  # ended before the disks are taken away
        yield Story(root, federation, cache, spools, models)
