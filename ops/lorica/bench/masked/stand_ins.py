"""Vectors in the place of those that are not masked one by one: one with what they come to, the others of zeros.

The sum of several silos' masked vectors is made in one pass, by the encoder and the streams that each of them would
use, under its own keys and rounding. Masks among them cancel; they are left out, which is all that is saved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np

from lorica.bench.masked.deltas import Deltas
from lorica_coordinator.vectors.stored_vector import StoredVector
from lorica_security.host.file_mark import FileMark
from lorica_security.secure_aggregation.masked_vectors import fixed_point, mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import Encoder, FloatBlock
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, MaskSum, Words
from lorica_security.secure_aggregation.silo.effects import MaskVector
from silo_agent.training.model.vector_file import VectorWriter, new_vector_file
from silo_agent.training.update.masked_vector import KeptDelta
from silo_wire.manifest import CHUNK_BYTES, Layout, manifest_of, masked_layout

BLOCK = 1 << 17
"""Elements: what stays in cache."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A silo, counted from 0, whose vector is part of a sum."""

    silo: int
    work: MaskVector


def blocks(elements: int) -> Iterator[tuple[int, int]]:
    for first in range(0, elements, BLOCK):
        yield first, min(first + BLOCK, elements)


def write_delta(path: Path, deltas: Deltas, silo: int, layout: Layout) -> KeptDelta:
    """As training leaves it."""
    values: FloatBlock = np.zeros(BLOCK, dtype="<f4")
    with new_vector_file(path) as writer:
        for first, last in blocks(deltas.elements):
            deltas.read(silo, values[: last - first], first)
            writer.write(values[: last - first])
        manifest = writer.manifest(layout)
        return KeptDelta(file=path, manifest=manifest, mark=_closed(writer))


def write_sum(path: Path, deltas: Deltas, several: Sequence[Encoded]) -> StoredVector:
    """The sum mod 2^32 of the masked vectors of `several`, whose masks are then erased."""
    point = several[0].work.fixed_point
    masks = net_masks([one.work.masks for one in several])
    encoders = [
        Encoder(fixed_point=point, weight=deltas.weights[one.silo], rounding=one.work.rounding) for one in several
    ]
    saturated = [0] * len(several)
    encoding, masking = fixed_point.Workspace(), mask_stream.Workspace()
    values: FloatBlock = np.zeros(BLOCK, dtype="<f4")
    words: Words = np.zeros(BLOCK, dtype="<u4")
    total: Words = np.zeros(BLOCK, dtype="<u4")
    with new_vector_file(path) as writer:
        for first, last in blocks(deltas.elements):
            size = last - first
            total.fill(0)
            for place, (one, encoder) in enumerate(zip(several, encoders, strict=True)):
                deltas.read(one.silo, values[:size], first)
                saturated[place] += encoder.encode(words[:size], values[:size], first, encoding)
                np.add(total[:size], words[:size], out=total[:size])
            masks.apply(total[:size], first, masking)
            writer.write(total[:size])
        tail: Words = sum(
            (encoder.encode_tail(count, encoding) for encoder, count in zip(encoders, saturated, strict=True)),
            start=np.zeros(fixed_point.EXTRA_WORDS, dtype="<u4"),
        )
        masks.apply(tail, deltas.elements, masking)
        writer.write(tail)
        manifest = writer.manifest(masked_layout(point.words))
        mark = _closed(writer)
    for one in several:
        one.work.erase()
    return StoredVector(path, 0, manifest, mark)


def write_zeros(path: Path, words: int) -> StoredVector:
    """A file that takes no room on the disk; it is in the kernel's memory, as what was just received is."""
    layout = masked_layout(words)
    whole, rest = divmod(layout.total_bytes, CHUNK_BYTES)
    manifest = manifest_of(layout, [*repeat(bytes(CHUNK_BYTES), whole), bytes(rest)])
    with path.open("w+b", buffering=0) as file:
        file.truncate(layout.total_bytes)
        mark = FileMark.of(file.fileno())
        block = bytearray(CHUNK_BYTES)
        while file.readinto(block):
            pass
    return StoredVector(path, 0, manifest, mark)


def net_masks(several: Sequence[MaskSum]) -> MaskSum:
    """What the masks of several silos come to: a stream that one adds and another subtracts is in neither."""
    added = _by_key(stream for masks in several for stream in masks.added)
    subtracted = _by_key(stream for masks in several for stream in masks.subtracted)
    return MaskSum(
        added=tuple(stream for key, stream in added.items() if key not in subtracted),
        subtracted=tuple(stream for key, stream in subtracted.items() if key not in added),
    )


def _by_key(streams: Iterator[KeyStream]) -> dict[bytes, KeyStream]:
    return {bytes(stream.key.buffer): stream for stream in streams}


def _closed(writer: VectorWriter) -> FileMark:
    writer.finish()
    return writer.sync()
