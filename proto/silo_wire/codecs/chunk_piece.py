"""The pieces of a transfer as bytes: protobuf's own encoding of `ModelPiece` and `UpdatePiece`, without protobuf's
copies.

Nearly all that crosses the wire is chunks of 1 MiB, and protobuf's library copies each twice on either side. Both
messages are a oneof of headers and `chunk` = 2, and a Chunk is `index` = 1 and `data` = 2 (federation.proto,
common.proto), so one small reader and writer serve both. What the reader does not take for a chunk in its one shortest
form goes to protobuf, which has the last word.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from silo_wire.v1 import federation_pb2

_CHUNK: Final = 0x12  # field 2, length-delimited: `chunk` of a piece, and `data` of a chunk
_INDEX: Final = 0x08  # field 1, varint: `index` of a chunk
_DATA: Final = 0x12
_MAX_INDEX: Final = (1 << 32) - 1
HEAD_BYTES: Final = 16
"""Bytes of a piece before its data. Numbers in them are padded to this size, so that the floats of a received message
are aligned and are computed with in place; protobuf reads a padded number as any other."""

Piece = TypeVar("Piece", federation_pb2.ModelPiece, federation_pb2.UpdatePiece)


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """One chunk on its way; `data` is a view of the message that brought it."""

    index: int
    data: bytes | memoryview


def chunk_piece(index: int, data: bytes | bytearray | memoryview) -> bytes:
    """A piece that holds chunk `index`, 0 to 2**32 - 1, with at most 2**28 - 1 - HEAD_BYTES bytes of data."""
    size = len(data)
    chunk = 1 + 5 + 1 + 4 + size  # index and data, each after its tag
    head = (bytes((_CHUNK,)), _varint(chunk, 4), bytes((_INDEX,)), _varint(index, 5), bytes((_DATA,)), _varint(size, 4))
    return b"".join((*head, data))


def reader(kind: type[Piece]) -> Callable[[bytes], "Piece | ChunkPiece"]:
    """What parses a serialised piece; raises google.protobuf.message.DecodeError for bytes that are none.

    A piece that it returns holds a header or nothing: chunks come as ChunkPiece.
    """

    def read(raw: bytes) -> "Piece | ChunkPiece":
        chunk = _chunk_of(raw)
        if chunk is not None:
            return chunk
        piece = kind.FromString(raw)
        if piece.WhichOneof("piece") == "chunk":
            return ChunkPiece(piece.chunk.index, piece.chunk.data)
        return piece

    return read


def write(piece: "federation_pb2.ModelPiece | federation_pb2.UpdatePiece | bytes") -> bytes:
    """A header piece, or what `chunk_piece` made, as bytes."""
    return piece if isinstance(piece, bytes) else piece.SerializeToString()


def _varint(value: int, width: int) -> bytes:
    """`value` in `width` bytes, all but the last of which say that more follow."""
    encoded = [value >> shift & 0x7F | 0x80 for shift in range(0, 7 * width, 7)]
    encoded[-1] &= 0x7F
    return bytes(encoded)


def _chunk_of(raw: bytes) -> ChunkPiece | None:
    """The chunk, if `raw` is exactly what `chunk_piece` writes."""
    try:
        if raw[0] != _CHUNK:
            return None
        length, at = _read_varint(raw, 1)
        if at + length != len(raw):
            return None
        index = 0
        if raw[at] == _INDEX:
            index, at = _read_varint(raw, at + 1)
        if raw[at] != _DATA or index > _MAX_INDEX:
            return None
        length, at = _read_varint(raw, at + 1)
    except IndexError:
        return None
    return ChunkPiece(index, memoryview(raw)[at:]) if at + length == len(raw) else None


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """Value, and where the next byte is; at most five bytes are looked at, which is all that 32 bits need."""
    value = 0
    for shift in range(0, 35, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError
