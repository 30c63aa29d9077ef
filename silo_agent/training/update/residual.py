"""What rounding cut off an update, kept until it is known whether that update counted.

A residual belongs to one update and is named after it. An order to train says which of this silo's updates is the
newest that a model includes: its residual is the one to begin with, whatever became of later updates. A round that is
abandoned and tried again begins with the same residual, so none is added twice. There are two at most: the one that was
begun with and the one that is left; the latter takes the place of an older one.

    PLAN-UPDATE.residual    float32 in layout order, the BLAKE3 of each block, and a seal over these, plan and update
    new.residual.part       one that is being written

A residual is data of the silo: a private file that never leaves. It is also a convenience: one that is lost, damaged or
cannot be written costs accuracy and nothing else. Nobody waits until it is on disk, therefore: a kill loses nothing of
what was written, and after a power cut the digests tell what the system had not come to.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path

import numpy as np
from blake3 import blake3

from silo_agent.rounds.update import BLOCK_ELEMENTS, FloatBlock
from silo_agent.service.ports import Notice
from silo_agent.training.model.vector_file import VectorWriter
from silo_wire.canonical import DIGEST_BYTES, Digest, canonical_json
from silo_wire.manifest import Layout

BLOCK_BYTES = 4 * BLOCK_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Of one plan, in `folder`; `layout` is the parameters' in float32.

    `notice` hears of `residual-lost` and `residual-not-written`.
    """

    folder: Path
    plan: Digest
    layout: Layout
    notice: Notice

    def of(self, update: Digest) -> Path:
        return self.folder / f"{self.plan[:32]}-{update}.residual"

    @property
    def part(self) -> Path:
        return self.folder / "new.residual.part"

    def seal(self, update: Digest, table: bytes) -> bytes:
        return blake3(canonical_json(["residual", self.plan, update, self.layout.digest]) + table).digest()

    @contextmanager
    def opened(self, update: Digest | None) -> Iterator["ResidualReader | None"]:
        """That of `update`; None where there is none, or none that can be trusted, which `notice` is told of."""
        if update is None:
            yield None
            return
        path = self.of(update)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._lost(path, error.strerror or "cannot be opened")
            yield None
            return
        try:
            table = self._table(descriptor, update)
            if table is None:
                self._lost(path, "it is damaged")
                yield None
                return
            reader = ResidualReader(descriptor, table)
            yield reader
            if reader.damaged:
                self._lost(path, f"{reader.damaged} of its {len(table) // DIGEST_BYTES} blocks are damaged")
        finally:
            os.close(descriptor)

    @contextmanager
    def written(self, *, begun_with: Digest | None) -> Iterator["ResidualWriter"]:
        """A new one, in the place of all but the one that was begun with."""
        kept = None if begun_with is None else self.of(begun_with)
        writer = ResidualWriter(self)
        try:
            with writer.or_without():
                for path in self.folder.glob("*.residual"):
                    if path != kept:
                        path.replace(self.part)  # its blocks are there to be overwritten
                writer.open()
            yield writer
        finally:
            writer.close()

    def _table(self, descriptor: int, update: Digest) -> bytes | None:
        size = self.layout.total_bytes
        table_bytes = -(-size // BLOCK_BYTES) * DIGEST_BYTES
        trailer = os.pread(descriptor, table_bytes + DIGEST_BYTES + 1, size)
        table, seal = trailer[:table_bytes], trailer[table_bytes:]
        return table if compare_digest(self.seal(update, table), seal) else None

    def _lost(self, path: Path, reason: str) -> None:
        self.notice("residual-lost", f"{path}: {reason}; what rounding cut off the last update is not made up for")


class ResidualReader:
    """Block by block; one that is damaged counts as zero."""

    def __init__(self, descriptor: int, table: bytes) -> None:
        self._descriptor, self._table = descriptor, table
        self._block: FloatBlock = np.empty(BLOCK_ELEMENTS, dtype=np.float32)
        self.damaged = 0

    def add_to(self, values: FloatBlock, begin: int) -> None:
        """Add what belongs to `values`, which is the block from element `begin` on."""
        block = self._block[: len(values)]
        data = block.data.cast("B")
        index = begin // BLOCK_ELEMENTS
        try:
            whole = os.preadv(self._descriptor, [data], 4 * begin) == len(data)
        except OSError:
            whole = False
        if whole and compare_digest(
            blake3(data).digest(), self._table[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        ):
            np.add(values, block, out=values)
        else:
            self.damaged += 1


class ResidualWriter:
    """No method raises for what the disk does: the update goes out without a residual."""

    def __init__(self, residuals: Residuals) -> None:
        self._residuals = residuals
        self._writer: VectorWriter | None = None

    def open(self) -> None:
        self._writer = VectorWriter(self._residuals.part, BLOCK_BYTES)

    def write(self, block: FloatBlock) -> None:
        if self._writer is not None:
            with self.or_without():
                self._writer.write(block)

    def keep_for(self, update: Digest) -> None:
        """From now on it is that of `update`: after a kill at any instant, the whole of it or none."""
        if self._writer is not None:
            with self.or_without():
                table = b"".join(self._writer.manifest(self._residuals.layout).chunk_digests)
                self._writer.finish(table + self._residuals.seal(update, table))
                os.replace(self._residuals.part, self._residuals.of(update))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @contextmanager
    def or_without(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            with suppress(OSError):
                self._residuals.part.unlink(missing_ok=True)
            self._residuals.notice(
                "residual-not-written",
                f"{self._residuals.part} cannot be written ({error.strerror}): what rounding cuts off this update "
                "is not made up for; free some space",
            )
