"""Local model minus round model, on its way into the file that will leave: one pass over blocks that stay in cache.

Each block is read, subtracted, given what earlier rounding cut off, measured, encoded, digested and written before the
next is looked at. What the round did not train is zero, without noise, whatever the silo: a sum of it tells nothing.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from lorica_security.errors import StateError
from lorica_security.host import files
from lorica_security.host.file_mark import FileMark
from silo_agent.rounds.update import (
    BLOCK_ELEMENTS,
    BitsBlock,
    FloatBlock,
    TrainingDiverged,
    bfloat16_bits,
    round_to_bfloat16,
    squared_norm,
)
from silo_agent.training.model.model import BoundParameters, bound_file
from silo_agent.training.model.vector_file import VectorReader, VectorWriter, blocks, new_piece_file, new_vector_file
from silo_agent.training.ranks.ranks import ALONE, Ranks
from silo_agent.training.update.float_steps import binade
from silo_agent.training.update.parts import joined
from silo_agent.training.update.residual import ResidualReader, Residuals, ResidualWriter
from silo_agent.training.update.spread import Spread
from silo_wire.canonical import Digest
from silo_wire.int8_vectors.rounding import Bytes, round_to_int8
from silo_wire.int8_vectors.sizes import MOST_SCALE, MOST_STEPS, bytes_of
from silo_wire.manifest import Dtype, Layout, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenUpdate:
    """`manifest` describes the file, which is on disk; `norm` is the L2 norm of what it holds, rounded as it is, which
    the coordinator measures as well."""

    manifest: Manifest
    norm: float
    mark: FileMark


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Where residuals are, and the update whose residual to begin with."""

    residuals: Residuals
    included: Digest | None


def write_update(
    path: Path,
    layout: Layout,
    *,
    parameters: BoundParameters,
    round_model: VectorReader,
    feedback: Feedback,
    spread: Spread | None = None,
    resting: Collection[str] = (),
    most: float = math.inf,
    part: range | None = None,
    ranks: Ranks = ALONE,
) -> WrittenUpdate:
    """Write the update that `parameters` make of `round_model` to `path`, of type and order of `layout`; zeros for the
    `resting`, which are named and whose residual is kept for a round that trains them.

    Where it is to be masked, `spread` is what numbers that are too much alike are spread by, and all have noise by
    within their own steps. In bfloat16 and int8 the residual of `feedback.included` is added first, and what rounding
    leaves is kept for the new update, unless that has a norm above `most`: the coordinator then scales the update down,
    and not what is kept, which one training that overshoots would make longer than all that follow.

    `ranks` each write their `part` of it, for which `round_model` reads that part and nothing else (parts.py), and all
    of them come to the same; None: the whole. Sharded ranks first tell each other, in that file, what they hold; their
    update is in float32.

    Raises TrainingDiverged for a value that is not finite or beyond the type's range, IntegrityError and StorageError
    for the round model's file, StorageError for the update's, AnotherRankFailed. After an error there is no file.
    """
    part = range(layout.parameters) if part is None else part
    if ranks.sharded:
        parameters = _gathered(path, layout, parameters, ranks)
    narrow = layout.dtype != "float32" and len(part) > 0
    squares: list[float] = []
    with ExitStack() as open_here:
        with ranks.all_or_none():
            writer = open_here.enter_context(new_vector_file(path, layout.chunk_bytes, part.start * layout.item_bytes))
            left = open_here.enter_context(feedback.residuals.written(begun_with=feedback.included)) if narrow else None
        encode = _float32_encoder(writer) if left is None else _NARROW[layout.dtype](writer, left)
        with (
            ranks.all_or_none(),
            round_model as reader,
            feedback.residuals.opened(feedback.included) if narrow else nullcontext() as earlier,
        ):
            for block in _deltas(parameters, layout, reader, earlier, spread, resting, part):
                squares.append(encode(block))
        written = _finished_together(writer, path, layout, part, squares, ranks)
        if left is not None and written.norm <= most:
            left.keep_for(written.manifest.digest)
    return written


def _gathered(path: Path, layout: Layout, parameters: BoundParameters, ranks: Ranks) -> BoundParameters:
    """What sharded `ranks` hold of the trained model, all of it: mapped from `path`, into which each has written its
    own, and where the update is then written over it.

    After an error there is no file.
    """
    if layout.dtype != "float32":
        raise StateError(f"an update in {layout.dtype} has residuals, which sharded ranks do not write")
    with ExitStack() as undone:
        undone.callback(path.unlink, missing_ok=True)
        with ranks.all_or_none(), new_piece_file(path, layout) as writer:
            for _, tensor, part in parameters.placed():
                writer.write(part.start, tensor.detach().view(-1).cpu().numpy())
        held = ranks.gathered(torch.tensor([sum(len(part) for part in parameters.held)]))
        if (written := sum(int(each) for each in held)) != layout.parameters:
            raise StateError(f"ranks wrote {written} of {layout.parameters} numbers of update {path}")
        with ranks.all_or_none():
            trained = bound_file(path, layout)
        undone.pop_all()
    return trained


def write_no_delta(path: Path, layout: Layout) -> WrittenUpdate:
    """Write zeros of `layout`, which is small, to `path`. Raises StorageError; after an error there is no file."""
    with new_vector_file(path) as writer:
        writer.write(np.zeros(layout.parameters, dtype=np.float32))
        return finished(writer, path, layout)


def finished(writer: VectorWriter, path: Path, layout: Layout, *, norm: float = 0.0) -> WrittenUpdate:
    """All of the update is written to `path`: have it on disk."""
    manifest = writer.manifest(layout)
    writer.finish()
    mark = writer.sync()
    files.sync_folder(path.parent)
    return WrittenUpdate(manifest=manifest, norm=norm, mark=mark)


def _finished_together(
    writer: VectorWriter, path: Path, layout: Layout, part: range, squares: Sequence[float], ranks: Ranks
) -> WrittenUpdate:
    """`part` of the update is written to `path`, and the others' as well: have it all on disk."""
    if ranks.world == 1:
        return finished(writer, path, layout, norm=math.sqrt(math.fsum(squares)))
    all_of_it = joined(layout, part, writer.chunk_digests(), squares, ranks)
    norm = math.sqrt(math.fsum(all_of_it.squares))
    manifest = Manifest(layout.digest, layout.total_bytes, layout.chunk_bytes, all_of_it.digests)
    with ranks.all_or_none():
        if part.stop == layout.parameters and len(part):
            writer.finish()
        writer.sync()
        files.sync_folder(path.parent)
    return WrittenUpdate(manifest=manifest, norm=norm, mark=writer.mark())


@dataclass(frozen=True, slots=True)
class _Block:
    """Of the update, from element `begin` on, with its squared norm, and the residual of each part of it that rests,
    which is zero in it."""

    begin: int
    values: FloatBlock
    square: float
    resting: Sequence[tuple[FloatBlock, FloatBlock]]


def _deltas(
    parameters: BoundParameters,
    layout: Layout,
    round_model: VectorReader,
    residual: ResidualReader | None,
    spread: Spread | None,
    resting: Collection[str],
    elements: range,
) -> Iterator[_Block]:
    """Finite blocks of local - round model + residual, spread, each in the memory of the one before: of `elements`."""
    memory: FloatBlock = np.empty(BLOCK_ELEMENTS, dtype=np.float32)
    sizes: FloatBlock = np.zeros(BLOCK_ELEMENTS if spread is not None else 0, dtype=np.float32)
    starts = dict(layout.placed())
    for begin, end in blocks(elements.stop, elements.start):
        values = memory[: end - begin]
        round_model.read([values])
        at = 0
        for _, local, part in parameters.beside(values, begin):
            own = local.cpu().numpy()
            if spread is not None:
                binade(own, part, out=sizes[at : at + len(part)])
                at += len(part)
            np.subtract(own, part, out=part)
        if residual is not None:
            residual.add_to(values, begin)
        if spread is not None:
            noise, at = spread.noise(sizes[: len(values)], begin), 0
            for spec, _, part in parameters.beside(values, begin):
                spread.over(part, begin + at, spec, starts[spec], noise[at : at + len(part)])
                at += len(part)
        rests = [part for spec, _, part in parameters.beside(values, begin) if spec.name in resting] if resting else []
        kept = [(part, part.copy()) for part in rests]
        for part in rests:
            part.fill(0)
        square = squared_norm(values)
        if not math.isfinite(square):
            raise TrainingDiverged(
                f"delta tensor {_first_not_finite(parameters, values, begin)} has values that are not finite: "
                "lower learning_rate in the plan"
            )
        yield _Block(begin, values, square, kept)
    round_model.checked()


def _first_not_finite(parameters: BoundParameters, values: FloatBlock, begin: int) -> str:
    return next(spec.name for spec, _, part in parameters.beside(values, begin) if not np.isfinite(part).all())


_Encode = Callable[[_Block], float]
"""Writes a block; the squared norm of what was written."""


def _float32_encoder(writer: VectorWriter) -> _Encode:
    def encode(block: _Block) -> float:
        writer.write(block.values)
        return block.square

    return encode


def _bfloat16_encoder(writer: VectorWriter, residual: ResidualWriter) -> _Encode:
    memory: FloatBlock = np.empty(BLOCK_ELEMENTS, dtype=np.float32)
    bits: BitsBlock = np.empty(BLOCK_ELEMENTS, dtype=np.uint16)

    def encode(block: _Block) -> float:
        values = block.values
        rounded = memory[: len(values)]
        round_to_bfloat16(values, rounded)
        np.subtract(values, rounded, out=values)
        if not np.isfinite(values).all():
            raise _too_large("bfloat16", "3.39e38")
        bfloat16_bits(rounded, bits[: len(values)])
        writer.write(bits[: len(values)])
        _keep(residual, block)
        return squared_norm(rounded)

    return encode


def _int8_encoder(writer: VectorWriter, residual: ResidualWriter) -> _Encode:
    memory: FloatBlock = np.empty(BLOCK_ELEMENTS, dtype=np.float32)
    out: Bytes = np.empty(bytes_of(BLOCK_ELEMENTS), dtype=np.uint8)

    def encode(block: _Block) -> float:
        values = block.values
        rounded, data = memory[: len(values)], out[: bytes_of(len(values))]
        if round_to_int8(values, data, rounded) > MOST_SCALE:
            raise _too_large("int8", f"{MOST_STEPS * MOST_SCALE:.2e}")
        np.subtract(values, rounded, out=values)
        writer.write(data)
        _keep(residual, block)
        return squared_norm(rounded)

    return encode


def _too_large(dtype: Dtype, most: str) -> TrainingDiverged:
    return TrainingDiverged(
        f"update has values that {dtype} cannot hold (above {most}): lower learning_rate in the plan"
    )


def _keep(residual: ResidualWriter, block: _Block) -> None:
    """What rounding cut off, which `block.values` are by now."""
    for part, carried in block.resting:
        part[:] = carried
    residual.write(block.values)


_NARROW: Final[Mapping[Dtype, Callable[[VectorWriter, ResidualWriter], _Encode]]] = {
    "bfloat16": _bfloat16_encoder,
    "int8": _int8_encoder,
}
