"""Flat vectors: parameter order, chunks and their digests.

A model or an update travels as one little-endian vector: the tensors of a Layout, sorted by name, each in row-major
order, without gaps. Aliases of a tied parameter appear once, under the name that comes first in that order. The vector
is cut into chunks of `chunk_bytes` (the last may be shorter); a Manifest lists the digest of each. Its own digest
covers the layout, the sizes and every chunk digest, so it stands for the whole content. A masked update is such a
vector too, of one tensor of 32-bit words (`masked_layout`). Numbers in int8 stand in blocks with a scale each
(int8_vectors/sizes.py).
"""

import hmac
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, get_args

from blake3 import blake3

from lorica_security.errors import IntegrityError, MalformedMessage
from silo_wire.canonical import DIGEST_BYTES, Digest, canonical_json, digest_of
from silo_wire.int8_vectors.sizes import BLOCK_BYTES, bytes_of

CHUNK_BYTES = 1 << 20
"""Small enough for gRPC's default limit of 4 MiB, large enough that what each message costs hardly shows."""
MAX_CHUNK_BYTES = 4 << 20
MAX_TENSORS = 100_000
MAX_NAME_CHARACTERS = 500
MAX_DIMENSIONS = 16
MAX_TOTAL_BYTES = 1 << 40

ParameterDtype = Literal["float32", "bfloat16"]
"""What models travel in, and updates."""
UpdateDtype = Literal["float32", "bfloat16", "int8"]
"""What updates travel in."""
Dtype = UpdateDtype | Literal["uint32"]
"""What a flat vector can hold: parameters, or the words of a masked update."""
ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "int8": 1, "uint32": 4}
"""Of one number; in int8 each block has its scale beside them."""
MASKED_TENSOR = "masked"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The canonical parameter order of a model, or the one tensor of a masked update; `tensors` strictly ascending by
    name."""

    dtype: Dtype
    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise MalformedMessage(f"layout dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        if not 1 <= len(self.tensors) <= MAX_TENSORS:
            raise MalformedMessage(f"layout has {len(self.tensors)} tensors, allowed are 1 to {MAX_TENSORS}")
        previous = ""
        for tensor in self.tensors:
            if len(tensor.name) > MAX_NAME_CHARACTERS or not tensor.name.isprintable():
                raise MalformedMessage(
                    f"layout tensor name {tensor.name[:80]!r} is not one of at most {MAX_NAME_CHARACTERS} printable "
                    "characters"
                )
            if tensor.name <= previous:
                raise MalformedMessage(f"layout tensor {tensor.name!r} is out of order or named twice: sort by name")
            if len(tensor.shape) > MAX_DIMENSIONS:
                raise MalformedMessage(
                    f"layout tensor {tensor.name!r} has {len(tensor.shape)} dimensions, allowed are {MAX_DIMENSIONS}"
                )
            if any(type(size) is not int or not 1 <= size <= MAX_TOTAL_BYTES for size in tensor.shape):
                raise MalformedMessage(
                    f"layout tensor {tensor.name!r} has a shape whose sizes are not 1 to {MAX_TOTAL_BYTES}"
                )
            previous = tensor.name
        if self.total_bytes > MAX_TOTAL_BYTES:
            raise MalformedMessage(f"layout has {self.total_bytes} bytes, allowed are {MAX_TOTAL_BYTES}")

    @cached_property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def unit_bytes(self) -> int:
        """The fewest that can be read by themselves: a number, in int8 a block. Chunks are multiples of them."""
        return BLOCK_BYTES if self.dtype == "int8" else self.item_bytes

    @property
    def chunk_bytes(self) -> int:
        """Of the chunks that vectors of this layout are cut into by those who make them: CHUNK_BYTES, or the most below
        it that can be read by themselves."""
        return CHUNK_BYTES - CHUNK_BYTES % self.unit_bytes

    def as_type(self, dtype: UpdateDtype) -> "Layout":
        """The same tensors as numbers of another type."""
        return self if dtype == self.dtype else Layout(dtype, self.tensors)

    @property
    def total_bytes(self) -> int:
        return bytes_of(self.parameters) if self.dtype == "int8" else self.parameters * self.item_bytes

    def placed(self) -> Iterator[tuple[TensorSpec, int]]:
        """Each tensor with the index of its first element in the flat vector."""
        position = 0
        for tensor in self.tensors:
            yield tensor, position
            position += tensor.elements

    def to_json(self) -> bytes:
        return canonical_json({"dtype": self.dtype, "tensors": [[t.name, list(t.shape)] for t in self.tensors]})

    @classmethod
    def from_json(cls, raw: bytes) -> "Layout":
        """Parse `to_json`'s output for the layout of a model; raises MalformedMessage for anything else."""
        try:
            value = json.loads(raw)
            if set(value) != {"dtype", "tensors"}:
                raise MalformedMessage(f"layout has the keys {sorted(value)}, expected dtype and tensors")
            if value["dtype"] not in get_args(ParameterDtype):
                raise MalformedMessage(
                    f"layout dtype {str(value['dtype'])[:80]!r} is not one of {', '.join(get_args(ParameterDtype))}"
                )
            tensors = tuple(TensorSpec(_text(name), tuple(shape)) for name, shape in value["tensors"])
            return cls(value["dtype"], tensors)
        except (ValueError, TypeError, RecursionError) as error:
            raise MalformedMessage(f"layout does not parse: {error}") from error

    @cached_property
    def digest(self) -> Digest:
        return digest_of(self.to_json())


def masked_layout(words: int) -> Layout:
    """Of a masked update of `words` 32-bit words; raises MalformedMessage for none, or for too many."""
    return Layout("uint32", (TensorSpec(MASKED_TENSOR, (words,)),))


SCORES_ALONE = Layout("float32", (TensorSpec("scores_alone", (1,)),))
"""The layout of a delta in a closing round, where silos send scores and do not train: one coordinate, which is 0."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a tensor's name is no text")
    return value


@dataclass(frozen=True)
class Manifest:
    """What a flat vector consists of; checked against its Layout before a byte is accepted."""

    layout_digest: Digest
    total_bytes: int
    chunk_bytes: int
    chunk_digests: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.total_bytes <= MAX_TOTAL_BYTES:
            raise MalformedMessage(f"manifest total_bytes is {self.total_bytes}, allowed are 1 to {MAX_TOTAL_BYTES}")
        if not 1 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise MalformedMessage(f"manifest chunk_bytes is {self.chunk_bytes}, allowed are 1 to {MAX_CHUNK_BYTES}")
        expected = -(-self.total_bytes // self.chunk_bytes)
        if len(self.chunk_digests) != expected:
            raise MalformedMessage(
                f"manifest has {len(self.chunk_digests)} chunk digests, its sizes ask for {expected}"
            )
        if any(len(digest) != DIGEST_BYTES for digest in self.chunk_digests):
            raise MalformedMessage(f"manifest has a chunk digest that is not {DIGEST_BYTES} bytes long")

    @property
    def chunks(self) -> int:
        return len(self.chunk_digests)

    def chunk_size(self, index: int) -> int:
        """Bytes of chunk `index`; raises MalformedMessage for an index outside the vector."""
        if not 0 <= index < self.chunks:
            raise MalformedMessage(f"chunk {index} is outside the {self.chunks} chunks of its manifest")
        return min(self.chunk_bytes, self.total_bytes - index * self.chunk_bytes)

    def check_chunk(self, index: int, data: bytes | memoryview) -> None:
        """Raise unless `data` is exactly chunk `index`: MalformedMessage for its size, IntegrityError for its
        content."""
        self.check_chunk_size(index, data)
        if not hmac.compare_digest(blake3(data).digest(), self.chunk_digests[index]):
            raise IntegrityError(f"chunk {index} does not have the digest in its manifest: it was damaged or replaced")

    def check_chunk_size(self, index: int, data: bytes | memoryview) -> None:
        """Raise MalformedMessage unless `data` is as long as chunk `index`."""
        if len(data) != self.chunk_size(index):
            raise MalformedMessage(f"chunk {index} has {len(data)} bytes, its manifest says {self.chunk_size(index)}")

    def check_layout(self, layout: Layout) -> None:
        """Raise MalformedMessage unless this manifest describes a vector of `layout`."""
        if self.layout_digest != layout.digest:
            raise MalformedMessage("manifest is for another layout than the plan's: wrong model shape")
        if self.total_bytes != layout.total_bytes:
            raise MalformedMessage(
                f"manifest total_bytes is {self.total_bytes}, the plan's layout has {layout.total_bytes}"
            )

    @cached_property
    def digest(self) -> Digest:
        return digest_of(
            canonical_json(
                {
                    "chunk_bytes": self.chunk_bytes,
                    "chunks": [digest.hex() for digest in self.chunk_digests],
                    "layout": self.layout_digest,
                    "total_bytes": self.total_bytes,
                }
            )
        )


class ChunkDigests:
    """The digest of each `chunk_bytes` of a stream that comes in pieces of any size."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._hasher, self._filled = blake3(), 0
        self.whole: list[bytes] = []
        self.total = 0

    def update(self, piece: memoryview) -> None:
        """`piece` as bytes, one after the other."""
        self.total += len(piece)
        while piece:
            taken = piece[: self._chunk_bytes - self._filled]
            self._hasher.update(taken)
            self._filled += len(taken)
            piece = piece[len(taken) :]
            if self._filled == self._chunk_bytes:
                self.close()

    def close(self) -> None:
        """End the chunk that is under way, if one is."""
        if self._filled:
            self.whole.append(self._hasher.digest())
            self._hasher, self._filled = blake3(), 0

    def manifest(self, layout: Layout) -> Manifest:
        """Of all that came; raises IntegrityError unless it is as long as a vector of `layout`."""
        self.close()
        if self.total != layout.total_bytes:
            raise IntegrityError(f"a vector of {self.total} bytes was given for a layout of {layout.total_bytes} bytes")
        return Manifest(layout.digest, self.total, self._chunk_bytes, tuple(self.whole))


def manifest_of(
    layout: Layout, blocks: Iterable[bytes | bytearray | memoryview], chunk_bytes: int | None = None
) -> Manifest:
    """The manifest of a vector that arrives as consecutive blocks of any size, in chunks of the layout's own size
    unless `chunk_bytes` says another; raises IntegrityError when the length is wrong."""
    digests = ChunkDigests(layout.chunk_bytes if chunk_bytes is None else chunk_bytes)
    for block in blocks:
        digests.update(memoryview(block).cast("B"))
    return digests.manifest(layout)
