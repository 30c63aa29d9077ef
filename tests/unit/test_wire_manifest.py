"""Flat vectors: chunks, digests, and what a peer may not get away with."""

import itertools

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import IntegrityError, MalformedMessage
from silo_wire.canonical import Digest
from silo_wire.manifest import Layout, Manifest, TensorSpec, manifest_of, masked_layout


def layout_of(elements: int) -> Layout:
    return Layout("float32", (TensorSpec("a", (elements,)),))


def test_offsets_follow_the_order_of_names() -> None:
    layout = Layout("float32", (TensorSpec("a", (2, 3)), TensorSpec("b", ()), TensorSpec("c", (4,))))
    assert [(tensor.name, position) for tensor, position in layout.placed()] == [("a", 0), ("b", 6), ("c", 7)]
    assert layout.parameters == 11
    assert layout.total_bytes == 44
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"dtype":"float64","tensors":[["a",[1]]]}',
        b'{"dtype":"uint32","tensors":[["masked",[1]]]}',
        b'{"dtype":["float32"],"tensors":[["a",[1]]]}',
        b'{"dtype":"float32","tensors":[]}',
        b'{"dtype":"float32","tensors":[["b",[1]],["a",[1]]]}',
        b'{"dtype":"float32","tensors":[["a",[1]],["a",[1]]]}',
        b'{"dtype":"float32","tensors":[["a",[0]]]}',
        b'{"dtype":"float32","tensors":[["a",[-1]]]}',
        b'{"dtype":"float32","tensors":[["a",[true]]]}',
        b'{"dtype":"float32","tensors":[["a",[1.5]]]}',
        b'{"dtype":"float32","tensors":[["a",[1099511627776]]]}',
        b'{"dtype":"float32","tensors":[["a"]]}',
        b'{"dtype":"float32","tensors":[["a",[1]]],"more":1}',
        b"[" * 100_000,
    ],
)
def test_layouts_that_no_coordinator_writes_are_refused(raw: bytes) -> None:
    with pytest.raises(MalformedMessage):
        Layout.from_json(raw)


@given(elements=st.integers(1, 300), chunk=st.integers(1, 200), cuts=st.lists(st.integers(0, 1200), max_size=8))
def test_manifest_does_not_depend_on_how_the_vector_arrives(elements: int, chunk: int, cuts: list[int]) -> None:
    data = bytes(index % 251 for index in range(elements * 4))
    edges = sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    blocks = [data[a:b] for a, b in itertools.pairwise(edges)]
    manifest = manifest_of(layout_of(elements), blocks, chunk)
    expected = tuple(blake3(data[i : i + chunk]).digest() for i in range(0, len(data), chunk))
    assert manifest.chunk_digests == expected
    for index in range(manifest.chunks):
        manifest.check_chunk(index, data[index * chunk : (index + 1) * chunk])


def test_vector_of_another_length_is_refused() -> None:
    with pytest.raises(IntegrityError, match="8 bytes was given for a layout of 12 bytes"):
        manifest_of(layout_of(3), [bytes(8)])


def test_digest_covers_every_part() -> None:
    base = manifest_of(layout_of(4), [bytes(16)], 8)
    others = [
        manifest_of(layout_of(4), [bytes(15) + b"\1"], 8),
        manifest_of(layout_of(4), [bytes(16)], 16),
        Manifest(Digest("0" * 64), 16, 8, base.chunk_digests),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 4


def test_chunks_that_were_truncated_replaced_or_moved_are_refused() -> None:
    data = bytes(range(40))
    manifest = manifest_of(layout_of(10), [data], 16)
    with pytest.raises(MalformedMessage, match="chunk 0 has 15 bytes"):
        manifest.check_chunk(0, data[:15])
    with pytest.raises(IntegrityError, match="chunk 0"):
        manifest.check_chunk(0, data[16:32])
    with pytest.raises(IntegrityError, match="chunk 1"):
        manifest.check_chunk(1, data[:16])
    with pytest.raises(MalformedMessage, match="outside"):
        manifest.check_chunk(3, data[:8])
    with pytest.raises(MalformedMessage, match="outside"):
        manifest.check_chunk(-1, data[:16])
    manifest.check_chunk(2, data[32:])


@pytest.mark.parametrize(
    ("total", "chunk", "digests"),
    [(0, 4, 0), (16, 0, 1), (16, 5 << 20, 1), (16, 8, 1), (16, 8, 3), (1 << 41, 1 << 20, 1 << 21)],
)
def test_manifests_with_impossible_sizes_are_refused(total: int, chunk: int, digests: int) -> None:
    with pytest.raises(MalformedMessage):
        Manifest(Digest("0" * 64), total, chunk, (bytes(32),) * min(digests, 10))


def test_manifest_of_another_model_shape_is_refused() -> None:
    manifest = manifest_of(layout_of(4), [bytes(16)])
    with pytest.raises(MalformedMessage, match="wrong model shape"):
        manifest.check_layout(layout_of(5))
    manifest.check_layout(layout_of(4))


def test_a_masked_vector_has_a_layout_of_its_own() -> None:
    layout = masked_layout(5)
    assert (layout.dtype, layout.item_bytes, layout.total_bytes) == ("uint32", 4, 20)
    manifest = manifest_of(layout, [bytes(20)], 8)
    manifest.check_layout(masked_layout(5))
    for other in (masked_layout(6), layout_of(5), Layout("float32", layout.tensors)):
        with pytest.raises(MalformedMessage, match="wrong model shape"):
            manifest.check_layout(other)


@pytest.mark.parametrize("words", [-1, 0, (1 << 38) + 1, 1 << 62])
def test_masked_vectors_of_impossible_lengths_are_refused(words: int) -> None:
    with pytest.raises(MalformedMessage):
        masked_layout(words)
