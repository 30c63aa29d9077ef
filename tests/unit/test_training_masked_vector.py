"""The silo's masked vector: encoded and masked as the protocol says, the same bytes whenever it is made, nothing left behind."""

import errno
import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregation.weighting import SiloSummary, WeightCaps, weigh
from security.errors import IntegrityError, StateError, StorageError
from security.file_mark import FileMark
from security.identifiers import SiloName
from security.secure_aggregation import fixed_point, mask_stream
from security.secure_aggregation.fixed_point import EXTRA_WORDS, FixedPoint, Ranges
from security.secure_aggregation.mask_stream import KeyStream, MaskSum
from security.secure_aggregation.parameters import LEAST_COHORT, Parameters, default_threshold
from security.secure_aggregation.secret import Secret
from security.secure_aggregation.silo_machine import MaskVector
from silo_agent.task.update import TrainingDiverged, TrainingStopped
from silo_agent.training import masked_vector
from silo_agent.training.masked_vector import BLOCK_ELEMENTS, own_weight, write_masked_vector
from silo_wire.lorar import Weighting, raw_weight
from silo_wire.manifest import manifest_of, masked_layout
from silo_wire.plan import AggregationSection
from tests.support.coordinator_edges import Vector, summary
from tests.support.masked_round import kept
from tests.support.secagg_federation import encoded, entropy

SIZES = (3, 2 * BLOCK_ELEMENTS, 1, 70_001)
ELEMENTS = sum(SIZES)
POINT = FixedPoint.of(
    cohort=5, ranges=Ranges.of(sizes=SIZES, largest_delta=[1.0, 0.5, 1.0, 1e-2], largest_weight=100.0)
)
DELTA: Vector = np.random.default_rng(1).normal(0, 1e-3, ELEMENTS).astype("<f4")


def stream(name: str) -> KeyStream:
    return KeyStream(Secret(entropy(name)))


def masks() -> MaskSum:
    return MaskSum(added=(stream("self"), stream("one")), subtracted=(stream("two"), stream("three")))


def work(point: FixedPoint = POINT) -> MaskVector:
    parameters = Parameters(
        cohort=point.cohort,
        threshold=default_threshold(point.cohort),
        colluders=0,
        min_survivors=LEAST_COHORT,
        least_sum=LEAST_COHORT,
        fixed_point=point,
    )
    return MaskVector(parameters=parameters, rounding=stream("rounding"), noise=Secret(entropy("noise")), masks=masks())


def expected(delta: Vector, weight: float) -> bytes:
    """As of the protocol's own parts, in memory."""
    words = encoded(POINT, stream("rounding"), delta, weight)
    masks().apply(words, 0, mask_stream.Workspace())
    return words.tobytes()


def write(tmp_path: Path, delta: Vector = DELTA, *, weight: float = 7.0, **more: Any) -> bytes:
    path = tmp_path / "update"
    written = write_masked_vector(path, work(), kept(tmp_path / "delta", delta), weight=weight, **more)
    raw = path.read_bytes()
    assert written.manifest == manifest_of(masked_layout(POINT.words), [raw])
    return raw


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_the_bytes_are_the_encoding_under_masks_on_any_number_of_threads(tmp_path: Path, threads: int) -> None:
    assert write(tmp_path, threads=threads) == expected(DELTA, 7.0)


def test_the_bytes_are_the_same_when_it_is_done_again_over_what_a_killed_process_left(tmp_path: Path) -> None:
    once = write(tmp_path)
    (tmp_path / "update").write_bytes(os.urandom(len(once) + 999))
    assert write(tmp_path) == once


def test_nothing_of_the_delta_can_be_seen(tmp_path: Path) -> None:
    """Words of a delta of zeros spread over all of their range."""
    words = np.frombuffer(write(tmp_path, np.zeros(ELEMENTS, dtype="<f4")), dtype="<u4")
    counts, _ = np.histogram(words, bins=16, range=(0, 2**32))
    assert np.abs(counts / (len(words) / 16) - 1).max() < 0.05


def test_a_long_delta_is_scaled_down_before_it_is_encoded(tmp_path: Path) -> None:
    norm = float(np.linalg.norm(DELTA.astype(np.float64)))
    halved = write(tmp_path, clipping_norm=norm / 2)
    values = np.frombuffer(halved, dtype="<u4").copy()
    MaskSum(added=masks().subtracted, subtracted=masks().added).apply(values, 0, mask_stream.Workspace())
    decoded = np.zeros(ELEMENTS)
    fixed_point.decode(POINT, values[:-EXTRA_WORDS], 0, decoded)
    assert np.linalg.norm(decoded / 7.0) == pytest.approx(norm / 2, rel=1e-4)
    assert np.allclose(decoded / 7.0, DELTA / 2, atol=1e-6)
    assert write(tmp_path, clipping_norm=norm * 1.01) == expected(DELTA, 7.0)


def test_what_was_cut_is_counted_for_this_silo_and_in_the_sum(tmp_path: Path) -> None:
    delta = DELTA.copy()
    delta[[0, 5, ELEMENTS - 1]] = 1e4
    path = tmp_path / "update"
    written = write_masked_vector(path, work(), kept(tmp_path / "delta", delta), weight=7.0)
    assert written.saturated == 3
    assert path.read_bytes() == expected(delta, 7.0)


def test_the_mark_is_of_the_file_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "update"
    written = write_masked_vector(path, work(), kept(tmp_path / "delta", DELTA), weight=7.0)
    with path.open("rb") as file:
        assert FileMark.of(file.fileno()) == written.mark


@pytest.mark.parametrize("weighting", Weighting)
@pytest.mark.parametrize("cap", [3.0, 50.0])
def test_a_silo_weighs_itself_as_the_coordinator_would(weighting: Weighting, cap: float) -> None:
    told = summary(examples=40, reduction=0.75)
    section = AggregationSection(weighting=weighting.value, max_weight=cap)
    one = SiloSummary(silo=SiloName("a"), examples=told.examples, loss_reduction=told.loss_reduction, delta_norm=1.0)
    cohort = weigh([one], weighting=weighting, caps=WeightCaps(max_weight=cap))
    assert min(own_weight(section, told), section.weight_cap) == cohort.total


@pytest.mark.parametrize(
    ("ratio", "reduction", "weight"),
    [(100.0, 0.0, 5.0), (100.0, 0.1, 5.0), (100.0, 0.2, 8.0), (4.0, 0.2, 125.0), (100.0, 90.0, 500.0)],
)
def test_a_silo_weighs_neither_more_than_the_cap_nor_less_than_the_ratio_below_it(
    tmp_path: Path, ratio: float, reduction: float, weight: float
) -> None:
    """Also of no loss reduction. What is above the cap counts as one coordinate that was cut."""
    section = AggregationSection(secure_aggregation=True, max_weight=500.0, max_weight_ratio=ratio)
    ranges = Ranges.of(sizes=SIZES, largest_delta=[1e6] * len(SIZES), largest_weight=section.weight_cap)
    point = FixedPoint.of(cohort=5, ranges=ranges)
    own = own_weight(section, summary(examples=40, reduction=reduction))
    write_masked_vector(tmp_path / "update", work(point), kept(tmp_path / "delta", DELTA), weight=own)
    words = np.fromfile(tmp_path / "update", dtype="<u4")
    MaskSum(added=masks().subtracted, subtracted=masks().added).apply(words, 0, mask_stream.Workspace())
    told, cut = words[-EXTRA_WORDS:][:2]
    assert told / point.levels * section.weight_cap == pytest.approx(weight, rel=1e-6)
    assert cut == (reduction == 90.0)


def test_weights_by_hand() -> None:
    weights = [raw_weight(weighting, examples=40, loss_reduction=0.75) for weighting in Weighting]
    assert weights == [30.0, 40.0, 0.75, 1.0]


# --- what is left behind


def secrets_of(task: MaskVector) -> list[Secret]:
    return [task.noise, *(each.key for each in (task.rounding, *task.masks.added, *task.masks.subtracted))]


class Benches:
    """Every bench that is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        made = self.made

        class Watched(masked_vector._Bench):
            def __init__(self, chunk_bytes: int) -> None:
                super().__init__(chunk_bytes)
                made.append(self)

        monkeypatch.setattr(masked_vector, "_Bench", Watched)

    @property
    def clean(self) -> bool:
        return all(
            not buffer.any()
            for bench in self.made
            for buffer in (
                *(bench.delta, bench.words, bench.masking.words, bench.encoding.drawn, bench.encoding.wide),
                *(bench.encoding.noise, bench.encoding.stream.words),
            )
        )


def test_secrets_and_workspaces_are_erased_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benches, task = Benches(monkeypatch), work()
    write_masked_vector(tmp_path / "update", task, kept(tmp_path / "delta", DELTA), weight=7.0, threads=2)
    assert all(secret.erased for secret in secrets_of(task))
    assert len(benches.made) == 2
    assert benches.clean
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("masking")] == []


def test_after_any_error_there_is_no_file_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benches, task = Benches(monkeypatch), work()
    path = tmp_path / "update"
    written: list[int] = []
    write_at = os.pwrite

    def filling(descriptor: int, data: memoryview, at: int) -> int:
        if at >= 4 * BLOCK_ELEMENTS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(write_at(descriptor, data, at))
        return written[-1]

    delta = kept(tmp_path / "delta", DELTA)
    monkeypatch.setattr(os, "pwrite", filling)
    with pytest.raises(StorageError, match=f"{re.escape(str(path))} cannot be written .No space left on device"):
        write_masked_vector(path, task, delta, weight=7.0)
    assert written
    assert not path.exists()
    assert all(secret.erased for secret in secrets_of(task))
    assert benches.clean
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("masking")] == []


@pytest.mark.parametrize("asked", [1, 3, 5])
def test_it_stops_when_it_is_asked_to(tmp_path: Path, asked: int) -> None:
    task, path = work(), tmp_path / "update"
    questions: list[int] = []

    def stop() -> bool:
        questions.append(1)
        return len(questions) >= asked

    with pytest.raises(TrainingStopped):
        write_masked_vector(path, task, kept(tmp_path / "delta", DELTA), weight=7.0, should_stop=stop)
    assert not path.exists()
    assert all(secret.erased for secret in secrets_of(task))


def test_progress_goes_from_block_to_block_to_the_end(tmp_path: Path) -> None:
    told: list[float] = []
    write(tmp_path, progress=told.append)
    assert len(told) == -(-ELEMENTS // BLOCK_ELEMENTS)
    assert told == sorted(told)
    assert told[-1] == 1.0


# --- a delta that may not leave


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, ELEMENTS - 1])
def test_a_delta_that_is_not_finite_does_not_leave(tmp_path: Path, value: float, at: int) -> None:
    delta = DELTA.copy()
    delta[at] = value
    with pytest.raises(TrainingDiverged):
        write(tmp_path, delta)
    assert not (tmp_path / "update").exists()


@pytest.mark.parametrize("weight", [np.nan, np.inf, -1.0])
def test_an_absurd_weight_does_not_leave(tmp_path: Path, weight: float) -> None:
    with pytest.raises(StateError, match="weight"):
        write(tmp_path, weight=weight)
    assert not (tmp_path / "update").exists()


def flip(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


@pytest.mark.parametrize("change", [flip, lambda raw: raw[:-4], lambda raw: b""])
def test_a_damaged_delta_is_found_and_named(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    delta = kept(tmp_path / "delta", DELTA)
    delta.file.write_bytes(change(delta.file.read_bytes()))
    with pytest.raises(IntegrityError, match=re.escape(str(delta.file))):
        write_masked_vector(tmp_path / "update", work(), delta, weight=7.0)


def test_a_delta_that_this_process_knows_is_not_digested_again(tmp_path: Path) -> None:
    delta = kept(tmp_path / "delta", DELTA)
    with delta.file.open("rb") as file:
        known = replace(delta, mark=FileMark.of(file.fileno()))
    other = replace(known, manifest=replace(known.manifest, chunk_digests=(b"\0" * 32,) * known.manifest.chunks))
    write_masked_vector(tmp_path / "update", work(), other, weight=7.0)
    assert (tmp_path / "update").read_bytes() == expected(DELTA, 7.0)
    with pytest.raises(IntegrityError):
        write_masked_vector(tmp_path / "update", work(), replace(other, mark=None), weight=7.0)


def test_a_delta_that_is_written_to_meanwhile_is_found(tmp_path: Path) -> None:
    delta = kept(tmp_path / "delta", DELTA)
    os.utime(delta.file, (0, 0))  # the clock of a file system is coarse

    def meddle(_: float) -> None:
        with delta.file.open("r+b") as file:
            file.write(b"\1")

    with pytest.raises(IntegrityError, match="written to while"):
        write_masked_vector(tmp_path / "update", work(), delta, weight=7.0, progress=meddle)
    assert not (tmp_path / "update").exists()


def test_a_missing_delta_and_one_of_another_model_are_named(tmp_path: Path) -> None:
    delta = kept(tmp_path / "delta", DELTA[:-1])
    with pytest.raises(IntegrityError, match="of another model"):
        write_masked_vector(tmp_path / "update", work(), delta, weight=7.0)
    delta = kept(tmp_path / "delta", DELTA)
    delta.file.unlink()
    with pytest.raises(StorageError, match=re.escape(str(delta.file))):
        write_masked_vector(tmp_path / "update", work(), delta, weight=7.0)
