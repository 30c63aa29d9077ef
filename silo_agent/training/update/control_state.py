"""What a silo keeps from round to round where drift is corrected: the p of silo_wire/drift_correction.py, which says
what it is and why.

As a round begins, h = (p - x) / (b s a) for its model x: what is added to each gradient. As it ends, p' = p + b delta,
which belongs to the update that holds this delta, and is named after it. An order to train names the update to go on
with. Where it names none every silo begins anew: h = 0, and p = x. A round that is abandoned and tried again goes on
with the same update, or begins anew. There are two files at most: the one that was begun with and the one that is left.

    PLAN-UPDATE.control     p, float32 in layout order, and the BLAKE3 of plan, update, layout and p
    new.control.part        one that is being written

Who says that no silo is missing is the coordinator, with the update that its order names. A silo believes it: in the
clear it sees every delta anyway. A state that is lost or damaged ends the work on the round, unlike a residual, which
is a convenience: the h of a cohort sum to zero, and with one of them at zero all later models would be pulled aside.
The silo declines, and every silo begins anew.

What is kept is a sum of this silo's own deltas, as private as the records that they were made from: a private file that
never leaves.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from hmac import compare_digest
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

import numpy as np
import torch
from blake3 import blake3

from lorica_security.errors import IntegrityError, StateError, StorageError
from lorica_security.host import files
from silo_agent.rounds.update import BLOCK_ELEMENTS, FloatBlock
from silo_agent.training.model.vector_file import VectorReader, blocks
from silo_wire.canonical import DIGEST_BYTES, Digest, canonical_json
from silo_wire.manifest import Layout

ANEW = "this round is declined, and every silo begins its correction anew at the next attempt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStates:
    """Of one plan, in `folder`; `layout` is the parameters' in float32.

    `server_rate` is b, by which the server multiplies the mean delta; `work` is s a, the optimizer steps of a round
    times the learning rate, both alike at all silos.
    """

    folder: Path
    plan: Digest
    layout: Layout
    server_rate: float
    work: float

    def of(self, update: Digest) -> Path:
        return self.folder / f"{self.plan[:32]}-{update}.control"

    @property
    def part(self) -> Path:
        return self.folder / "new.control.part"

    def correction(
        self, included: Digest | None, round_model: VectorReader, *, names: Collection[str], device: torch.device
    ) -> Sequence[torch.Tensor] | None:
        """h of the tensors of `names`, in layout order, on `device`; None where it is 0.

        Raises StateError where the state of `included` is not here, IntegrityError where it is damaged, and what
        `round_model` raises.
        """
        if included is None:
            return None
        vector: FloatBlock = np.empty(self.layout.parameters, dtype=np.float32)
        model: FloatBlock = np.empty(min(BLOCK_ELEMENTS, len(vector)), dtype=np.float32)
        scale = np.float32(1.0 / (self.server_rate * self.work))
        with self._opened(included) as own, round_model as reader:
            for begin, end in blocks(len(vector)):
                values, there = vector[begin:end], model[: end - begin]
                own.read([values])
                reader.read([there])
                np.subtract(values, there, out=values)
                np.multiply(values, scale, out=values)
            own.checked()
            reader.checked()
        flat = torch.from_numpy(vector)
        return [
            flat[start : start + spec.elements].view(spec.shape).to(device)
            for spec, start in self.layout.placed()
            if spec.name in names
        ]

    def keep(self, update: Digest, *, delta: VectorReader, included: Digest | None, round_model: VectorReader) -> None:
        """Have the state that `update` leaves on disk, of which `delta` is the vector: after a kill at any instant, the
        whole of it or none.

        Others than the one of `included` are deleted. Raises what `correction` raises, and StorageError where it
        cannot be written.
        """
        before: AbstractContextManager[_Vector] = round_model if included is None else self._opened(included)
        values: FloatBlock = np.empty(min(BLOCK_ELEMENTS, self.layout.parameters), dtype=np.float32)
        moved = np.empty_like(values)
        rate = np.float32(self.server_rate)
        with before as base, delta as deltas, self._new() as file:
            hasher = self._hasher(update)
            for begin, end in blocks(self.layout.parameters):
                own, step = values[: end - begin], moved[: end - begin]
                base.read([own])
                deltas.read([step])
                np.multiply(step, rate, out=step)
                np.add(own, step, out=own)
                data = own.data.cast("B")
                hasher.update(data)
                file.write(data)
            base.checked()
            deltas.checked()
            file.write(hasher.digest())
            file.flush()
            os.fsync(file.fileno())
            os.replace(self.part, self.of(update))
            files.sync_folder(self.folder)
            kept = {self.of(update)} if included is None else {self.of(update), self.of(included)}
            for path in self.folder.glob("*.control"):
                if path not in kept:
                    path.unlink(missing_ok=True)

    def _opened(self, update: Digest) -> "_State":
        return _State(self.of(update), self._hasher(update))

    def _hasher(self, update: Digest) -> blake3:
        return blake3(canonical_json(["control", self.plan, update, self.layout.digest]))

    @contextmanager
    def _new(self) -> Iterator[IO[bytes]]:
        try:
            descriptor = os.open(
                self.part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, files.PRIVATE_FILE_MODE
            )
            with os.fdopen(descriptor, "wb") as file:
                yield file
        except OSError as error:
            raise StorageError(f"{self.part} cannot be written ({error.strerror}): free some space; {ANEW}") from error
        finally:
            with suppress(OSError):
                self.part.unlink(missing_ok=True)


class _Vector(Protocol):
    """Read once from its start to its end, and right if `checked` says so."""

    def read(self, targets: Sequence[FloatBlock], /) -> None: ...

    def checked(self) -> object: ...


class _State:
    """A state on disk."""

    def __init__(self, path: Path, hasher: blake3) -> None:
        self._path, self._hasher = path, hasher

    def __enter__(self) -> Self:
        try:
            self._file = FileIO(self._path)
        except OSError as error:
            raise StateError(
                f"the control state of this silo's last update, {self._path}, is not here ({error.strerror}): {ANEW}"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, targets: Sequence[FloatBlock]) -> None:
        for target in targets:
            view = target.data.cast("B")
            while view:
                count = self._taken(view)
                self._hasher.update(view[:count])
                view = view[count:]

    def checked(self) -> None:
        """Every byte of it was read and found right."""
        digest = bytearray(DIGEST_BYTES + 1)
        if not compare_digest(digest[: self._taken(memoryview(digest))], self._hasher.digest()):
            raise self._damaged()

    def _taken(self, view: memoryview) -> int:
        try:
            count = self._file.readinto(view)
        except OSError as error:
            raise self._damaged() from error
        if not count:
            raise self._damaged()
        return count

    def _damaged(self) -> IntegrityError:
        return IntegrityError(f"the control state of this silo's last update, {self._path}, is damaged: {ANEW}")
