"""The checkpoint of a local training: what a restarted agent needs to go on after the last whole epoch, bit for bit.

One private safetensors file, replaced whole (temp, fsync, rename): parameters, the local optimizer's state and every
random state as tensors, canonical JSON for the rest in the header's metadata, and as its last tensor the BLAKE3 of all
bytes before it. It is written and read tensor by tensor, hashed on the way.

It names the training that it belongs to, down to what may change a bit of the result. One that belongs to another
training, or is damaged, is deleted and training begins anew. A checkpoint is a convenience: where it cannot be written,
or would leave no room for the update, training goes on without, says so once, and deletes the one that it had, because
the update needs the room more.

Ranks that hold a part of the model each write a file each, named by the optimizer step, and rank 0 commits them
together: once all are on disk, the checkpoint is a file of the same form that has no tensors and names their digests.

There is none after the last epoch: it would cost every round a write of the whole model, to save one epoch where an
agent is killed in the few seconds until the update is on disk.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np
import torch
import transformers
from blake3 import blake3

from lorica_security.host import files
from silo_agent.service.ports import Notice
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.loss_log import LossLog
from silo_agent.training.ranks.ranks import ALONE, AnotherRankFailed, Ranks
from silo_wire.canonical import DIGEST_BYTES, Digest, canonical_json

FORMAT = 3
"""To be raised with the file's layout, and when local training comes to other bits from the same plan and data."""
BLOCK_BYTES = 4 << 20
_METADATA, _CONTENT, _DIGEST = "__metadata__", "checkpoint", "digest"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingIdentity:
    """What a local training's result depends on; the plan's digest covers all its settings, the seed included.

    `control`: the update whose control state it goes on with, where drift is corrected. `world`: the ranks that train
    together, and `backend` what they meet by; sums over another number of them have other bits, as those of `sharded`
    ones have.
    """

    plan: Digest
    round: int
    silo: str
    model: Digest
    examples: Digest
    device: str
    threads: int
    torch: str
    transformers: str
    control: Digest | None = None
    world: int = 1
    backend: str = ""
    sharded: bool = False
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Where a local training stands after a whole epoch; the tensors are training's own, not copies.

    `optimizer` is the state of torch's state_dict, by the parameter's index; `random` holds uint8 states, on the CPU;
    `kept` is what the objective remembers, such as a teacher's parameters. Ranks that train together hold the same but
    for their random states, which are all here: so one file is the checkpoint of all, and is committed at once. Of
    sharded ones each has the state of its own part.
    """

    epochs: int
    steps: int
    seconds: float
    log: LossLog
    parameters: Sequence[torch.Tensor]
    optimizer: Mapping[int, Mapping[str, torch.Tensor | float]]
    random: Mapping[str, torch.Tensor]
    kept: Sequence[torch.Tensor] = ()


class CheckpointFile:
    """Where one training keeps its checkpoint. No method raises for what the disk does."""

    def __init__(
        self,
        path: Path,
        training: TrainingIdentity,
        *,
        update_bytes: int,
        notice: Notice,
        every_s: float = 0.0,
        ranks: Ranks = ALONE,
    ) -> None:
        """`update_bytes` is the room that a checkpoint has to leave; `every_s` how much training it must be worth, in
        seconds. Of `ranks`, rank 0 writes and deletes it, and sharded ones a part of it each.

        `notice` hears of `training-resumed`, `checkpoint-ignored` and `checkpoint-not-written`.
        """
        self._path, self._part = path, path.with_name(f"{path.name}.part")
        self._training = training
        self._update_bytes = update_bytes
        self._notice = notice
        self._every_s, self._saved_s = every_s, 0.0
        self._ranks = ranks
        self._read_only = ranks.rank > 0
        self._given_up = self._read_only and not ranks.sharded

    def load(self, device: torch.device) -> TrainingState | None:
        """What an earlier process left of this very training, its tensors on `device`; else None, and the file is
        gone."""
        try:
            with self._path.open("rb", buffering=0) as file:
                read = _Read(file, self._training)
                state = None if self._ranks.sharded else read.state(device)
            if state is None:
                state = self._own_part(read, device)
        except FileNotFoundError:
            self._delete()
            return None
        except (OSError, _Unusable) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._notice("checkpoint-ignored", f"{self._path} {reason}: training begins anew")
            self._delete()
            return None
        self._saved_s = state.seconds
        self._notice("training-resumed", f"after epoch {state.epochs}, optimizer step {state.steps}")
        return state

    def save(self, state: TrainingState) -> None:
        """Replace the checkpoint; it is on disk when this returns, unless a notice was given or it would save too
        little."""
        if self._given_up or not self._is_due(state):
            return
        self._saved_s = state.seconds
        try:
            if self._ranks.sharded:
                self._replace_together(state)
            else:
                tensors = dict(_named(state))
                self._replace(_header(self._training, state, tensors), tensors)
        except (OSError, AnotherRankFailed) as error:
            self._given_up = True
            self._delete()
            reason = error.strerror if isinstance(error, OSError) else error
            self._notice(
                "checkpoint-not-written",
                f"{self._path} cannot be written ({reason}): this training goes on without checkpoints and "
                "begins anew after a restart; free some space",
            )

    def _is_due(self, state: TrainingState) -> bool:
        due = state.seconds - self._saved_s >= self._every_s
        # By the clock of rank 0, where all of them write.
        return self._ranks.any(self._ranks.rank == 0 and due) if self._ranks.sharded else due

    def _replace(self, header: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
        self._put(self._part, header, tensors)
        os.replace(self._part, self._path)
        files.sync_folder(self._path.parent)

    def _put(self, path: Path, header: bytes, tensors: Mapping[str, torch.Tensor]) -> bytes:
        """The digest of what is on disk now."""
        self._require_room(len(header) + sum(tensor.nbytes for tensor in tensors.values()) + DIGEST_BYTES)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, files.PRIVATE_FILE_MODE)
        with os.fdopen(descriptor, "wb") as file:
            digest = _write(file, header, tensors)
            file.flush()
            os.fsync(file.fileno())
        return digest

    def _replace_together(self, state: TrainingState) -> None:
        """Raises AnotherRankFailed where it was not this rank that could not write."""
        own, tensors = self._part_of(state.steps), dict(_named(state))
        with self._ranks.all_or_none():
            digest = self._put(own, _header(self._training, state, tensors), tensors)
            files.sync_folder(own.parent)
        every = self._ranks.gathered(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        with self._ranks.all_or_none():
            if self._ranks.rank == 0:
                parts = [bytes(each.tolist()).hex() for each in every]
                self._replace(_header(self._training, state, {}, parts), {})
        for former in self._parts():
            if former != own:
                with suppress(OSError):
                    former.unlink()

    def _own_part(self, committed: "_Read", device: torch.device) -> TrainingState:
        """Raises _Unusable, OSError."""
        with self._part_of(committed.content["steps"]).open("rb", buffering=0) as file:
            read = _Read(file, self._training)
            if read.digest.hex() != committed.content["parts"][self._ranks.rank]:
                raise _Unusable("names another part than is there")
            return read.state(device)

    def _part_of(self, steps: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{steps}-{self._ranks.rank}")

    def _parts(self) -> list[Path]:
        """Of this rank, of whatever step."""
        return list(self._path.parent.glob(f"{self._path.name}.*-{self._ranks.rank}"))

    def _require_room(self, size: int) -> None:
        disk = os.statvfs(self._path.parent)
        free = disk.f_bavail * disk.f_frsize
        if self._ranks.sharded:
            size *= self._ranks.world  # all write at once, on one disk
        if free < size + self._update_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{free} bytes are free, it takes {size} and the update {self._update_bytes}",
            )

    def _delete(self) -> None:
        own = self._parts() if self._ranks.sharded else []
        for path in own if self._read_only else (self._part, self._path, *own):
            with suppress(OSError):  # on a disk that refuses even this, what is left is replaced or ignored later
                path.unlink(missing_ok=True)


def training_identity(
    *,
    plan: Digest,
    round_number: int,
    silo: str,
    model: Digest,
    examples: EncodedExamples,
    device: torch.device,
    control: Digest | None = None,
    ranks: Ranks = ALONE,
) -> TrainingIdentity:
    """Of a training that runs in this process, with its versions and its number of threads."""
    return TrainingIdentity(
        plan=plan,
        round=round_number,
        silo=silo,
        model=model,
        examples=examples_digest(examples),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        transformers=transformers.__version__,
        control=control,
        world=ranks.world,
        backend=ranks.backend,
        sharded=ranks.sharded,
    )


def examples_digest(examples: EncodedExamples) -> Digest:
    """Of all that a training takes from them: of private ones also who has which, and further views."""
    hasher = blake3()
    for ids in chain(examples.inputs, examples.targets, *examples.other_inputs):
        hasher.update(len(ids).to_bytes(8, "little"))
        hasher.update(ids.astype("<i4", copy=False).tobytes())
    for unit in examples.units or ():
        hasher.update(len(unit).to_bytes(8, "little"))
        hasher.update(np.asarray(unit, dtype="<i8").tobytes())
    return Digest(hasher.hexdigest())


# ---- the file -----------------------------------------------------------------------------------------------------


class _Unusable(Exception):
    """Why a file is no checkpoint of this training, as the predicate of a sentence about it."""


def _named(state: TrainingState) -> Iterator[tuple[str, torch.Tensor]]:
    for index, parameter in enumerate(state.parameters):
        yield f"parameter.{index}", parameter
    for index, entries in state.optimizer.items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                yield f"optimizer.{index}.{name}", value
    for name, value in state.random.items():
        yield f"random.{name}", value
    for index, value in enumerate(state.kept):
        yield f"kept.{index}", value


def _header(
    training: TrainingIdentity, state: TrainingState, tensors: Mapping[str, torch.Tensor], parts: Sequence[str] = ()
) -> bytes:
    content = {
        "training": asdict(training),
        "epochs": state.epochs,
        "steps": state.steps,
        "seconds": state.seconds,
        "log": asdict(state.log),
        "parts": list(parts),
        "optimizer": {
            index: {name: value for name, value in entries.items() if not isinstance(value, torch.Tensor)}
            for index, entries in state.optimizer.items()
        },
    }
    entries: dict[str, object] = {_METADATA: {_CONTENT: canonical_json(content).decode()}}
    begin = 0
    for name, dtype, shape, size in (
        *((name, _NAMES[tensor.dtype], list(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()),
        (_DIGEST, "U8", [DIGEST_BYTES], DIGEST_BYTES),
    ):
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    # Not sorted: readers take the tensors in the order in which their bytes lie.
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: IO[bytes], header: bytes, tensors: Mapping[str, torch.Tensor]) -> bytes:
    hasher = blake3(header)
    file.write(header)
    for tensor in tensors.values():
        for block in _blocks(_bytes_of(tensor.detach().cpu().contiguous())):
            hasher.update(block)
            file.write(block)
    digest = hasher.digest()
    file.write(digest)
    return digest


class _Read:
    """A file of `training`, parsed up to its tensors. Raises _Unusable, OSError.

    Twice through the file: what does not have its digest is not even parsed.
    """

    def __init__(self, file: FileIO, training: TrainingIdentity) -> None:
        self._file = file
        self.digest = _require_whole(file)
        file.seek(0)
        self._entries = json.loads(_read_exactly(file, int.from_bytes(_read_exactly(file, 8), "little")))
        self.content = json.loads(self._entries.pop(_METADATA)[_CONTENT])
        _require_same(training, self.content["training"])

    def state(self, device: torch.device) -> TrainingState:
        content = self.content
        parameters: list[torch.Tensor] = []
        optimizer: dict[int, dict[str, torch.Tensor | float]] = {
            int(index): dict(numbers) for index, numbers in content["optimizer"].items()
        }
        random: dict[str, torch.Tensor] = {}
        kept: list[torch.Tensor] = []
        for name, entry in self._entries.items():
            tensor = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
            for block in _blocks(_bytes_of(tensor)):
                _fill(self._file, block)
            match name.split(".", 2):
                case ["parameter", _]:
                    parameters.append(tensor.to(device))
                case ["optimizer", index, key]:
                    optimizer[int(index)][key] = tensor.to(device)
                case ["random", key]:
                    random[key] = tensor
                case ["kept", _]:
                    kept.append(tensor.to(device))
        return TrainingState(
            epochs=content["epochs"],
            steps=content["steps"],
            seconds=content["seconds"],
            log=LossLog(**content["log"]),
            parameters=parameters,
            optimizer=optimizer,
            random=random,
            kept=kept,
        )


def _require_whole(file: FileIO) -> bytes:
    """The digest that the file has."""
    left = os.fstat(file.fileno()).st_size - DIGEST_BYTES
    hasher, buffer = blake3(), memoryview(bytearray(BLOCK_BYTES))
    while left > 0:
        block = buffer[: min(left, BLOCK_BYTES)]
        _fill(file, block)
        hasher.update(block)
        left -= len(block)
    digest = hasher.digest()
    if file.read() != digest:
        raise _Unusable("is damaged: it does not have its digest")
    return digest


def _require_same(training: TrainingIdentity, theirs: Mapping[str, object]) -> None:
    ours = asdict(training)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise _Unusable(f"is of another training (its {name} is {theirs.get(name)}, here it is {ours.get(name)})")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The contiguous CPU tensor's own memory."""
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


def _blocks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]


def _read_exactly(file: FileIO, size: int) -> bytearray:
    data = bytearray(size)
    _fill(file, memoryview(data))
    return data


def _fill(file: FileIO, target: memoryview) -> None:
    filled = 0
    while filled < len(target):
        count = file.readinto(target[filled:])
        if not count:
            raise _Unusable("is cut off")
        filled += count
