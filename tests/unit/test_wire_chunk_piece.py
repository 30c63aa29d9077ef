"""Chunks as bytes: what protobuf writes is read, what is written protobuf reads, and nothing is read that protobuf
would not."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from silo_wire.codecs.chunk_piece import HEAD_BYTES, ChunkPiece, chunk_piece, reader, write
from silo_wire.v1 import common_pb2, federation_pb2

KINDS = (federation_pb2.ModelPiece, federation_pb2.UpdatePiece)
indices = st.one_of(
    st.sampled_from([0, 1, 127, 128, 16383, 16384, (1 << 32) - 1]), st.integers(min_value=0, max_value=(1 << 32) - 1)
)
data = st.binary(max_size=300)


def by_protobuf(kind: type, index: int, content: bytes) -> bytes:
    return bytes(kind(chunk=common_pb2.Chunk(index=index, data=content)).SerializeToString(deterministic=True))


def summary(piece: object) -> tuple[str, int, bytes] | bytes:
    if isinstance(piece, ChunkPiece):
        return ("chunk", piece.index, bytes(piece.data))
    return piece.SerializeToString(deterministic=True)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("kind", KINDS)
@given(index=indices, content=data)
def test_a_chunk_is_read_as_protobuf_wrote_it(kind: type, index: int, content: bytes) -> None:
    assert summary(reader(kind)(by_protobuf(kind, index, content))) == ("chunk", index, content)


@pytest.mark.parametrize("kind", KINDS)
@given(index=indices, content=data)
def test_a_chunk_that_is_written_is_one_that_protobuf_reads(kind: type, index: int, content: bytes) -> None:
    written = chunk_piece(index, memoryview(content))
    piece = kind.FromString(written)  # type: ignore[attr-defined]
    assert (piece.WhichOneof("piece"), piece.chunk.index, piece.chunk.data) == ("chunk", index, content)
    assert piece.ByteSize() <= len(written)
    assert written[HEAD_BYTES:] == content


@pytest.mark.parametrize("index", [0, 127, 128, 20_000, (1 << 32) - 1])
def test_the_data_of_a_message_lies_where_floats_can_be_computed_with(index: int) -> None:
    piece = reader(federation_pb2.UpdatePiece)(chunk_piece(index, bytes(1 << 20)))
    assert isinstance(piece, ChunkPiece)
    assert np.frombuffer(piece.data, "<f4").flags.aligned


def test_a_chunk_of_4_mebibytes_is_a_view_of_its_message() -> None:
    content = bytes(range(256)) * (4 << 12)
    piece = reader(federation_pb2.ModelPiece)(chunk_piece(7, content))
    assert isinstance(piece, ChunkPiece)
    assert isinstance(piece.data, memoryview)
    assert piece.data == content


@pytest.mark.parametrize("kind", KINDS)
@given(raw=st.binary(max_size=40))
def test_any_bytes_are_read_as_protobuf_reads_them(kind: type, raw: bytes) -> None:
    try:
        expected = kind.FromString(raw)  # type: ignore[attr-defined]
    except DecodeError:
        with pytest.raises(DecodeError):
            reader(kind)(raw)
        return
    chunk = expected.chunk
    same = ("chunk", chunk.index, chunk.data) if expected.WhichOneof("piece") == "chunk" else None
    assert summary(reader(kind)(raw)) == (same or expected.SerializeToString(deterministic=True))


@pytest.mark.parametrize("kind", KINDS)
@given(index=indices, content=data, at=st.integers(min_value=0), flip=st.integers(min_value=1, max_value=255))
def test_a_chunk_with_one_byte_changed_is_read_as_protobuf_reads_it(
    kind: type, index: int, content: bytes, at: int, flip: int
) -> None:
    raw = bytearray(by_protobuf(kind, index, content))
    raw[at % len(raw)] ^= flip
    try:
        expected = kind.FromString(bytes(raw))  # type: ignore[attr-defined]
    except DecodeError:
        with pytest.raises(DecodeError):
            reader(kind)(bytes(raw))
        return
    if expected.WhichOneof("piece") == "chunk":
        assert summary(reader(kind)(bytes(raw))) == ("chunk", expected.chunk.index, expected.chunk.data)
    else:
        assert summary(reader(kind)(bytes(raw))) == expected.SerializeToString(deterministic=True)


def test_headers_are_protobufs_own() -> None:
    header = federation_pb2.ModelPiece(header=federation_pb2.ModelHeader(round=3, signature=b"s"))
    assert reader(federation_pb2.ModelPiece)(write(header)) == header
    masked = federation_pb2.UpdatePiece(masked=federation_pb2.MaskedHeader(first_chunk=3))
    assert reader(federation_pb2.UpdatePiece)(write(masked)) == masked
    assert write(b"ready-made") == b"ready-made"
