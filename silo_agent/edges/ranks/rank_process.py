"""One rank of a silo's training: a process that reads the data, meets the others, and trains what it is called for.

    python -P -m silo_agent.edges.ranks.rank_process FOLDER

Which rank it is the environment says: RANK and WORLD_SIZE as torchrun sets them, or what Slurm, Open MPI or an Indexed
Job of Kubernetes set. It has the silo's data, the round's model and the file of the silo's own entropy; no key, no
certificate, no database, and no connection but to its fellow ranks. It ends with its agent, however that ends.
"""

import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final, NoReturn

import torch

from lorica_security.errors import ConfigurationError, LoricaError, StorageError
from lorica_security.host.private_memory import keep_memory_private
from lorica_security.identifiers import SiloName
from silo_agent.edges.keys.own_entropy import own_entropy
from silo_agent.edges.ranks import frames
from silo_agent.edges.ranks.launching import Place, device_of_rank, heard_on, place_of, require_interface
from silo_agent.edges.ranks.versions import versions
from silo_agent.edges.workshop.silo_sources import Reading, SiloSources
from silo_agent.edges.workshop.workshop import enough_memory, on_records
from silo_agent.policy.rules import PolicyRules
from silo_agent.service.ports import TrainedUpdate, WorkCancelled
from silo_agent.settings import DataSection, Settings
from silo_agent.training.checkpoint import examples_digest
from silo_agent.training.device import DeviceSettings, chosen_device
from silo_agent.training.ranks.ranks import AnotherRankFailed, RanksParted, Together, met_over
from silo_agent.training.ranks.sharded_ranks import ShardedRanks
from silo_agent.training.silo_trainer import SiloTrainer
from silo_wire.canonical import Digest
from silo_wire.plans.plan import PlanBundle

LOOK_S: Final = 0.02
"""Between two looks for a call."""
AGENT_GONE_S: Final = 30.0
"""Without a sign of the agent: it is gone, and so is whoever reads what is made here."""
SIGN_S: Final = 0.5
"""Between two signs that this rank goes on."""
GONE: Final = 3
"""Exit code of a rank that ended because others did."""


def run(folder: Path, environment: Mapping[str, str]) -> NoReturn:
    """Until the agent says so, or is gone. Raises what is wrong before the ranks have met."""
    keep_memory_private()
    _require_private(folder)
    start = frames.Start.read(folder / frames.START)
    if start is None:
        raise ConfigurationError(
            f"{folder} holds no {frames.START}: have [training] launch start the ranks where the silo's folder is "
            "mounted at the same path"
        )
    place = place_of(environment, start.world)
    rank = place.rank
    if not frames.claim(folder / f"rank-{rank}"):
        raise ConfigurationError(
            f"two processes are rank {rank}: have [training] launch give each a number of its own, and start each once"
        )
    threading.Thread(target=_end_with_agent, args=(folder, rank), daemon=True).start()
    frames.Hello(
        rank=rank,
        world=place.world,
        host=socket.gethostname(),
        pid=os.getpid(),
        born=frames.born(os.getpid()),
        versions=versions(),
    ).write(folder / f"hello-{rank}.json")
    os.environ.update(heard_on(start.interface))
    try:
        require_interface(start.interface)
        bench = _Bench(folder, start, place)
    except LoricaError as error:
        if not isinstance(error, RanksParted):
            frames.Out(out=frames.Raised.of(error)).write(folder / f"out-0-{rank}.json")
        _say_gone(folder, rank)
        raise
    for number in count(1):
        frames.Out(out=bench.outcome(number)).write(folder / f"out-{number}-{rank}.json")
    raise AssertionError("there is always a next call")


def _require_private(folder: Path) -> None:
    """The folder of frames is this account's alone, or anybody could say what to train and where to write it."""
    try:
        found = folder.lstat()
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{folder} is not there: its agent has ended these ranks, or have [training] launch start them where the "
            "silo's folder is mounted at the same path"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigurationError(
            f"{folder} is not a folder of this account's alone (mode 0700): run ranks as the account of the agent"
        )


def _end_with_agent(folder: Path, rank: int) -> NoReturn:
    """In a thread of its own: the training itself may wait for a rank that hangs."""
    sign, since = -1.0, time.monotonic()
    never = threading.Event()
    while folder.exists() and not (folder / frames.END).exists():
        now = frames.number_in(folder / frames.ALIVE)
        if now != sign:
            sign, since = now, time.monotonic()
        elif time.monotonic() - since > AGENT_GONE_S:
            break
        never.wait(1.0)
    _say_gone(folder, rank)
    os._exit(GONE)


def _say_gone(folder: Path, rank: int) -> None:
    """Else the agent waits for a rank of another machine until it must have missed its signs."""
    with suppress(StorageError):
        frames.put(folder / f"gone-{rank}", b"")


class _Bench:
    def __init__(self, folder: Path, start: frames.Start, mine: Place) -> None:
        """Raises LoricaErrors; RanksParted where the others do not come."""
        rank, world = mine.rank, mine.world
        if world != start.world:
            raise ConfigurationError(
                f"[training] launch started {world} ranks, [training] processes is {start.world}: make them one number"
            )
        self._folder, self._rank = folder, rank
        self._signs, self._signed = count(1), 0.0
        raw = frames.taken(folder / frames.PLAN)
        bundle = PlanBundle.decode(raw or b"", Digest(start.plan))
        device = device_of_rank(start.device, mine.local, torch.cuda.device_count())
        settings = DeviceSettings(device=device, threads=start.threads)
        place = chosen_device(settings)
        rules = PolicyRules.model_validate({"tasks": start.tasks})
        sources = SiloSources(
            Settings(data=DataSection(folder=start.data, max_bad_lines_share=start.max_bad_lines_share), policy=rules),
            folder / f"scratch-{rank}",
        )
        silo, entropy = SiloName(start.silo), own_entropy(Path(start.entropy))
        with on_records():
            data = sources.data_for(Reading.of(bundle.plan, silo))
        group, backend = met_over(str(folder), rank, world, place, timeout_s=start.timeout_s)
        self._ranks = (ShardedRanks if start.sharded else Together)(group, place, backend, self._sign)
        with on_records():
            self._trainer = SiloTrainer(
                bundle,
                data,
                silo,
                settings,
                base=None if start.base is None else start.base.model(),
                own_entropy=entropy,
                ranks=self._ranks,
            )
            examples = examples_digest(self._trainer.encoded("train"))
        frames.Ready(
            examples=examples,
            entropy=frames.committed(entropy, bundle.plan.digest),
            device=str(place),
            threads=torch.get_num_threads(),
        ).write(folder / f"ready-{rank}.json")

    def outcome(self, number: int) -> frames.Done | frames.Raised:
        """Of call `number`, which is waited for."""
        self._number, self._notices = number, count(1)
        path, never = self._folder / f"call-{number}.json", threading.Event()
        while (call := frames.Call.read(path)) is None:
            never.wait(LOOK_S)
        try:
            return frames.Done.of(self._trained(call))
        except (LoricaError, WorkCancelled) as error:
            return frames.Raised.of(
                error, parted=isinstance(error, RanksParted), another=isinstance(error, AnotherRankFailed)
            )

    def _trained(self, call: frames.Call) -> TrainedUpdate:
        model = call.model.model()
        with enough_memory(), on_records():
            update = self._trainer.train(
                round_number=call.round,
                model_path=model.file,
                model=model.manifest,
                model_mark=model.mark,
                update_path=Path(call.update_file),
                included_update=None if call.included_update is None else Digest(call.included_update),
                told_before=call.told_before,
                checkpoint_path=Path(call.checkpoint_file),
                on_progress=self._progress,
                on_notice=self._notice,
                should_stop=(self._folder / f"stop-{self._number}").exists if self._rank == 0 else lambda: False,
            )
        return TrainedUpdate(manifest=update.manifest, summary=update.summary, mark=update.mark)

    def _progress(self, fraction: float, loss: float) -> None:
        if self._rank == 0:
            with suppress(StorageError):  # what is told of a training does not end it
                frames.put(self._folder / f"progress-{self._number}", str(fraction).encode())

    def _notice(self, event: str, detail: str) -> None:
        if self._rank == 0:
            name = f"notice-{self._number}-{next(self._notices)}.json"
            frames.Notice(event=event, detail=detail).write(self._folder / name)

    def _sign(self) -> None:
        """After each meeting: this rank goes on."""
        if (now := time.monotonic()) - self._signed > SIGN_S:
            self._signed = now
            with suppress(StorageError):  # without one for [training] rank_timeout_s the agent takes this rank to hang
                frames.put(self._folder / f"met-{self._rank}", str(next(self._signs)).encode())


def main(folder: str, environment: Mapping[str, str]) -> int:
    """An exit code, with one line on stderr; what is a defect comes with its traceback."""
    try:
        run(Path(folder), environment)
    except LoricaError as error:
        print(f"rank of a silo's training: {error}", file=sys.stderr, flush=True)
        return GONE


if __name__ == "__main__":
    os._exit(main(sys.argv[1], os.environ))  # to take PyTorch apart takes seconds
