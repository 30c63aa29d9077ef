"""The mean delta of masked vectors: their sum mod 2^32, unmasked and decoded, piece by piece.

What is added is the spool of each survivor and the mask streams that the protocol gave. Sums mod 2^32 do not depend on
their order, so the streams and spools are dealt out to as many threads as there are cores, the caller's among them, and
each makes a part of every piece; AES, numpy and the reading of files let go of the interpreter. What the parts come to
is the very same sum.

Memory is a few pieces for each thread, whatever the size of the model and the number of silos.
"""

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lorica_coordinator.service.unusable import UnusableUpdate
from lorica_coordinator.vectors.slab_buffers import SlabBuffer, SlabBuffers, ahead
from lorica_coordinator.vectors.stored_vector import StoredVector, VectorReader
from lorica_security.errors import IntegrityError, StorageError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.masked_vectors import mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import (
    EXTRA_WORDS,
    FixedPoint,
    SumTail,
    averaged,
    decode,
    decode_tail,
)
from lorica_security.secure_aggregation.masked_vectors.mask_stream import BLOCK_WORDS, MaskSum, Words

MOST_THREADS = 4
"""More of them would wait for the one that decodes."""
PIECE_WORDS = 2 * BLOCK_WORDS
"""512 KiB: a sum and what is added to it fit into the second-level cache together."""
_WORD = 4  # bytes

Spooled = tuple[SiloName, StoredVector]


@contextmanager
def blamed_on(silo: SiloName) -> Iterator[None]:
    """What goes wrong with a file inside is the fault of this silo's update."""
    try:
        yield
    except (IntegrityError, StorageError) as error:
        raise UnusableUpdate(silo, f"the committed update of silo {silo} cannot be used: {error}") from error


class SpoolReader:
    """The spool of one silo from its first byte to its last; raises UnusableUpdate naming the silo. `close` it."""

    def __init__(self, silo: SiloName, vector: StoredVector) -> None:
        self._silo = silo
        with blamed_on(silo):
            self._reader = VectorReader(vector)

    def read_into(self, buffer: memoryview) -> None:
        with blamed_on(self._silo):
            self._reader.read_into(buffer)

    def close(self) -> None:
        self._reader.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedVectors:
    """The survivors' masked vectors, and what takes the masks off their sum. The caller erases `masks`."""

    fixed_point: FixedPoint
    masks: MaskSum
    spools: Sequence[Spooled]

    def tail(self) -> SumTail:
        """What the words behind the delta say of the sum; raises UnusableUpdate."""
        return decode_tail(self.fixed_point, self.last_words())

    def last_words(self) -> Words:
        """The words behind the delta, of the sum; raises UnusableUpdate."""
        elements = self.fixed_point.ranges.elements
        total: Words = np.zeros(EXTRA_WORDS, dtype="<u4")
        for silo, vector in self.spools:
            with blamed_on(silo):
                total += np.frombuffer(_last_bytes(vector, EXTRA_WORDS * _WORD), dtype="<u4")
        workspace = mask_stream.Workspace()
        self.masks.apply(total, elements, workspace)
        workspace.erase()
        return total


class MeanReader:
    """The mean delta in float32, from its first element to its last, in slabs of `slab_elements`. `close` it.

    `weight_sum` is what the tail of `vectors` says, above zero. Raises UnusableUpdate naming the silo.
    """

    def __init__(
        self, vectors: MaskedVectors, *, weight_sum: float, slab_elements: int, threads: int | None = None
    ) -> None:
        ranges = vectors.fixed_point.ranges
        self._mean = averaged(vectors.fixed_point, weight_sum)
        pieces = tuple(_pieces(ranges.elements, slab_elements))
        self._left = iter(pieces)
        longest = max(last - first for first, last in pieces)
        cores = len(os.sched_getaffinity(0)) if threads is None else threads
        self._parts: list[Generator[SlabBuffer, None, None]] = []
        self._pools: list[SlabBuffers] = []
        with ExitStack() as opened:
            dealt = list(_dealt(vectors, min(cores, MOST_THREADS)))
            for spools, masks in dealt:
                readers = [opened.enter_context(closing(SpoolReader(*spool))) for spool in spools]
                pool = SlabBuffers(2, longest * _WORD, torch.device("cpu"))
                part = _part(pieces, readers, masks, pool)
                if len(self._parts) + 1 < len(dealt):  # the last one is for the thread that reads the mean
                    part = ahead(part, pool.close)
                self._parts.append(opened.enter_context(closing(part)))
                self._pools.append(pool)
            self._opened = opened.pop_all()

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer`, which is as long as the next slab."""
        out = np.frombuffer(buffer, dtype="<f4")
        while len(out):
            first, last = next(self._left)
            parts = [next(part) for part in self._parts]
            total, *others = (_words(part, last - first) for part in parts)
            for other in others:
                np.add(total, other, out=total)
            with np.errstate(over="ignore"):  # the step tells what leaves float32
                decode(self._mean, total, first, out[: last - first])
            for pool, part in zip(self._pools, parts, strict=True):
                pool.give(part)
            out = out[last - first :]

    def close(self) -> None:
        """May be repeated."""
        self._opened.close()


def _pieces(elements: int, slab_elements: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of each piece; none lies in two slabs."""
    for slab in range(0, elements, slab_elements):
        end = min(slab + slab_elements, elements)
        for first in range(slab, end, PIECE_WORDS):
            yield first, min(first + PIECE_WORDS, end)


def _dealt(vectors: MaskedVectors, threads: int) -> Iterator[tuple[list[Spooled], MaskSum]]:
    """What each of at most `threads` threads adds up: about as many of spools and streams together."""
    work: list[tuple[str, Any]] = [
        *(("spool", spool) for spool in vectors.spools),
        *(("added", stream) for stream in vectors.masks.added),
        *(("subtracted", stream) for stream in vectors.masks.subtracted),
    ]
    for thread in range(min(threads, len(work))):
        own = work[thread::threads]
        of_kind = {kind: [item for name, item in own if name == kind] for kind in ("spool", "added", "subtracted")}
        yield of_kind["spool"], MaskSum(tuple(of_kind["added"]), tuple(of_kind["subtracted"]))


def _part(
    pieces: Sequence[tuple[int, int]], readers: Sequence[SpoolReader], masks: MaskSum, pool: SlabBuffers
) -> Generator[SlabBuffer, None, None]:
    """What one thread's spools and streams come to, piece by piece."""
    workspace = mask_stream.Workspace()
    memory: Words = np.empty(max(last - first for first, last in pieces), dtype="<u4")
    try:
        opened = masks.opened(0, pieces[-1][1], workspace)
        for first, last in pieces:
            buffer = pool.take()
            total, more = _words(buffer, last - first), memory[: last - first]
            if not readers:
                total.fill(0)
            for index, reader in enumerate(readers):
                reader.read_into((more if index else total).view(np.uint8).data)
                if index:
                    np.add(total, more, out=total)
            opened.apply(total)
            yield buffer
    finally:
        workspace.erase()


def _words(buffer: SlabBuffer, count: int) -> Words:
    words: Words = buffer.host.numpy().view("<u4")[:count]
    return words


def _last_bytes(vector: StoredVector, size: int) -> bytes:
    """The vector's last bytes, of checked chunks."""
    manifest = vector.manifest
    first = (manifest.total_bytes - size) // manifest.chunk_bytes
    return b"".join(vector.chunk(index) for index in range(first, manifest.chunks))[-size:]
