"""Spools: chunks in order, checked, resumed after a crash, and refused when they are wrong."""

import errno
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from lorica_coordinator.edges.models import spool as spool_module
from lorica_coordinator.edges.models.spool import Spools
from lorica_security.errors import IntegrityError, MalformedMessage, StorageError, WrongTime
from lorica_security.secure_aggregation.messages import MaskedInput
from silo_wire.canonical import digest_of
from silo_wire.manifest import Layout, TensorSpec, manifest_of, masked_layout
from silo_wire.messages import MaskedHeader, UpdateHeader
from tests.support.coordinator_edges import A, B, Vector, chunk_of, content_of, random_vector, round_key, update_header

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


def held(spools: Spools, header: UpdateHeader = HEADER) -> int:
    return spools.held(KEY, A, header.manifest.digest, LAYOUT)


def restarted(spools: Spools) -> Spools:
    """What a new process makes of the same folder."""
    return Spools(spools._folder)


def fill(spools: Spools, count: int, header: UpdateHeader = HEADER, delta: Vector = DELTA) -> None:
    spool = spools.open(KEY, A, header, LAYOUT)
    for index in range(spool.held, count):
        spool.write(index, chunk_of(header, delta.tobytes(), index))
    spool.close()


def test_whole_update_is_committed_with_its_norm(spools: Spools) -> None:
    fill(spools, HEADER.manifest.chunks)
    spool = spools.open(KEY, A, HEADER, LAYOUT)
    norm = spool.commit()
    assert norm == pytest.approx(float(np.linalg.norm(DELTA.astype(np.float64))), rel=1e-6)
    assert spool.commit() == norm
    vector = spools.committed(KEY, A, HEADER.manifest.digest)
    assert content_of(vector) == DELTA.tobytes()


def test_a_committed_update_keeps_no_file_open(spools: Spools) -> None:
    fill(spools, HEADER.manifest.chunks)
    spool = spools.open(KEY, A, HEADER, LAYOUT)
    for _ in range(2):
        spool.commit()
        assert str(file_of(spools)) not in {file.path for file in psutil.Process().open_files()}


def test_what_a_commit_promises_is_on_the_disk(spools: Spools, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update, its record, its key, and the folder's entries for all three, when there is none to come any more."""
    synced: list[tuple[int, set[str]]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        names = {path.name for path in spools._folder.glob("*/*/*")}
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, names))

    monkeypatch.setattr(os, "fsync", noted)
    fill(spools, HEADER.manifest.chunks)
    spools.open(KEY, A, HEADER, LAYOUT).commit()
    files = {path.name: path.stat().st_ino for path in file_of(spools).parent.iterdir()}
    assert len(files) == 3
    assert set(files.values()) <= {inode for inode, _ in synced}
    last, entries = synced[-1]
    assert last == file_of(spools).parent.stat().st_ino
    assert entries == set(files), "after the last of them had its name"


def test_norm_of_three_and_four_is_five(spools: Spools) -> None:
    delta = np.zeros(LAYOUT.parameters, dtype="<f4")
    delta[0], delta[-1] = 3.0, -4.0
    fill(spools, HEADER.manifest.chunks, header_of(delta), delta)
    assert spools.open(KEY, A, header_of(delta), LAYOUT).commit() == 5.0


def test_upload_goes_on_where_it_stopped(spools: Spools) -> None:
    fill(spools, 2)
    assert held(spools) == 2
    again = restarted(spools)
    spool = again.open(KEY, A, HEADER, LAYOUT)
    assert spool.held == 2
    for index in range(2, HEADER.manifest.chunks):
        spool.write(index, chunk_of(HEADER, DELTA.tobytes(), index))
    spool.commit()
    assert content_of(again.committed(KEY, A, HEADER.manifest.digest)) == DELTA.tobytes()


def test_half_written_chunk_is_asked_for_again_after_a_crash(spools: Spools) -> None:
    fill(spools, 3)
    with file_of(spools).open("r+b") as file:
        file.seek(3 * CHUNK)
        file.write(chunk_of(HEADER, DELTA.tobytes(), 3)[: CHUNK // 2])
    assert restarted(spools).open(KEY, A, HEADER, LAYOUT).held == 3


def test_file_has_its_full_size_before_the_first_chunk(spools: Spools) -> None:
    spools.open(KEY, A, HEADER, LAYOUT)
    status = file_of(spools).stat()
    assert status.st_size == LAYOUT.total_bytes
    assert status.st_blocks * 512 >= LAYOUT.total_bytes


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_norm_is_the_same_after_a_restart_on_the_way(spools: Spools, count: int) -> None:
    fill(spools, HEADER.manifest.chunks)
    undisturbed = spools.open(KEY, A, HEADER, LAYOUT).commit()
    other_key = round_key(KEY.plan, attempt=2)
    header = replace(HEADER, key=other_key)
    spool = spools.open(other_key, A, header, LAYOUT)
    for index in range(count):
        spool.write(index, chunk_of(header, DELTA.tobytes(), index))
    spool = restarted(spools).open(other_key, A, header, LAYOUT)
    assert spool.held == count
    for index in range(count, header.manifest.chunks):
        spool.write(index, chunk_of(header, DELTA.tobytes(), index))
    assert spool.commit() == undisturbed


def test_chunk_that_never_reached_the_disk_is_asked_for_again(spools: Spools) -> None:
    """A power cut can leave a file of the right length with zeros in it."""
    fill(spools, 4)
    raw = bytearray(file_of(spools).read_bytes())
    raw[2 * CHUNK : 3 * CHUNK] = bytes(CHUNK)
    file_of(spools).write_bytes(raw)
    again = restarted(spools)
    assert held(again) == 2
    assert again.open(KEY, A, HEADER, LAYOUT).held == 2


def test_killed_process_keeps_what_it_held(spools: Spools, tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from tests.unit.test_coordinator_spool import DELTA, HEADER, KEY, LAYOUT, A, chunk_of
from lorica_coordinator.edges.models.spool import Spools
spool = Spools(Path({str(spools._folder)!r})).open(KEY, A, HEADER, LAYOUT)
for index in range(3):
    spool.write(index, chunk_of(HEADER, DELTA.tobytes(), index))
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False, timeout=120)
    assert done.returncode == -9
    assert spools.open(KEY, A, HEADER, LAYOUT).held == 3


def test_held_is_found_out_once_and_then_remembered(spools: Spools) -> None:
    """Else every question for the offset would read the whole file again."""
    fill(spools, 3)
    again = restarted(spools)
    assert held(again) == 3
    file_of(spools).unlink()
    assert held(again) == 3
    assert held(restarted(spools)) == 0


def test_other_update_begins_from_nothing(spools: Spools) -> None:
    fill(spools, 2)
    other = header_of(random_vector(LAYOUT, 2))
    assert held(spools, other) == 0
    assert spools.open(KEY, A, other, LAYOUT).held == 0
    assert held(spools) == 0


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
        content_of(spools.committed(KEY, A, HEADER.manifest.digest))
    spool = restarted(spools).open(KEY, A, HEADER, LAYOUT)
    assert spool.held == HEADER.manifest.chunks - 1
    with pytest.raises(MalformedMessage, match="is not complete: 4 of 5 chunks"):
        spool.commit()


def test_record_that_cannot_be_made_out_begins_again(spools: Spools) -> None:
    fill(spools, 2)
    file_of(spools, ".json").write_bytes(b"garbage")
    assert held(restarted(spools)) == 0
    assert restarted(spools).open(KEY, A, HEADER, LAYOUT).held == 0


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


def test_update_of_another_type_than_the_plans_is_refused(spools: Spools) -> None:
    short = LAYOUT.as_type("bfloat16")
    with pytest.raises(MalformedMessage, match="another layout"):
        spools.open(KEY, A, update_header(KEY, BASE, short, bytes(short.total_bytes)), LAYOUT)


SHORT = LAYOUT.as_type("bfloat16")


def in_bfloat16(delta: Vector) -> bytes:
    return torch.from_numpy(delta).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def test_update_in_bfloat16_is_spooled_as_it_came(spools: Spools) -> None:
    data = in_bfloat16(DELTA)
    header = update_header(KEY, BASE, SHORT, data, chunk_bytes=CHUNK)
    spool = spools.open(KEY, A, header, SHORT)
    for index in range(header.manifest.chunks):
        spool.write(index, chunk_of(header, data, index))
    expanded = torch.from_numpy(DELTA).to(torch.bfloat16).double()
    assert spool.commit() == pytest.approx(float(expanded.norm()), rel=1e-6)
    assert content_of(spools.committed(KEY, A, header.manifest.digest)) == data


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_update_in_bfloat16_with_a_value_that_is_not_finite_is_refused(spools: Spools, value: float) -> None:
    delta = DELTA.copy()
    delta[-1] = value
    data = in_bfloat16(delta)
    header = update_header(KEY, BASE, SHORT, data, chunk_bytes=len(data))
    with pytest.raises(MalformedMessage, match=r"chunk 0 .* holds NaN or infinite"):
        spools.open(KEY, A, header, SHORT).write(0, data)


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
    assert held(spools) == 0
    assert spools.held(other_key, B, HEADER.manifest.digest, LAYOUT) == 1
    spools.discard(KEY)


SECOND = round_key(KEY.plan, round_number=2)


def test_next_attempt_is_written_over_the_files_of_the_last(spools: Spools) -> None:
    fill(spools, HEADER.manifest.chunks)
    spools.open(KEY, A, HEADER, LAYOUT).commit()
    inode = file_of(spools).stat().st_ino
    spools.discard(KEY)
    assert not list(spools._folder.rglob("*.delta"))
    header = replace(header_of(random_vector(LAYOUT, 2)), key=SECOND)
    assert spools.open(SECOND, A, header, LAYOUT).held == 0
    assert file_of(spools).stat().st_ino == inode


def test_what_a_file_held_for_another_attempt_counts_for_nothing(spools: Spools) -> None:
    fill(spools, HEADER.manifest.chunks)
    spools.discard(KEY)
    delta = DELTA.copy()
    delta[2 * CHUNK // 4] += 1.0  # in the third chunk; the others are those of the file that is taken over
    header = replace(header_of(delta), key=SECOND)
    spools.open(SECOND, A, header, LAYOUT).close()
    again = restarted(spools)
    spool = again.open(SECOND, A, header, LAYOUT)
    assert spool.held == 0
    with pytest.raises(MalformedMessage, match="is not complete"):
        spool.commit()
    for index in range(header.manifest.chunks):
        spool.write(index, chunk_of(header, delta.tobytes(), index))
    spool.commit()
    assert content_of(again.committed(SECOND, A, header.manifest.digest)) == delta.tobytes()


def test_a_spool_lies_there_encrypted_and_its_key_is_destroyed_with_the_attempt(spools: Spools) -> None:
    fill(spools, HEADER.manifest.chunks)
    key, there = file_of(spools, ".key"), file_of(spools)
    assert key.stat().st_mode & 0o777 == 0o600
    assert DELTA.tobytes()[:64] not in there.read_bytes()
    link = spools._folder.parent / "link"
    os.link(key, link)
    spools.discard(KEY)
    assert not key.exists()
    assert link.read_bytes() == bytes(32)


def test_two_updates_of_one_silo_in_one_attempt_have_two_keys(spools: Spools) -> None:
    fill(spools, 1)
    first = file_of(spools, ".key").read_bytes()
    other = random_vector(LAYOUT, 2)
    fill(spools, 1, header_of(other), other)
    assert file_of(spools, ".key").read_bytes() != first


@pytest.mark.parametrize("left", [b"", b"short"], ids=["gone", "cut"])
def test_a_spool_without_its_key_is_sent_again(spools: Spools, left: bytes) -> None:
    fill(spools, HEADER.manifest.chunks)
    spools.open(KEY, A, HEADER, LAYOUT).commit()
    key = file_of(spools, ".key")
    key.write_bytes(left) if left else key.unlink()
    again = restarted(spools)
    assert held(again) == 0
    with pytest.raises(IntegrityError, match="lost or replaced"):
        again.committed(KEY, A, HEADER.manifest.digest)
    fill(again, HEADER.manifest.chunks)
    again.open(KEY, A, HEADER, LAYOUT).commit()
    assert content_of(again.committed(KEY, A, HEADER.manifest.digest)) == DELTA.tobytes()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_committed_update_whose_file_is_gone_is_lost(spools: Spools, is_known: bool) -> None:
    """So the round goes on without it, where a file that cannot be read would be waited for."""
    fill(spools, HEADER.manifest.chunks)
    spools.open(KEY, A, HEADER, LAYOUT).commit()
    file_of(spools).unlink()
    with pytest.raises(IntegrityError, match=f"update of silo {A} was lost or replaced"):
        (spools if is_known else restarted(spools)).committed(KEY, A, HEADER.manifest.digest)


def test_a_spool_whose_key_file_changed_is_refused_though_its_bytes_did_not(spools: Spools) -> None:
    """The file's mark says nothing of the key, and noise would be summed unchecked."""
    fill(spools, HEADER.manifest.chunks)
    spools.open(KEY, A, HEADER, LAYOUT).commit()
    key = file_of(spools, ".key")
    key.write_bytes(key.read_bytes()[:-1] + bytes([key.read_bytes()[-1] ^ 1]))
    with pytest.raises(IntegrityError, match=f"key has changed since the update of silo {A}"):
        spools.committed(KEY, A, HEADER.manifest.digest)
    again = restarted(spools)
    assert held(again) == 0
    with pytest.raises(IntegrityError, match=f"update of silo {A} was lost or replaced"):
        again.committed(KEY, A, HEADER.manifest.digest)


def test_attack_another_update_is_begun_while_the_file_of_the_first_is_read(
    spools: Spools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart a silo opens its update again, leaves, and begins another one before that call has ended."""
    fill(spools, 2)
    again, other, real = restarted(spools), random_vector(LAYOUT, 2), spool_module._sums_held

    def slowly(*arguments: Any) -> list[float]:
        found = real(*arguments)
        monkeypatch.setattr(spool_module, "_sums_held", real)
        fill(again, 1, header_of(other), other)
        return found

    monkeypatch.setattr(spool_module, "_sums_held", slowly)
    spool = again.open(KEY, A, HEADER, LAYOUT)
    for index in range(spool.held, HEADER.manifest.chunks):
        spool.write(index, chunk_of(HEADER, DELTA.tobytes(), index))
    spool.commit()
    assert content_of(again.committed(KEY, A, HEADER.manifest.digest)) == DELTA.tobytes()


def test_attack_another_update_is_begun_while_the_offset_of_the_first_is_found(
    spools: Spools, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(spools, HEADER.manifest.chunks)
    spools.open(KEY, A, HEADER, LAYOUT).commit()
    with file_of(spools).open("r+b") as file:
        file.write(bytes(1))  # damaged: the record is written anew without its norm
    again, other, real = restarted(spools), random_vector(LAYOUT, 2), spool_module._sums_held

    def slowly(*arguments: Any) -> list[float]:
        found = real(*arguments)
        monkeypatch.setattr(spool_module, "_sums_held", real)
        fill(again, header_of(other).manifest.chunks, header_of(other), other)
        again.open(KEY, A, header_of(other), LAYOUT).commit()
        return found

    monkeypatch.setattr(spool_module, "_sums_held", slowly)
    assert held(again) == 0
    assert content_of(again.committed(KEY, A, header_of(other).manifest.digest)) == other.tobytes()
    assert held(restarted(again), header_of(other)) == header_of(other).manifest.chunks


def test_the_keys_of_another_plan_are_destroyed_before_its_spools_are_deleted(spools: Spools) -> None:
    fill(spools, 1)
    link = spools._folder.parent / "link"
    os.link(file_of(spools, ".key"), link)
    spools.retain(None)
    assert link.read_bytes() == bytes(32)


def test_as_many_spares_are_kept_as_the_last_attempt_had_files(spools: Spools) -> None:
    for attempt, silos in ((1, (A, B)), (2, (A,))):
        key = round_key(KEY.plan, attempt=attempt)
        for silo in silos:
            spools.open(key, silo, replace(HEADER, key=key), LAYOUT)
    spools.discard(KEY)
    assert len(list(spools._folder.rglob("*.spare"))) == 2
    spools.discard(round_key(KEY.plan, attempt=2))
    assert len(list(spools._folder.rglob("*.spare"))) == 1


def test_everything_of_a_plan_goes_with_it(spools: Spools) -> None:
    fill(spools, 2)
    other = round_key(digest_of(b"other plan"))
    spool = spools.open(other, B, replace(HEADER, key=other), LAYOUT)
    spools.retain(KEY.plan)
    assert held(spools) == 2
    assert spools.held(other, B, HEADER.manifest.digest, LAYOUT) == 0
    with pytest.raises(WrongTime, match="is over"):
        spool.write(0, chunk_of(HEADER, DELTA.tobytes(), 0))
    spools.retain(None)
    assert list(spools._folder.iterdir()) == []
    Spools(spools._folder / "nowhere").retain(None)


def test_late_upload_cannot_write_into_a_file_that_has_become_another_ones(spools: Spools) -> None:
    late = spools.open(KEY, A, HEADER, LAYOUT)
    late.write(0, chunk_of(HEADER, DELTA.tobytes(), 0))
    spools.discard(KEY)
    header = replace(HEADER, key=SECOND)
    spool = spools.open(SECOND, B, header, LAYOUT)
    with pytest.raises(WrongTime, match="is over"):
        late.write(1, chunk_of(HEADER, DELTA.tobytes(), 1))
    with pytest.raises(WrongTime, match="is over"):
        spools.open(KEY, A, HEADER, LAYOUT)
    late.close()
    for index in range(header.manifest.chunks):
        spool.write(index, chunk_of(header, DELTA.tobytes(), index))
    spool.commit()
    with pytest.raises(MalformedMessage, match="is not complete"):
        late.commit()
    assert content_of(spools.committed(SECOND, B, header.manifest.digest)) == DELTA.tobytes()


def test_chunk_may_lie_anywhere_in_its_message(spools: Spools) -> None:
    spool = spools.open(KEY, A, HEADER, LAYOUT)
    for index in range(HEADER.manifest.chunks):
        spool.write(index, memoryview(b"abc" + chunk_of(HEADER, DELTA.tobytes(), index))[3:])
    assert spool.commit() == pytest.approx(float(np.linalg.norm(DELTA.astype(np.float64))), rel=1e-6)


def test_disk_without_room_is_told_before_the_first_chunk_and_gets_back_what_was_taken(
    spools: Spools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageError, match=rf"{A}\.delta cannot be used: No space left on device"):
            spools.open(KEY, A, HEADER, LAYOUT)
        assert not list(spools._folder.rglob("*.delta"))
    fill(spools, HEADER.manifest.chunks)
    spools.open(KEY, A, HEADER, LAYOUT).commit()


def test_update_whose_fsync_failed_is_asked_for_again_from_the_start(
    spools: Spools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel forgets which pages it could not write: a second fsync would succeed over a hole."""
    fill(spools, HEADER.manifest.chunks)
    spool = spools.open(KEY, A, HEADER, LAYOUT)

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        with pytest.raises(StorageError, match=rf"{A}\.delta cannot be made durable: Input/output error"):
            spool.commit()
    assert (spool.held, held(spools)) == (0, 0)
    for index in range(HEADER.manifest.chunks):
        spool.write(index, chunk_of(HEADER, DELTA.tobytes(), index))
    spool.commit()


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


# --- masked vectors


WORDS = 1026
MASKED = masked_layout(WORDS)
PATTERNS = np.array([0x7F800000, 0xFFC00000, 0x7F800001, 0xFF800000, 0, 0xFFFFFFFF], dtype="<u4")  # NaN, infinite
VECTOR = np.resize(PATTERNS, WORDS).tobytes()


def masked_header(raw: bytes = VECTOR, chunk_bytes: int = CHUNK) -> MaskedHeader:
    manifest = manifest_of(MASKED, [raw], chunk_bytes)
    masked = MaskedInput(
        roster=bytes(32), dealings=bytes(32), silo=A, words=WORDS, vector=bytes.fromhex(manifest.digest)
    )
    return MaskedHeader(key=KEY, masked=masked, manifest=manifest)


def masked_chunk(header: MaskedHeader, index: int) -> bytes:
    begin = index * header.manifest.chunk_bytes
    return VECTOR[begin : begin + header.manifest.chunk_size(index)]


def test_masked_vector_of_any_words_is_taken(spools: Spools) -> None:
    """Read as numbers some of these are NaN or infinite; as words they are like any others."""
    header = masked_header()
    spool = spools.open(KEY, A, header, MASKED)
    for index in range(header.manifest.chunks):
        spool.write(index, masked_chunk(header, index))
    assert spool.commit() == 0.0
    assert content_of(spools.committed(KEY, A, header.manifest.digest)) == VECTOR
    assert content_of(restarted(spools).committed(KEY, A, header.manifest.digest)) == VECTOR


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_masked_upload_goes_on_where_it_stopped(spools: Spools, count: int) -> None:
    header = masked_header()
    spool = spools.open(KEY, A, header, MASKED)
    for index in range(count):
        spool.write(index, masked_chunk(header, index))
    again = restarted(spools)
    assert again.held(KEY, A, header.manifest.digest, MASKED) == count
    spool = again.open(KEY, A, header, MASKED)
    assert spool.held == count
    for index in range(count, header.manifest.chunks):
        spool.write(index, masked_chunk(header, index))
    spool.commit()
    assert content_of(again.committed(KEY, A, header.manifest.digest)) == VECTOR


def test_masked_chunk_that_was_damaged_on_the_way_or_on_disk_is_asked_for_again(spools: Spools) -> None:
    header = masked_header()
    spool = spools.open(KEY, A, header, MASKED)
    with pytest.raises(IntegrityError):
        spool.write(0, bytes(CHUNK))
    for index in range(4):
        spool.write(index, masked_chunk(header, index))
    raw = bytearray(file_of(spools).read_bytes())
    raw[2 * CHUNK + 17] ^= 1
    file_of(spools).write_bytes(raw)
    assert restarted(spools).open(KEY, A, header, MASKED).held == 2


def test_masked_vector_of_another_length_is_refused(spools: Spools) -> None:
    with pytest.raises(MalformedMessage, match="wrong model shape"):
        spools.open(KEY, A, masked_header(), masked_layout(WORDS + 1))
    with pytest.raises(MalformedMessage, match="multiple of 4"):
        spools.open(KEY, A, masked_header(chunk_bytes=1002), MASKED)


def test_masked_vector_is_written_over_the_file_of_a_plain_one_of_its_size(spools: Spools) -> None:
    layout = Layout("float32", (TensorSpec("a", (WORDS,)),))
    delta = random_vector(layout, 3)
    header = header_of(delta, layout)
    spools.open(KEY, A, header, layout).write(0, chunk_of(header, delta.tobytes(), 0))
    inode = file_of(spools).stat().st_ino
    spools.discard(KEY)
    key = round_key(KEY.plan, attempt=2)
    masked = replace(masked_header(), key=key)
    assert spools.open(key, A, masked, MASKED).held == 0
    assert file_of(spools).stat().st_ino == inode
