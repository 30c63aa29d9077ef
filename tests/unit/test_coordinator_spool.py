"""Spools: chunks in order, checked, resumed after a crash, and refused when they are wrong."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.edges.spool import Spools
from security.errors import IntegrityError, MalformedMessage, StorageError
from silo_wire.canonical import digest_of
from silo_wire.manifest import Layout, TensorSpec
from silo_wire.messages import UpdateHeader
from tests.support.coordinator_edges import A, B, Vector, chunk_of, random_vector, round_key, update_header

LAYOUT = Layout("float32", (TensorSpec("a", (100, 10)), TensorSpec("b", (24,))))
KEY = round_key(digest_of(b"plan"))
BASE = digest_of(b"model")
DELTA = random_vector(LAYOUT, 1)
CHUNK = 1000


def header_of(delta: Vector, layout: Layout = LAYOUT, chunk_bytes: int = CHUNK) -> UpdateHeader:
    return update_header(KEY, BASE, layout, delta.tobytes(), chunk_bytes=chunk_bytes)


HEADER = header_of(DELTA)


@pytest.fixture
def spools(tmp_path: Path) -> Spools:
    return Spools(tmp_path / "spools")


def file_of(spools: Spools, suffix: str = ".delta") -> Path:
    return next(spools._folder.glob(f"*/*/{A}{suffix}"))


def fill(spools: Spools, count: int, header: UpdateHeader = HEADER, delta: Vector = DELTA) -> None:
    spool = spools.open(KEY, A, header, LAYOUT)
    for index in range(spool.held, count):
        spool.write(index, chunk_of(header, delta.tobytes(), index))
    spool.close()


def test_whole_update_is_committed_with_its_norm(spools: Spools) -> None:
    fill(spools, HEADER.manifest.chunks)
    spool = spools.open(KEY, A, HEADER, LAYOUT)
    norm = spool.commit()
    assert norm == pytest.approx(float(np.linalg.norm(DELTA.astype(np.float64))), rel=1e-12)
    assert spool.commit() == norm
    vector = spools.committed(KEY, A, HEADER.manifest.digest)
    assert vector.read(0, LAYOUT.total_bytes) == DELTA.tobytes()


def test_norm_of_three_and_four_is_five(spools: Spools) -> None:
    delta = np.zeros(LAYOUT.parameters, dtype="<f4")
    delta[0], delta[-1] = 3.0, -4.0
    fill(spools, HEADER.manifest.chunks, header_of(delta), delta)
    assert spools.open(KEY, A, header_of(delta), LAYOUT).commit() == 5.0


def test_upload_goes_on_where_it_stopped(spools: Spools) -> None:
    fill(spools, 2)
    assert spools.held(KEY, A, HEADER.manifest.digest) == 2
    again = Spools(spools._folder)
    spool = again.open(KEY, A, HEADER, LAYOUT)
    assert spool.held == 2
    for index in range(2, HEADER.manifest.chunks):
        spool.write(index, chunk_of(HEADER, DELTA.tobytes(), index))
    spool.commit()
    assert again.committed(KEY, A, HEADER.manifest.digest).read(0, LAYOUT.total_bytes) == DELTA.tobytes()


def test_half_written_chunk_is_cut_off_after_a_crash(spools: Spools) -> None:
    fill(spools, 3)
    with file_of(spools).open("ab") as file:
        file.write(b"half a chunk")
    assert spools.open(KEY, A, HEADER, LAYOUT).held == 3
    assert file_of(spools).stat().st_size == 3 * CHUNK


def test_chunk_that_never_reached_the_disk_is_asked_for_again(spools: Spools) -> None:
    """A power cut can leave a file of the right length with zeros in it."""
    fill(spools, 4)
    raw = bytearray(file_of(spools).read_bytes())
    raw[2 * CHUNK : 3 * CHUNK] = bytes(CHUNK)
    file_of(spools).write_bytes(raw)
    assert spools.held(KEY, A, HEADER.manifest.digest) == 2
    assert spools.open(KEY, A, HEADER, LAYOUT).held == 2


def test_killed_process_keeps_what_it_held(spools: Spools, tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from tests.unit.test_coordinator_spool import DELTA, HEADER, KEY, LAYOUT, A, chunk_of
from coordinator.edges.spool import Spools
spool = Spools(Path({str(spools._folder)!r})).open(KEY, A, HEADER, LAYOUT)
for index in range(3):
    spool.write(index, chunk_of(HEADER, DELTA.tobytes(), index))
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False, timeout=120)
    assert done.returncode == -9
    assert spools.open(KEY, A, HEADER, LAYOUT).held == 3


def test_other_update_begins_from_nothing(spools: Spools) -> None:
    fill(spools, 2)
    other = header_of(random_vector(LAYOUT, 2))
    assert spools.held(KEY, A, other.manifest.digest) == 0
    assert spools.open(KEY, A, other, LAYOUT).held == 0
    assert spools.held(KEY, A, HEADER.manifest.digest) == 0


def test_committed_update_stays_committed_when_opened_again(spools: Spools) -> None:
    fill(spools, HEADER.manifest.chunks)
    norm = spools.open(KEY, A, HEADER, LAYOUT).commit()
    again = Spools(spools._folder).open(KEY, A, HEADER, LAYOUT)
    assert (again.held, again.commit()) == (HEADER.manifest.chunks, norm)


def test_committed_update_that_was_damaged_is_not_committed(spools: Spools) -> None:
    fill(spools, HEADER.manifest.chunks)
    spools.open(KEY, A, HEADER, LAYOUT).commit()
    raw = bytearray(file_of(spools).read_bytes())
    raw[-1] ^= 1
    file_of(spools).write_bytes(raw)
    with pytest.raises(IntegrityError, match=re.escape(str(file_of(spools)))):
        spools.committed(KEY, A, HEADER.manifest.digest).read(0, LAYOUT.total_bytes)
    spool = spools.open(KEY, A, HEADER, LAYOUT)
    assert spool.held == HEADER.manifest.chunks - 1
    with pytest.raises(MalformedMessage, match="is not complete: 4 of 5 chunks"):
        spool.commit()


def test_record_that_cannot_be_made_out_begins_again(spools: Spools) -> None:
    fill(spools, 2)
    file_of(spools, ".json").write_bytes(b"garbage")
    assert spools.held(KEY, A, HEADER.manifest.digest) == 0
    assert spools.open(KEY, A, HEADER, LAYOUT).held == 0


def test_update_that_is_not_committed_is_not_summed(spools: Spools) -> None:
    fill(spools, HEADER.manifest.chunks)
    with pytest.raises(IntegrityError, match=f"update of silo {A} was lost or replaced"):
        spools.committed(KEY, A, HEADER.manifest.digest)
    spools.open(KEY, A, HEADER, LAYOUT).commit()
    with pytest.raises(IntegrityError, match=f"update of silo {A} was lost or replaced"):
        spools.committed(KEY, A, digest_of(b"another update"))


def test_swapped_chunk_is_refused_and_not_kept(spools: Spools) -> None:
    spool = spools.open(KEY, A, HEADER, LAYOUT)
    with pytest.raises(IntegrityError, match="chunk 0 does not have the digest"):
        spool.write(0, chunk_of(HEADER, DELTA.tobytes(), 1))
    assert spool.held == 0
    spool.write(0, chunk_of(HEADER, DELTA.tobytes(), 0))
    assert spool.held == 1


@pytest.mark.parametrize("index", [0, 2, 5, -1])
def test_chunk_out_of_order_is_refused(spools: Spools, index: int) -> None:
    spool = spools.open(KEY, A, HEADER, LAYOUT)
    spool.write(0, chunk_of(HEADER, DELTA.tobytes(), 0))
    with pytest.raises(MalformedMessage, match=f"chunk {index} of the update of silo {A} came where 1 is expected"):
        spool.write(index, chunk_of(HEADER, DELTA.tobytes(), 1))
    assert spool.held == 1


def test_chunk_of_the_wrong_size_is_refused(spools: Spools) -> None:
    with pytest.raises(MalformedMessage, match="chunk 0 has 999 bytes"):
        spools.open(KEY, A, HEADER, LAYOUT).write(0, DELTA.tobytes()[:999])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, -1])
def test_update_with_a_value_that_is_not_finite_is_refused(spools: Spools, value: float, at: int) -> None:
    delta = DELTA.copy()
    delta[at] = value
    header = header_of(delta)
    last = 0 if at == 0 else header.manifest.chunks - 1
    fill(spools, last, header, delta)
    spool = spools.open(KEY, A, header, LAYOUT)
    with pytest.raises(MalformedMessage, match=f"chunk {last} of the update of silo {A} holds NaN or infinite"):
        spool.write(last, chunk_of(header, delta.tobytes(), last))
    assert spool.held == last
    with pytest.raises(MalformedMessage, match="is not complete"):
        spool.commit()


def test_update_of_another_shape_is_refused(spools: Spools) -> None:
    other = Layout("float32", (TensorSpec("a", (1024,)),))
    with pytest.raises(MalformedMessage, match="wrong model shape"):
        spools.open(KEY, A, header_of(DELTA, other), LAYOUT)
    assert not spools._folder.exists()


def test_update_in_half_precision_is_refused(spools: Spools) -> None:
    layout = Layout("bfloat16", (TensorSpec("a", (2048,)),))
    with pytest.raises(MalformedMessage, match="only float32 updates are taken"):
        spools.open(KEY, A, header_of(DELTA, layout), layout)


def test_chunks_that_split_a_number_are_refused(spools: Spools) -> None:
    with pytest.raises(MalformedMessage, match="chunk_bytes 1001: use a multiple of 4"):
        spools.open(KEY, A, header_of(DELTA, chunk_bytes=1001), LAYOUT)


def test_header_for_another_round_is_refused(spools: Spools) -> None:
    header = replace(HEADER, key=round_key(KEY.plan, round_number=2))
    with pytest.raises(MalformedMessage, match="is for round 2 attempt 1, the call for round 1 attempt 1"):
        spools.open(KEY, A, header, LAYOUT)


def test_discard_deletes_one_attempt_alone(spools: Spools) -> None:
    fill(spools, 2)
    other_key = round_key(KEY.plan, attempt=2)
    spools.open(other_key, B, replace(HEADER, key=other_key), LAYOUT).write(0, chunk_of(HEADER, DELTA.tobytes(), 0))
    spools.discard(KEY)
    assert spools.held(KEY, A, HEADER.manifest.digest) == 0
    assert spools.held(other_key, B, HEADER.manifest.digest) == 1
    spools.discard(KEY)


def test_full_disk_names_the_file_and_keeps_what_was_held(spools: Spools) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    fill(spools, 1)
    spool = spools.open(KEY, A, HEADER, LAYOUT)
    path = file_of(spools)
    path.rename(path.with_suffix(".aside"))
    path.symlink_to("/dev/full")
    with pytest.raises(StorageError, match=re.escape(f"{path} cannot be written: No space left on device")):
        spool.write(1, chunk_of(HEADER, DELTA.tobytes(), 1))
    spool.close()
    path.unlink()
    path.with_suffix(".aside").rename(path)
    assert spool.held == 1
    spool.write(1, chunk_of(HEADER, DELTA.tobytes(), 1))
    assert spools.open(KEY, A, HEADER, LAYOUT).held == 2
