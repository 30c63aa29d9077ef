"""int8 on the wire: a block says what its bytes say and nothing else, whatever a peer writes into it."""

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.delta_source import FORMS, Int8Reader
from lorica_coordinator.edges.sums.reducers.reducer import spooled
from lorica_coordinator.vectors.stored_vector import StoredVector
from lorica_security.errors import IntegrityError, LoricaError, MalformedMessage
from silo_agent.edges.check.machine_checks import FREE_BYTES, check_disk, disk_need
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_wire.canonical import digest_of
from silo_wire.int8_vectors.blocks import Floats, as_floats, sum_of_squares
from silo_wire.int8_vectors.rounding import in_int8, round_to_int8
from silo_wire.int8_vectors.sizes import bytes_of, numbers_of
from silo_wire.manifest import CHUNK_BYTES, Layout, TensorSpec, manifest_of
from tests.support import int8_by_hand
from tests.support.coordinator_edges import A, chunk_of, round_key, update_header
from tests.support.federation_peer import small_bundle

LEAST_SCALE, MOST_SCALE = 2.0**-126, 2.0**120
MOST = 127 * MOST_SCALE


def numbers(seed: int, count: int, exponent: int, spread: int) -> Floats:
    """Of sizes that lie up to `spread` powers of two apart, with zeros among them."""
    generator = np.random.Generator(np.random.PCG64(seed))
    drawn = generator.standard_normal(count) * 2.0 ** (exponent - generator.integers(0, spread + 1, count))
    drawn[generator.random(count) < 0.1] = 0.0
    return np.clip(drawn, -MOST, MOST).astype(np.float32)


VECTORS = st.builds(
    numbers,
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 1023, 1024, 1025, 2048, 2500]),
    st.integers(-160, 125),
    st.integers(0, 20),
)
EDGES = (
    0.0,
    -0.0,
    2.0**-149,
    LEAST_SCALE,
    127 * LEAST_SCALE,
    126.99 * LEAST_SCALE,
    0.5,
    1.5,
    126.5,
    127.0,
    -MOST,
    MOST,
)


@given(VECTORS)
@example(np.array(EDGES, dtype=np.float32))
@example(np.array([-127.0, 0.5, 1.5, -2.5, 126.5], dtype=np.float32))
@example(np.array([126.99 * LEAST_SCALE, 100 * LEAST_SCALE], dtype=np.float32))
def test_bytes_are_those_that_are_written_by_hand_and_read_as_by_hand(values: Floats) -> None:
    data = in_int8(values)
    assert data == int8_by_hand.written(values)
    assert as_floats(data).tobytes() == int8_by_hand.read(data).tobytes()


@given(VECTORS)
@example(np.array(EDGES, dtype=np.float32))
@example(numbers(39489, 1024, 0, 0))
def test_what_travels_and_what_is_cut_off_add_up_exactly(values: Floats) -> None:
    rounded, out = np.empty_like(values), np.empty(bytes_of(len(values)), dtype=np.uint8)
    largest = round_to_int8(values, out, rounded)
    assert as_floats(out.tobytes()).tobytes() == rounded.tobytes()
    left = values - rounded
    assert np.array_equal(left.astype(np.float64), values.astype(np.float64) - rounded.astype(np.float64))
    assert largest <= MOST_SCALE
    for begin in range(0, len(values), 1024):
        block = slice(begin, begin + 1024)
        step = max(float(np.abs(values[block]).max()) / 127, 2 * LEAST_SCALE * 127)
        # A quotient of 127 at most, in float32, is off by 2^-18 at a tie.
        assert np.abs(left[block]).max() <= step / 2 * (1 + 2.0**-16)


@given(VECTORS)
def test_what_a_silo_writes_is_accepted_with_its_norm(values: Floats) -> None:
    data = in_int8(values)
    exact = math.fsum(float(value) ** 2 for value in int8_by_hand.read(data))
    assert sum_of_squares(data) == pytest.approx(exact, rel=1e-6)


def test_a_number_beyond_the_range_shows_in_the_largest_scale() -> None:
    values = np.array([1.0, 3.4e38], dtype=np.float32)
    assert round_to_int8(values, np.empty(6, dtype=np.uint8), np.empty_like(values)) > MOST_SCALE


# ---- what a peer may choose: every byte -----------------------------------------------------------------------------

HOSTILE_SCALES = (
    float("nan"), float("inf"), float("-inf"), -0.0, -1.0, -LEAST_SCALE, 2.0**-149, 2.0**-127,
    float(np.nextafter(np.float32(LEAST_SCALE), np.float32(0))),
    float(np.nextafter(np.float32(MOST_SCALE), np.float32(np.inf))), 3.4e38,
)  # fmt: skip


def block(scale: float, steps: Sequence[int]) -> bytes:
    return struct.pack("<f", scale) + struct.pack(f"<{len(steps)}b", *steps)


@pytest.mark.parametrize("scale", HOSTILE_SCALES)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_scale_that_is_none_is_refused(scale: float, place: int) -> None:
    blocks = [block(1.0, [1] * 1024), block(1.0, [1] * 1024), block(1.0, [1, 2, 3])]
    assert sum_of_squares(b"".join(blocks)) == 2048 + 14
    blocks[place] = block(scale, [0] * (len(blocks[place]) - 4))
    with pytest.raises(MalformedMessage, match="int8 block has the scale"):
        sum_of_squares(b"".join(blocks))


@pytest.mark.parametrize("place", [0, 1023, 1024, 1026])
def test_a_step_of_minus_128_is_refused(place: int) -> None:
    steps = [127, -127] * 512 + [127, -127, 0]
    assert sum_of_squares(block(1.0, steps[:1024]) + block(1.0, steps[1024:])) == 1026 * 127**2
    steps[place] = -128
    with pytest.raises(MalformedMessage, match=r"step of -128"):
        sum_of_squares(block(1.0, steps[:1024]) + block(1.0, steps[1024:]))


def test_beside_a_scale_of_0_steps_are_0() -> None:
    assert sum_of_squares(block(0.0, [0] * 5)) == 0.0
    with pytest.raises(MalformedMessage, match="scale 0 has steps other than 0"):
        sum_of_squares(block(0.0, [0, 0, 1]))


def test_a_slab_larger_than_a_read_holds_the_silos_numbers(tmp_path: Path) -> None:
    """A GPU takes 32 MiB at a time."""
    values = numbers(7, 700_001, 0, 4)
    data = in_int8(values)
    (tmp_path / "delta").write_bytes(data)
    layout = Layout("int8", (TensorSpec("a", (len(values),)),))
    reader = Int8Reader(A, StoredVector(tmp_path / "delta", 0, manifest_of(layout, [data])))
    read = np.empty(len(values), dtype=np.float32)
    for begin, end in ((0, 600_000), (600_000, len(values))):
        reader.read_into(memoryview(read[begin:end]).cast("B"))
    reader.close()
    assert np.array_equal(read, as_floats(data))


@pytest.mark.parametrize("place", [0, 1023, 1024])
def test_a_number_that_no_scale_holds_is_told_wherever_it_is(place: int) -> None:
    values = np.zeros(1025, dtype=np.float32)
    values[place] = 3.4e38
    largest = round_to_int8(values, np.empty(bytes_of(1025), dtype=np.uint8), np.empty_like(values))
    assert largest > MOST_SCALE


@pytest.mark.parametrize("rest", [1, 2, 3, 4])
def test_a_vector_that_ends_without_a_number_is_refused(rest: int) -> None:
    with pytest.raises(MalformedMessage, match=f"ends with {rest} bytes"):
        sum_of_squares(block(1.0, [1] * 1024) + bytes(rest))


@given(
    st.lists(st.tuples(st.binary(min_size=4, max_size=4), st.binary(min_size=1, max_size=6)), min_size=1, max_size=3),
    st.binary(max_size=8),
)
def test_whatever_bytes_come_they_are_refused_or_finite_numbers(parts: list[tuple[bytes, bytes]], rest: bytes) -> None:
    data = b"".join(scale + (steps * 1024)[:1024] for scale, steps in parts) + rest
    try:
        squares = sum_of_squares(data)
    except MalformedMessage:
        return
    assert math.isfinite(squares)
    values = as_floats(data)
    assert np.isfinite(values).all()
    assert in_int8(values) == int8_by_hand.written(values)
    assert math.isclose(squares, math.fsum(float(value) ** 2 for value in values), rel_tol=1e-6)


# ---- sizes ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 40))
def test_sizes_tell_how_many_numbers_there_are(count: int) -> None:
    assert numbers_of(bytes_of(count)) == count


def test_chunks_begin_where_blocks_do() -> None:
    layout = Layout("int8", (TensorSpec("a", (3000, 1000)),))
    assert (layout.unit_bytes, layout.total_bytes) == (1028, 3_000_000 + 4 * 2930)
    assert layout.chunk_bytes % 1028 == 0 <= CHUNK_BYTES - layout.chunk_bytes < 1028
    assert (
        Layout("float32", layout.tensors).chunk_bytes == Layout("bfloat16", layout.tensors).chunk_bytes == CHUNK_BYTES
    )
    assert manifest_of(layout, [bytes(layout.total_bytes)]).chunk_bytes == layout.chunk_bytes
    assert layout.as_type("float32").digest != layout.digest


def test_a_silo_has_room_for_what_it_keeps_of_rounding(tmp_path: Path) -> None:
    """Two models, an update, and two remainders in float32."""
    bundle = small_bundle(elements=2500, wire={"update": "int8"})
    assert bundle.update_bytes == 2500 + 3 * 4
    least = FREE_BYTES + 2 * 4 * 2500 + bundle.update_bytes + 2 * 4 * 2500
    folder = SiloFolder(tmp_path)
    check_disk(folder, disk_need(folder, 2, bundle), least)
    with pytest.raises(LoricaError, match="are needed"):
        check_disk(folder, disk_need(folder, 2, bundle), least - 1)


# ---- on the coordinator's disk --------------------------------------------------------------------------------------

LAYOUT = Layout("int8", (TensorSpec("a", (100, 50)), TensorSpec("b", (24,))))
KEY, BASE = round_key(digest_of(b"plan")), digest_of(b"model")
VALUES = numbers(3, LAYOUT.parameters, 0, 4)
DATA = in_int8(VALUES)
HEADER = update_header(KEY, BASE, LAYOUT, DATA, chunk_bytes=2 * 1028)


def committed(folder: Path, data: bytes = DATA) -> Spools:
    spools = Spools(folder)
    header = update_header(KEY, BASE, LAYOUT, data, chunk_bytes=2 * 1028)
    spool = spools.open(KEY, A, header, LAYOUT)
    for index in range(spool.held, header.manifest.chunks):
        spool.write(index, chunk_of(header, data, index))
    assert spool.commit() == pytest.approx(float(np.linalg.norm(int8_by_hand.read(data))), rel=1e-6)
    return spools


@pytest.fixture(scope="module")
def spools(tmp_path_factory: pytest.TempPathFactory) -> Spools:
    return committed(tmp_path_factory.mktemp("spools"))


@given(st.data())
def test_a_spool_is_the_same_numbers_however_it_is_read(spools: Spools, data: st.DataObject) -> None:
    fresh = data.draw(st.booleans(), label="after a restart")
    opened = Spools(spools._folder) if fresh else spools
    assert FORMS["int8"].open is Int8Reader
    reader = Int8Reader(A, spooled(opened, KEY, A, HEADER.manifest.digest))
    out = np.empty(LAYOUT.parameters, dtype=np.float32)
    left = out
    while len(left):
        taken = data.draw(st.sampled_from([len(left), 3000, 1025, 1024, 1023, 1000, 300]), label="next")
        piece, left = left[:taken], left[taken:]
        reader.read_into(piece.data.cast("B"))
    reader.close()
    assert out.tobytes() == int8_by_hand.read(DATA).tobytes()


def test_no_more_numbers_are_read_than_there_are(spools: Spools) -> None:
    reader = Int8Reader(A, spooled(spools, KEY, A, HEADER.manifest.digest))
    with pytest.raises(IntegrityError, match=f"5025 numbers are asked of an int8 delta of silo {A} that has 5024 left"):
        reader.read_into(np.empty(LAYOUT.parameters + 1, dtype=np.float32).data.cast("B"))
    reader.close()


@pytest.mark.parametrize("chunk_bytes", [1024, 1000, 4, 1027, 1028 * 2 + 4])
def test_chunks_that_split_a_block_are_refused(tmp_path: Path, chunk_bytes: int) -> None:
    header = update_header(KEY, BASE, LAYOUT, DATA, chunk_bytes=chunk_bytes)
    with pytest.raises(MalformedMessage, match=f"chunk_bytes {chunk_bytes}: use a multiple of 1028"):
        Spools(tmp_path).open(KEY, A, header, LAYOUT)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_is_taken_where_it_is_planned_and_nowhere_else(tmp_path: Path, dtype: str) -> None:
    planned = Layout("float32", LAYOUT.tensors).as_type("float32" if dtype == "float32" else "bfloat16")
    with pytest.raises(MalformedMessage, match="another layout than the plan's"):
        Spools(tmp_path).open(KEY, A, HEADER, planned)
    other = update_header(KEY, BASE, planned, bytes(planned.total_bytes), chunk_bytes=1028)
    with pytest.raises(MalformedMessage, match="another layout than the plan's"):
        Spools(tmp_path).open(KEY, A, other, LAYOUT)


@pytest.mark.parametrize("scale", HOSTILE_SCALES)
def test_a_hostile_block_never_reaches_the_spool(tmp_path: Path, scale: float) -> None:
    data = DATA[: 2 * 1028] + struct.pack("<f", scale) + DATA[2 * 1028 + 4 :]
    header = update_header(KEY, BASE, LAYOUT, data, chunk_bytes=2 * 1028)
    spool = Spools(tmp_path).open(KEY, A, header, LAYOUT)
    spool.write(0, chunk_of(header, data, 0))
    with pytest.raises(MalformedMessage, match=f"chunk 1 of the update of silo {A}: an int8 block has the scale"):
        spool.write(1, chunk_of(header, data, 1))
    assert spool.held == 1
    with pytest.raises(MalformedMessage, match="not complete"):
        spool.commit()


def test_after_a_restart_a_spool_goes_on_where_it_stopped(tmp_path: Path) -> None:
    spool = Spools(tmp_path).open(KEY, A, HEADER, LAYOUT)
    spool.write(0, chunk_of(HEADER, DATA, 0))
    spool.close()
    again = Spools(tmp_path)
    assert again.held(KEY, A, HEADER.manifest.digest, LAYOUT) == 1
    committed(tmp_path)
