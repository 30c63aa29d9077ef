"""Which part of an update each of a training's ranks writes, and how one manifest comes of all parts.

A part is whole chunks of the update and of the round model, so that each rank checks and digests its own chunks and no
byte is read or written twice. Where ranks hold shards each writes its own, which end anywhere in a chunk, and its part
is what it digests once all have written. A residual goes with its update from one end to the other: in bfloat16 and
int8, rank 0 writes it all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from silo_agent.rounds.update import BLOCK_ELEMENTS
from silo_agent.training.ranks.ranks import Ranks
from silo_wire.canonical import DIGEST_BYTES
from silo_wire.manifest import Layout, Manifest

_FLOAT32: Final = 4


def part_of(update: Layout, model: Manifest, model_item_bytes: int, ranks: Ranks) -> range:
    """The elements that this rank reads of the round model and writes of the update."""
    unit = _unit(update, model.chunk_bytes, model_item_bytes)
    if ranks.world == 1 or unit is None:
        return range(update.parameters if ranks.rank == 0 else 0)
    units = -(-update.parameters // unit)
    begin, end = (unit * (units * rank // ranks.world) for rank in (ranks.rank, ranks.rank + 1))
    return range(min(begin, update.parameters), min(end, update.parameters))


def _unit(update: Layout, model_chunk_bytes: int, model_item_bytes: int) -> int | None:
    """The fewest elements whose ends are those of chunks and blocks; None where one rank has to write it all."""
    if update.dtype != "float32" or model_chunk_bytes % model_item_bytes:
        return None
    return math.lcm(BLOCK_ELEMENTS, update.chunk_bytes // _FLOAT32, model_chunk_bytes // model_item_bytes)


@dataclass(frozen=True, slots=True)
class Joined:
    """`digests` of all chunks, and squared norms of all blocks."""

    digests: tuple[bytes, ...]
    squares: tuple[float, ...]


def joined(update: Layout, part: range, digests: Sequence[bytes], squares: Sequence[float], ranks: Ranks) -> Joined:
    """Of this rank's part and all others': every rank has the same afterwards."""
    if ranks.world == 1:
        return Joined(tuple(digests), tuple(squares))
    table = torch.zeros(-(-update.total_bytes // update.chunk_bytes), DIGEST_BYTES, dtype=torch.uint8)
    first = part.start * update.item_bytes // update.chunk_bytes
    for row, digest in enumerate(digests, first):
        table[row] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    norms = torch.zeros(-(-update.parameters // BLOCK_ELEMENTS), dtype=torch.float64)
    begin = part.start // BLOCK_ELEMENTS
    norms[begin : begin + len(squares)] = torch.tensor(squares, dtype=torch.float64)
    # Each row is of one rank, and 0 of the others: the sums are what that rank has.
    ranks.sum_on_host(table)
    ranks.sum_on_host(norms)
    return Joined(tuple(bytes(row.tolist()) for row in table), tuple(norms.tolist()))
