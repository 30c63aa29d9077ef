"""The silo's masked vector: encoded and masked as the protocol says, the same bytes whenever it is made, nothing left
behind."""

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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorica_coordinator.aggregation.weighting import SiloSummary, WeightCaps, weigh
from lorica_security.errors import IntegrityError, StateError, StorageError
from lorica_security.host.file_mark import FileMark
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors import fixed_point, mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS, FixedPoint, Ranges, WideBlock
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, MaskSum, Words
from lorica_security.secure_aggregation.parameters import LEAST_COHORT, Parameters, default_threshold
from lorica_security.secure_aggregation.silo.effects import MaskVector
from silo_agent.rounds.update import TrainingDiverged, TrainingStopped
from silo_agent.training.update import masked_vector
from silo_agent.training.update.masked_vector import BLOCK_ELEMENTS, own_weight, write_masked_vector
from silo_wire.manifest import manifest_of, masked_layout
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.weightings.named import WEIGHTINGS
from silo_wire.weightings.weighting import Weighting
from tests.support import secagg_from_page as page
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


def opened(raw: bytes) -> Words:
    """Without the masks."""
    words = np.frombuffer(raw, dtype="<u4").copy()
    MaskSum(added=masks().subtracted, subtracted=masks().added).apply(words, 0, mask_stream.Workspace())
    return words


def decoded_of(words: Words, point: FixedPoint = POINT) -> WideBlock:
    decoded = np.zeros(point.ranges.elements)
    fixed_point.decode(point, words[:-EXTRA_WORDS], 0, decoded)
    return decoded


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
    decoded = decoded_of(opened(halved))
    assert np.linalg.norm(decoded / 7.0) == pytest.approx(norm / 2, rel=1e-4)
    assert np.allclose(decoded / 7.0, DELTA / 2, atol=1e-6)
    assert write(tmp_path, clipping_norm=norm * 1.01) == expected(DELTA, 7.0)


# --- what is beyond the range


@pytest.mark.parametrize("threads", [1, 3])
def test_a_tensor_beyond_its_range_is_scaled_as_a_whole_and_counted(tmp_path: Path, threads: int) -> None:
    """Its largest number is in another chunk than most of it. What is within its range stays as it was, to the last
    bit."""
    delta = DELTA.copy()
    delta[4] = -40.0  # times 7 / 100 is 2.8: its range is 0.5
    delta[5:9] = 7.5  # 0.525
    delta[9] = 7.0  # 0.49
    task = work()
    written = write_masked_vector(
        tmp_path / "update", task, kept(tmp_path / "delta", delta), weight=7.0, threads=threads
    )
    words = opened((tmp_path / "update").read_bytes())
    assert written.saturated == words[1 - EXTRA_WORDS] == 5
    decoded, second = decoded_of(words) / 7.0, slice(SIZES[0], SIZES[0] + SIZES[1])
    assert np.allclose(decoded[second], delta[second] * (0.5 / 2.8), rtol=1e-6, atol=1e-7)
    assert decoded.min() == pytest.approx(-0.5 * 100 / 7, rel=2**-20)
    assert abs(words[4].view("<i4")) < POINT.levels
    untouched = opened(expected(DELTA, 7.0))
    assert np.array_equal(words[: SIZES[0]], untouched[: SIZES[0]])
    assert np.array_equal(words[second.stop : -EXTRA_WORDS], untouched[second.stop : -EXTRA_WORDS])
    again = write(tmp_path, delta)
    assert again == write(tmp_path, delta) == (tmp_path / "update").read_bytes()
    assert np.array_equal(opened(again), words)


def test_it_is_clipped_first_and_scaled_only_where_it_is_beyond_its_range_then(tmp_path: Path) -> None:
    delta = DELTA * np.float32(1e4)
    norm = float(np.linalg.norm(delta.astype(np.float64)))
    long = write_masked_vector(tmp_path / "update", work(), kept(tmp_path / "delta", delta), weight=7.0)
    assert long.saturated > 0
    clipped = write_masked_vector(
        tmp_path / "update", work(), kept(tmp_path / "delta", delta), weight=7.0, clipping_norm=norm / 1e4
    )
    assert clipped.saturated == 0
    assert (tmp_path / "update").read_bytes() == expected(delta * np.float32(1e-4), 7.0)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    bounds=st.lists(st.floats(1e-9, 1e9), min_size=4, max_size=4),
    sizes_of_numbers=st.lists(st.floats(1e-12, 1e12), min_size=4, max_size=4),
    cap=st.floats(1e-9, 1e12),
    share=st.floats(1 / 900, 2.0),
    clipped=st.sampled_from([0.0, 0.5, 2.0]),
    heavy=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_words_are_the_delta_times_one_number_for_each_tensor(
    tmp_path: Path,
    sizes: list[int],
    bounds: list[float],
    sizes_of_numbers: list[float],
    cap: float,
    share: float,
    clipped: float,
    heavy: bool,
    seed: int,
) -> None:
    """Of any delta, weight and ranges, and `clipped` times its norm: within a level, and float32's rounding."""
    drawn = np.random.default_rng(seed)
    tensors = [
        (drawn.standard_t(1.2, size) if heavy else drawn.normal(size=size)) * scale
        for size, scale in zip(sizes, sizes_of_numbers, strict=False)
    ]
    delta = np.concatenate(tensors).astype("<f4")
    ranges = Ranges.of(sizes=sizes, largest_delta=bounds[: len(sizes)], largest_weight=cap)
    point = FixedPoint.of(cohort=3, ranges=ranges)
    weight, norm = share * cap, float(np.linalg.norm(delta.astype(np.float64)))
    written = write_masked_vector(
        tmp_path / "update", work(point), kept(tmp_path / "delta", delta), weight=weight, clipping_norm=clipped * norm
    )
    words = opened((tmp_path / "update").read_bytes())
    decoded = decoded_of(words, point) / cap
    factor, beyond = clipped if 0 < clipped < 1 else 1.0, 0
    for first, last, bound in zip(ranges.starts, ranges.starts[1:], bounds, strict=False):
        put_in = min(share, 1.0) * factor * delta[first:last].astype(np.float64)
        peak = np.abs(put_in).max()
        whole = min(1.0, bound / peak) if peak else 1.0
        assert np.allclose(decoded[first:last], put_in * whole, rtol=3e-6, atol=1.01 * bound / point.levels)
        # Whether a number at the very end of the range is beyond it hangs on its last bit.
        least, most = (np.count_nonzero(np.abs(put_in) > bound * (1 + by)) for by in (3e-6, -3e-6))
        beyond += int(most)
        assert written.saturated >= least
        assert np.abs(words[first:last].view("<i4")).max() <= point.levels
    assert written.saturated <= beyond
    assert words[1 - EXTRA_WORDS] == written.saturated + (share > 1)


@pytest.mark.parametrize("weight", [1.0, 50.0, 1e9])
def test_the_page_says_how_what_is_beyond_its_range_is_scaled(tmp_path: Path, weight: float) -> None:
    """As somebody did who read it alone. The last bits of what is scaled are everybody's own."""
    delta = np.random.default_rng(1).normal(0, 0.4, 70).astype("<f4")
    delta[:40] /= 10  # within its range of 3
    ranges = {"weight_cap": 64.0, "tensors": [{"elements": 40, "bound": 3.0}, {"elements": 30, "bound": 1e-3}]}
    scaled, beyond = page.within_ranges(page.fixed_point(5, ranges), delta, weight)
    words = page.encode(page.fixed_point(5, ranges), scaled, weight, rounding_key=entropy("rounding"), beyond=beyond)
    point = FixedPoint.of(cohort=5, ranges=Ranges.of(sizes=(40, 30), largest_delta=(3.0, 1e-3), largest_weight=64.0))
    written = write_masked_vector(tmp_path / "update", work(point), kept(tmp_path / "delta", delta), weight=weight)
    by_agents = opened((tmp_path / "update").read_bytes())
    assert written.saturated == beyond > 20
    assert np.array_equal(by_agents[:40], words[:40])
    assert np.array_equal(by_agents[70:], words[70:])
    assert np.abs((by_agents[40:70] - words[40:70]).view("<i4")).max() <= 1e-6 * point.levels
    assert np.abs(words[40:70].view("<i4")).max() < point.levels


def test_attack_what_heavy_silos_put_in_is_no_grid_beside_which_a_light_one_is_seen(tmp_path: Path) -> None:
    """Deltas of one size, by numbers of examples: three silos are beyond the range nearly everywhere, the fourth is
    within it.

    Were they cut, each of the three would add plus or minus the range, and the rest would be the fourth's delta with a
    cosine of 0.8 and more.
    """
    drawn, weights, bound, size = np.random.default_rng(3), (300.0, 260.0, 240.0, 3.0), 1e-3, 20_000
    deltas = [drawn.normal(0, 25 * bound, size).astype("<f4") for _ in weights]
    point = FixedPoint.of(cohort=5, ranges=Ranges.of(sizes=[size], largest_delta=[bound], largest_weight=weights[0]))
    total = np.zeros(point.words, dtype="<u4")
    for delta, weight in zip(deltas, weights, strict=True):
        written = write_masked_vector(tmp_path / "update", work(point), kept(tmp_path / "delta", delta), weight=weight)
        assert (written.saturated > 0.9 * size) == (weight > 3)
        total += opened((tmp_path / "update").read_bytes())
    in_ranges = decoded_of(total, point) / weights[0] / bound
    grid = np.clip(2 * np.round((in_ranges - 3) / 2) + 3, -3, 3)
    beside = in_ranges - grid
    near_no_border = np.abs(beside) < 0.6
    light = deltas[-1]
    assert cosine(np.where(near_no_border, beside, 0), light) < cosine(in_ranges, light) < 0.6
    assert cosine(beside[near_no_border], light[near_no_border]) < 0.6


def cosine(one: WideBlock, other: Vector) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_the_mark_is_of_the_file_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "update"
    written = write_masked_vector(path, work(), kept(tmp_path / "delta", DELTA), weight=7.0)
    with path.open("rb") as file:
        assert FileMark.of(file.fileno()) == written.mark


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda it: it.name)
@pytest.mark.parametrize("cap", [3.0, 50.0])
def test_a_silo_weighs_itself_as_the_coordinator_would(weighting: Weighting, cap: float) -> None:
    told = summary(examples=40, reduction=0.75)
    section = AggregationSection(weighting=weighting.name, fairness=1.0, max_weight=cap)
    one = SiloSummary(
        silo=SiloName("a"),
        examples=told.examples,
        loss_reduction=told.loss_reduction,
        loss_first=told.loss_first,
        optimizer_steps=1,
        delta_norm=1.0,
    )
    cohort = weigh([one], weighting=weighting, caps=WeightCaps(max_weight=cap))
    assert min(own_weight(section, told), section.weight_cap) == cohort.total


@pytest.mark.parametrize(
    ("ratio", "reduction", "weight"),
    [(100.0, 0.0, 5.0), (100.0, 0.1, 5.0), (100.0, 0.2, 8.0), (4.0, 0.2, 125.0), (100.0, 90.0, 500.0)],
)
def test_a_silo_weighs_neither_more_than_the_cap_nor_less_than_the_ratio_below_it(
    tmp_path: Path, ratio: float, reduction: float, weight: float
) -> None:
    """Also of no loss reduction. What is above the cap counts as one coordinate beyond its range."""
    section = AggregationSection(secure_aggregation=True, max_weight=500.0, max_weight_ratio=ratio)
    ranges = Ranges.of(sizes=SIZES, largest_delta=[1e6] * len(SIZES), largest_weight=section.weight_cap)
    point = FixedPoint.of(cohort=5, ranges=ranges)
    own = own_weight(section, summary(examples=40, reduction=reduction))
    write_masked_vector(tmp_path / "update", work(point), kept(tmp_path / "delta", DELTA), weight=own)
    told, cut = opened((tmp_path / "update").read_bytes())[-EXTRA_WORDS:][:2]
    assert told / point.levels * section.weight_cap == pytest.approx(weight, rel=1e-6)
    assert cut == (reduction == 90.0)


def test_weights_by_hand() -> None:
    weights = [weighting.raw_weight(summary(examples=40, reduction=0.75)) for weighting in WEIGHTINGS]
    assert weights == [30.0, 40.0, pytest.approx(40.0**0.5), 0.75, 1.0, 40.0, 30.0]


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
