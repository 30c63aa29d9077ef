"""Masked aggregation over files: what plain aggregation gives, the same bits whenever it is done again, and no mask
left on."""

import errno
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorica_coordinator.edges.sums.masked_sum import PIECE_WORDS, MaskedVectors, MeanReader
from lorica_coordinator.rounds.updates import AggregationResult, Outcome
from lorica_coordinator.service.unusable import UnusableUpdate
from lorica_coordinator.vectors import slab_buffers
from lorica_coordinator.vectors.slab_buffers import SlabBuffer
from lorica_security.errors import ConfigurationError, IntegrityError, StateError, StorageError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS, Ranges, decode, decode_tail
from silo_wire.canonical import Digest
from silo_wire.manifest import masked_layout
from silo_wire.server_step.apply_mean import apply_mean
from silo_wire.server_step.server_optimizer import optimizer_named, slots
from tests.support import masked_round
from tests.support.coordinator_edges import Vector, content_of, stored_vector, update_header
from tests.support.masked_round import (
    LAYOUT,
    FileFederation,
    MaskedPlace,
    Trained,
    constant_deltas,
    relative_errors,
    t5_deltas,
)
from tests.support.secagg_federation import silo_names

pytestmark = pytest.mark.slow

A, B, C = silo_names(3)
OPTIMIZERS: list[dict[str, Any]] = [
    {"server_optimizer": "sgd", "momentum": 0.0},
    {"server_optimizer": "sgd", "momentum": 0.9},
    {"server_optimizer": "adam", "server_learning_rate": 0.01},
    {"server_optimizer": "yogi", "server_learning_rate": 0.01},
    {"server_optimizer": "adagrad", "server_learning_rate": 0.01},
]


@pytest.fixture
def place(tmp_path: Path) -> MaskedPlace:
    return MaskedPlace.at(tmp_path / "state")


def done(place: MaskedPlace, trained: dict[SiloName, Trained], round_number: int = 1) -> AggregationResult:
    base = place.models.initial()
    return place.aggregate(round_number, base, *place.masked(round_number, base, trained))


def mean_of(federation: FileFederation) -> Vector:
    """The mean delta from what the survivors encoded, without files, masks or slabs."""
    assert federation.unmask is not None
    point, words = federation.unmask.fixed_point, federation.true_sum()
    cap = point.ranges.weight_cap / decode_tail(point, words[-EXTRA_WORDS:]).weight_sum
    out = np.zeros(LAYOUT.parameters, dtype="<f4")
    decode(replace(point, ranges=replace(point.ranges, weight_cap=cap)), words[:-EXTRA_WORDS], 0, out)
    return out


# --- exactness


def test_the_aggregate_is_the_plain_one(tmp_path: Path) -> None:
    """Eight silos, weights 50 apart; in the second round two are lost with their vectors masked and not sent."""
    bounds = {"max_weight": 1000.0, "max_weight_ratio": 900.0}  # wide enough for these weights
    masked, plain = MaskedPlace.at(tmp_path / "masked", bounds), MaskedPlace.at(tmp_path / "plain", bounds)
    model, expected = masked.models.initial(), plain.models.initial()
    for round_number in (1, 2, 3):
        trained = t5_deltas(8, round_number)
        lost = silo_names(8)[1:8:5] if round_number == 2 else ()
        federation, digests = masked.masked(round_number, model, trained, dict.fromkeys(lost, "masked input"))
        assert set(digests) == set(trained) - set(lost)
        result = masked.aggregate(round_number, model, federation, digests)
        there = {name: one for name, one in trained.items() if name in digests}
        next_expected = plain.plain(round_number, expected, there)
        overall, worst = relative_errors(
            stored_vector(masked.models, result.model) - stored_vector(masked.models, model),
            stored_vector(plain.models, next_expected) - stored_vector(plain.models, expected),
        )
        assert (result.outcome, result.saturated, result.weights) == (Outcome.APPLIED, 0, ())
        assert result.coordinates == LAYOUT.parameters * len(there)
        weights = [one.summary.examples * one.summary.loss_reduction for one in there.values()]
        assert max(weights) / min(weights) >= 49
        assert result.weight_sum == pytest.approx(sum(weights), rel=1e-4)
        assert overall <= 1e-4
        assert worst <= 2e-2
        model, expected = result.model, next_expected


@pytest.mark.parametrize("slab_bytes", [400_004, 32 << 20])
@pytest.mark.parametrize("changes", OPTIMIZERS)
def test_slabs_give_the_bits_of_whole_vectors(tmp_path: Path, changes: dict[str, Any], slab_bytes: int) -> None:
    place = MaskedPlace.at(tmp_path / "state", changes)
    section = place.section
    optimizer = optimizer_named(
        section.server_optimizer,
        learning_rate=section.server_learning_rate,
        momentum=section.momentum,
        beta1=section.beta1,
        beta2=section.beta2,
        tau=section.tau,
    )
    base = model = place.models.initial()
    expected = torch.from_numpy(stored_vector(place.models, base))
    state = {name: torch.full_like(expected, fill) for name, fill in slots(optimizer).items()}
    for round_number in (1, 2):
        federation, digests = place.masked(round_number, model, t5_deltas(3, round_number))
        result = place.aggregator(slab_bytes).aggregate_masked(
            place.key(round_number), model, federation.sum_of(digests)
        )
        model = result.model
        mean = torch.from_numpy(mean_of(federation))
        apply_mean(expected, mean, optimizer, state, step_number=round_number, scratch=torch.empty_like(expected))
    assert stored_vector(place.models, model).tobytes() == expected.numpy().tobytes()
    kept = place.models.state(model)
    assert {name: content_of(vector) for name, vector in kept.slots.items()} == {
        name: vector.numpy().tobytes() for name, vector in state.items()
    }
    assert kept.steps == 2


def test_model_published_in_bfloat16_keeps_its_master(tmp_path: Path) -> None:
    place = MaskedPlace.at(tmp_path / "state", published="bfloat16")
    base = place.models.initial()
    federation, digests = place.masked(1, base, t5_deltas(3, 1))
    model = place.aggregate(1, base, federation, digests).model
    master = np.frombuffer(content_of(place.models.master(model, place.models.state(model))), dtype="<f4")
    assert master.tobytes() == mean_of(federation).tobytes()
    assert np.array_equal(
        stored_vector(place.models, model), torch.from_numpy(master.copy()).bfloat16().float().numpy()
    )


# --- the same again


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
@pytest.mark.parametrize("slab_elements", [100_001, PIECE_WORDS, LAYOUT.parameters])
def test_neither_threads_nor_slabs_change_a_bit(place: MaskedPlace, threads: int, slab_elements: int) -> None:
    base = place.models.initial()
    federation, digests = place.masked(1, base, t5_deltas(5, 1), {silo_names(5)[3]: "masked input"})
    vectors = vectors_of(place, federation, digests)
    weight_sum = vectors.tail().weight_sum
    reader = MeanReader(vectors, weight_sum=weight_sum, slab_elements=slab_elements, threads=threads)
    found = np.zeros(LAYOUT.parameters, dtype="<f4")
    for first in range(0, LAYOUT.parameters, slab_elements):
        reader.read_into(found[first : first + slab_elements].view(np.uint8).data)
    reader.close()
    assert found.tobytes() == mean_of(federation).tobytes()


def vectors_of(place: MaskedPlace, federation: FileFederation, digests: dict[SiloName, Digest]) -> MaskedVectors:
    unmask = federation.unmasking
    return MaskedVectors(
        fixed_point=unmask.fixed_point,
        masks=unmask.masks,
        spools=[(name, place.spools.committed(place.key(), name, digest)) for name, digest in digests.items()],
    )


def everything_of(place: MaskedPlace) -> dict[str, bytes]:
    folder = place.state / "models"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_round_that_is_done_again_gives_the_same_files(tmp_path: Path) -> None:
    place = MaskedPlace.at(tmp_path / "state", {"momentum": 0.9})
    first = done(place, t5_deltas(3, 1))
    federation, digests = place.masked(2, first.model, t5_deltas(3, 2))
    once = place.aggregate(2, first.model, federation, digests)
    whole = everything_of(place)
    reopened = place.reopened()
    assert reopened.aggregate(2, first.model, federation, digests) == once
    assert everything_of(reopened) == whole
    for path in (place.state / "models").glob(f"{once.model}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert reopened.aggregate(2, first.model, federation, digests) == once
    assert everything_of(reopened) == whole


class Crash(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", ["rename", "replace"])
def test_crash_between_state_and_model_harms_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """`rename` publishes optimizer state and ranges, `replace` the model; whichever is lost, the round is done
    again."""
    place = MaskedPlace.at(tmp_path / "state", {"momentum": 0.9})
    first = done(place, t5_deltas(3, 1))
    federation, digests = place.masked(2, first.model, t5_deltas(3, 2))
    original = getattr(Path, step)

    def crashing(self: Path, *arguments: Any, **named: Any) -> Any:
        if self.parent.name.startswith(".new-"):
            raise Crash
        return original(self, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Path, step, crashing)
        with pytest.raises(Crash):
            place.aggregate(2, first.model, federation, digests)
    reopened = place.reopened()
    result = reopened.aggregate(2, first.model, federation, digests)
    whole = everything_of(reopened)
    undisturbed = MaskedPlace.at(tmp_path / "undisturbed", {"momentum": 0.9})
    assert done(undisturbed, t5_deltas(3, 1)) == first
    again = undisturbed.masked(2, first.model, t5_deltas(3, 2))
    assert undisturbed.aggregate(2, first.model, *again) == result
    assert everything_of(undisturbed) == whole


def test_masks_are_erased_whatever_happens(place: MaskedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    base = place.models.initial()
    federation, digests = place.masked(1, base, t5_deltas(3, 1))
    masked = federation.sum_of(digests)
    handed_out = []
    unmask = type(masked.attempt).unmask

    def watched(attempt: Any) -> Any:
        handed_out.append(unmask(attempt))
        return handed_out[-1]

    monkeypatch.setattr(type(masked.attempt), "unmask", watched)
    place.aggregator().aggregate_masked(place.key(), base, masked)
    damage(place, B, lambda raw: raw[:-1])
    with pytest.raises(UnusableUpdate):
        place.aggregator().aggregate_masked(place.key(), base, masked)
    streams = [stream for each in handed_out for stream in (*each.masks.added, *each.masks.subtracted)]
    assert len(handed_out) == 2
    assert len(streams) >= 6
    assert all(stream.key.erased for stream in streams)


# --- what is told of a sum


def test_saturated_coordinates_are_reported_and_the_round_goes_on(tmp_path: Path) -> None:
    """One silo's delta is four times what the plan can express, in every round."""
    place = MaskedPlace.at(tmp_path / "state", {"delta_bound": 0.25, "weighting": "equal"})
    result = done(place, constant_deltas([0.1, -0.1, 1.0]))
    assert result.saturated == LAYOUT.parameters
    assert result.coordinates == 3 * LAYOUT.parameters
    moved = stored_vector(place.models, result.model)
    assert np.allclose(moved, 0.25 / 3, rtol=1e-6)
    federation, digests = place.masked(2, result.model, constant_deltas([0.1, -0.1, 1.0]))
    after = place.aggregate(2, result.model, federation, digests)
    assert after.saturated == LAYOUT.parameters
    assert np.allclose(stored_vector(place.models, after.model) - moved, 0.25 / 3, rtol=1e-6)


def test_weight_above_the_cap_counts_as_the_cap(tmp_path: Path) -> None:
    place = MaskedPlace.at(tmp_path / "state", {"max_weight": 5.0})
    deltas = constant_deltas([0.1, 0.1, 0.1], examples=4)
    deltas[C] = replace(deltas[C], summary=replace(deltas[C].summary, examples=1000))
    result = done(place, deltas)
    assert result.weight_sum == pytest.approx(4 + 4 + 5)
    assert result.saturated == 1, "one silo's weight was cut"


def test_silos_without_a_loss_reduction_weigh_alike(place: MaskedPlace) -> None:
    first = done(place, constant_deltas([0.1] * 3, examples=10_000_000))
    assert first.weight_sum == pytest.approx(3 * 1000), "the cap"
    federation, digests = place.masked(2, first.model, constant_deltas([0.1, 0.2, 0.3], reduction=0.0))
    result = place.aggregate(2, first.model, federation, digests)
    assert result.weight_sum == pytest.approx(3 * 10, rel=1e-6), "the least, a hundredth of the cap"
    moved = stored_vector(place.models, result.model) - stored_vector(place.models, first.model)
    assert np.allclose(moved, 0.2, rtol=1e-5)


def test_zero_weight_changes_no_byte(place: MaskedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """No honest silo weighs nothing, so these lie."""
    first = done(place, t5_deltas(3, 1))
    monkeypatch.setattr(masked_round, "own_weight", lambda section, summary: 0.0)
    federation, digests = place.masked(2, first.model, constant_deltas([0.1] * 3, reduction=0.0))
    before = everything_of(place)
    result = place.aggregate(2, first.model, federation, digests)
    assert (result.outcome, result.model, result.weight_sum) == (Outcome.ZERO_WEIGHT, first.model, 0.0)
    assert everything_of(place) == before


def test_caps_are_applied_by_the_silos(tmp_path: Path) -> None:
    place = MaskedPlace.at(tmp_path / "state", {"max_weight": 20.0, "max_delta_norm": 0.5})
    deltas = constant_deltas([0.001, 0.1, 0.2], examples=10)
    deltas[C] = replace(deltas[C], summary=replace(deltas[C].summary, examples=1000))
    result = done(place, deltas)
    assert result.weight_sum == pytest.approx(10 + 10 + 20)
    clipped = 0.5 / LAYOUT.parameters**0.5  # each delta is longer than 0.5, so their values come out alike
    assert np.allclose(stored_vector(place.models, result.model), clipped, rtol=1e-5)


# --- what is wrong with files


def damage(place: MaskedPlace, name: SiloName, change: Callable[[bytes], bytes]) -> None:
    path = next((place.state / "spools").rglob(f"{name}.delta"))
    path.write_bytes(change(path.read_bytes()))
    os.utime(path, (0, 0))  # the clock of a file system is coarse


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


SIZE = 4 * (LAYOUT.parameters + EXTRA_WORDS)
DAMAGE = {
    "first byte": flipped(0),
    "middle": flipped(SIZE // 2),
    "weight": flipped(SIZE - 8),
    "last byte": flipped(SIZE - 1),
    "cut off": lambda raw: raw[:-4],
    "emptied": lambda raw: b"",
}


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_spool_names_its_silo_and_nothing_is_stored(place: MaskedPlace, kind: str, restarted: bool) -> None:
    base = place.models.initial()
    federation, digests = place.masked(1, base, t5_deltas(3, 1))
    damage(place, B, DAMAGE[kind])
    before = everything_of(place)
    there = place.reopened() if restarted else place
    with pytest.raises(UnusableUpdate, match=f"silo {B}") as caught:
        there.aggregate(1, base, federation, digests)
    assert caught.value.silo == B
    assert everything_of(place) == before


@pytest.mark.parametrize("suffix", [".delta", ".json"])
def test_lost_spool_names_its_silo(place: MaskedPlace, suffix: str) -> None:
    base = place.models.initial()
    federation, digests = place.masked(1, base, t5_deltas(3, 1))
    next((place.state / "spools").rglob(f"{C}{suffix}")).unlink()
    with pytest.raises(UnusableUpdate) as caught:
        place.aggregate(1, base, federation, digests)
    assert caught.value.silo == C


def test_vector_of_another_kind_or_digest_is_not_summed(place: MaskedPlace) -> None:
    """What was committed in its place is an update of another layout, which no mask fits."""
    base = place.models.initial()
    federation, digests = place.masked(1, base, t5_deltas(3, 1))
    key, raw = place.key(), np.ones(LAYOUT.parameters, dtype="<f4").tobytes()
    header = update_header(key, base, LAYOUT, raw, chunk_bytes=1 << 20)
    place.spool(key, A, header, raw, LAYOUT)
    with pytest.raises(UnusableUpdate, match="lost or replaced") as caught:
        place.aggregate(1, base, federation, digests)
    assert caught.value.silo == A
    with pytest.raises(UnusableUpdate, match="wrong model shape") as caught:
        place.aggregate(1, base, federation, {**digests, A: header.manifest.digest})
    assert caught.value.silo == A


def test_sum_for_another_model_is_refused(tmp_path: Path) -> None:
    """A record of another plan's tensors never reaches a model, whatever led to it."""
    place = MaskedPlace.at(tmp_path / "state")
    base = place.models.initial()
    federation, digests = place.masked(1, base, t5_deltas(3, 1))
    unmask = federation.unmasking
    fewer = Ranges(weight_cap=unmask.fixed_point.ranges.weight_cap, tensors=unmask.fixed_point.ranges.tensors[:1])
    other = replace(unmask, fixed_point=replace(unmask.fixed_point, ranges=fewer))
    key = place.key()
    for name in digests:
        raw = bytes(4 * other.fixed_point.words)
        header = update_header(key, base, masked_layout(other.fixed_point.words), raw)
        place.spool(key, name, header, raw, masked_layout(other.fixed_point.words))
        digests[name] = header.manifest.digest
    with pytest.raises(StateError, match=re.escape(f"model {base} has {LAYOUT.parameters}")):
        place.aggregator().masks.unmasked(key, base, other, digests)


def test_sum_of_other_silos_than_the_survivors_is_refused(place: MaskedPlace) -> None:
    base = place.models.initial()
    federation, digests = place.masked(1, base, t5_deltas(4, 1))
    fewer = {name: digest for name, digest in digests.items() if name != B}
    with pytest.raises(StateError, match=f"vectors of {A}, {C}, silo-03 came for a sum of {A}, {B}, {C}, silo-03"):
        place.aggregate(1, base, federation, fewer)


def test_mean_that_blows_the_model_up_is_told_with_its_remedy(tmp_path: Path) -> None:
    """Nobody can be blamed, since nobody's delta is seen; model and state stay."""
    place = MaskedPlace.at(
        tmp_path / "state",
        {"max_delta_norm": 0.0, "weighting": "equal"},
        unchecked={"server_learning_rate": 1e30, "delta_bound": 1e20},
    )
    base = place.models.initial()
    federation, digests = place.masked(1, base, constant_deltas([1e19] * 3))
    before = everything_of(place)
    with pytest.raises(ConfigurationError, match="lower learning_rate"):
        place.aggregate(1, base, federation, digests)
    assert everything_of(place) == before


def test_damaged_base_model_is_nobodys_fault_and_named(place: MaskedPlace) -> None:
    base = place.models.initial()
    federation, digests = place.masked(1, base, t5_deltas(3, 1))
    path = place.state / "models" / f"{base}.safetensors"
    path.write_bytes(flipped(path.stat().st_size // 2)(path.read_bytes()))
    with pytest.raises(IntegrityError, match=re.escape(str(path))) as caught:
        place.aggregate(1, base, federation, digests)
    assert not isinstance(caught.value, UnusableUpdate)


# --- memory and threads


def test_memory_does_not_grow_with_the_number_of_silos(place: MaskedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(SlabBuffer):
        def __init__(self, size: int, device: torch.device) -> None:
            super().__init__(size, device)
            made.append(size)

    base = place.models.initial()
    rounds = {count: place.masked(count, base, constant_deltas([1e-3] * count)) for count in (3, 9)}
    monkeypatch.setattr(slab_buffers, "SlabBuffer", Counted)
    bytes_made = []
    for count, (federation, digests) in rounds.items():
        assert place.aggregate(count, base, federation, digests).outcome is Outcome.APPLIED
        bytes_made.append(sum(made))
        made.clear()
    assert bytes_made[0] == bytes_made[1] > 0


def test_no_thread_is_left_whatever_happens(place: MaskedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    base = place.models.initial()
    federation, digests = place.masked(1, base, t5_deltas(3, 1))

    def full_disk(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("pwrite", "posix_fallocate"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, full_disk)
            with pytest.raises(StorageError, match="No space left on device"):
                place.aggregate(1, base, federation, digests)
    damage(place, C, flipped(SIZE // 2))
    with pytest.raises(UnusableUpdate):
        place.aggregate(1, base, federation, digests)
    assert [thread.name for thread in threading.enumerate() if thread.name == "slabs"] == []
