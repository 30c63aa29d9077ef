"""Aggregation over files: the same bits as on whole vectors, the same bits again after a crash, and no silo's fault
spreads."""

import errno
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lorica_coordinator.edges.sums.reducers.plain as plain_module
from lorica_coordinator.aggregation.delta_norm import norm_of, sum_of_squares
from lorica_coordinator.aggregation.round_arithmetic import aggregate_slab
from lorica_coordinator.aggregation.weighting import CohortWeights, SiloSummary, SiloWeight, WeightCaps, weigh
from lorica_coordinator.edges.sums.aggregator import device_for
from lorica_coordinator.rounds.updates import CommittedUpdate, Outcome
from lorica_coordinator.service.unusable import UnusableUpdate
from lorica_coordinator.vectors import slab_buffers
from lorica_coordinator.vectors.slab_buffers import SlabBuffer
from lorica_security.errors import ConfigurationError, IntegrityError, StorageError
from silo_wire.canonical import Digest
from silo_wire.int8_vectors.blocks import sum_of_squares as int8_squares
from silo_wire.int8_vectors.sizes import BLOCK_BYTES
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.server_step.server_optimizer import optimizer_named, slots
from tests.support import int8_by_hand
from tests.support.coordinator_edges import (
    TYPES,
    A,
    B,
    C,
    Vector,
    Workplace,
    content_of,
    make_plan,
    random_vector,
    stored_vector,
    travelling,
)

OPTIMIZERS: list[dict[str, Any]] = [
    {"server_optimizer": "sgd", "momentum": 0.0},
    {"server_optimizer": "sgd", "momentum": 0.9},
    {"server_optimizer": "adam", "server_learning_rate": 0.01},
    {"server_optimizer": "yogi", "server_learning_rate": 0.01},
    {"server_optimizer": "adagrad", "server_learning_rate": 0.01},
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlanBundle]:
    state = tmp_path_factory.mktemp("state")
    return state, make_plan(state)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, PlanBundle]]:
    """A plan whose models and updates travel in these types."""

    @cache
    def make(model: str, update: str) -> tuple[Path, PlanBundle]:
        state = tmp_path_factory.mktemp("state")
        return state, make_plan(state, overrides={"wire.model": model, "wire.update": update})

    return make


@pytest.fixture
def place(made: tuple[Path, PlanBundle], tmp_path: Path) -> Workplace:
    shutil.copytree(made[0] / "plans", tmp_path / "state" / "plans")
    return Workplace.at(tmp_path / "state", made[1])


def spoil(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


SENT = {A: (10, 1.0, 4096), B: (100, 0.5, 16 << 10), C: (7, 2.5, 10_000)}
"""Examples, loss reduction and chunk size in bytes of each silo's update."""


def norm_in_chunks(content: bytes, dtype: str, step: int) -> float:
    if dtype == "int8":
        step -= step % BLOCK_BYTES
        return norm_of(int8_squares(content[begin : begin + step]) for begin in range(0, len(content), step))
    return norm_of(sum_of_squares(content[begin : begin + step], dtype) for begin in range(0, len(content), step))


def deltas_of(place: Workplace, round_number: int = 1) -> dict[Any, Vector]:
    return {silo: random_vector(place.layout, 10 * round_number + i) for i, silo in enumerate((A, B, C))}


def sent(place: Workplace, round_number: int = 1, attempt: int = 1) -> list[CommittedUpdate]:
    """Three silos' updates of a round, of different sizes, loss reductions and chunk sizes."""
    key = place.key(round_number, attempt)
    return [
        place.send(key, silo, delta, examples=examples, reduction=reduction, chunk_bytes=chunk_bytes)
        for (silo, delta), (examples, reduction, chunk_bytes) in zip(
            deltas_of(place, round_number).items(), SENT.values(), strict=True
        )
    ]


def as_sent(place: Workplace, delta: Vector) -> Vector:
    """The delta as the coordinator gets it, in float32."""
    dtype = place.bundle.plan.wire.update
    if dtype == "int8":
        return int8_by_hand.read(as_bytes(place, delta))
    return torch.from_numpy(delta).to(TYPES[dtype]).float().numpy()


def as_bytes(place: Workplace, delta: Vector) -> bytes:
    return travelling(delta, place.bundle.plan.wire.update)


def master_of(place: Workplace, model: Digest) -> Vector:
    vector = place.models.master(model, place.models.state(model))
    return np.frombuffer(content_of(vector), dtype="<f4")


def expected_rounds(place: Workplace, changes: dict[str, Any], rounds: int) -> Vector:
    """The pure maths on whole vectors in memory: the model in float32."""
    section = AggregationSection.model_validate(changes)
    optimizer = optimizer_named(
        section.server_optimizer,
        learning_rate=section.server_learning_rate,
        momentum=section.momentum,
        beta1=section.beta1,
        beta2=section.beta2,
        tau=section.tau,
    )
    model = torch.from_numpy(master_of(place, place.models.initial()).copy())
    state = {name: torch.full_like(model, fill) for name, fill in slots(optimizer).items()}
    for round_number in range(1, rounds + 1):
        deltas = deltas_of(place, round_number)
        vectors = {silo: torch.from_numpy(as_sent(place, delta)) for silo, delta in deltas.items()}
        cohort = weigh(
            [
                SiloSummary(
                    silo=silo,
                    examples=SENT[silo][0],
                    loss_reduction=SENT[silo][1],
                    optimizer_steps=1,
                    delta_norm=norm_in_chunks(
                        as_bytes(place, deltas[silo]), place.bundle.plan.wire.update, SENT[silo][2]
                    ),
                )
                for silo in vectors
            ],
            weighting=section.weighs,
            caps=WeightCaps(
                max_weight=section.max_weight or None,
                max_weight_share=section.max_weight_share or None,
                max_delta_norm=section.max_delta_norm or None,
            ),
        )
        aggregate_slab(model, vectors.items(), cohort, optimizer, state, step_number=round_number)
    return model.numpy()


@pytest.mark.parametrize("slab_bytes", [4096, 10_004, 4 << 20])
@pytest.mark.parametrize("changes", OPTIMIZERS)
def test_slabs_give_the_bits_of_whole_vectors(place: Workplace, changes: dict[str, Any], slab_bytes: int) -> None:
    model = place.models.initial()
    for round_number in (1, 2):
        updates = sent(place, round_number)
        result = place.aggregator(changes, slab_bytes).aggregate(place.key(round_number), model, updates)
        assert result.outcome is Outcome.APPLIED
        model = result.model
    assert stored_vector(place.models, model).tobytes() == expected_rounds(place, changes, 2).tobytes()


@pytest.mark.parametrize("changes", OPTIMIZERS)
@pytest.mark.parametrize(
    ("model", "update"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "int8")],
)
def test_types_on_the_wire_change_what_travels_and_not_the_arithmetic(
    short: Any, tmp_path: Path, model: str, update: str, changes: dict[str, Any]
) -> None:
    state, bundle = short(model, update)
    shutil.copytree(state / "plans", tmp_path / "plans")
    place = Workplace.at(tmp_path, bundle)
    now = place.models.initial()
    for round_number in (1, 2):
        updates = sent(place, round_number)
        now = place.aggregator(changes, 10_004).aggregate(place.key(round_number), now, updates).model
    master = expected_rounds(place, changes, 2)
    assert master_of(place, now).tobytes() == master.tobytes()
    published = torch.from_numpy(master).to(TYPES[bundle.plan.wire.model])
    assert content_of(place.models.vector(now)) == published.view(torch.uint8).numpy().tobytes()
    assert place.models.manifest(now).layout_digest == bundle.model_layout.digest
    assert place.models.state(now).steps == 2


def test_master_goes_on_where_rounding_would_stand_still(short: Any, tmp_path: Path) -> None:
    """Steps of a tenth of what bfloat16 can tell apart: ten of them show, because the master keeps the others."""
    state, bundle = short("bfloat16", "float32")
    shutil.copytree(state / "plans", tmp_path / "plans")
    place = Workplace.at(tmp_path, bundle)
    base = now = place.models.initial()
    start = master_of(place, base).copy()
    tenth = np.abs(start) * np.float32(2.0**-7 / 10)
    tenth[0] = 1.0  # so that no model is the one before
    for round_number in range(1, 11):
        updates = [place.send(place.key(round_number), A, tenth)]
        now = place.aggregator({"momentum": 0.0}).aggregate(place.key(round_number), now, updates).model
    moved = stored_vector(place.models, now) - stored_vector(place.models, base)
    assert np.mean(np.abs(moved[1:]) > 0) > 0.9
    assert np.allclose(master_of(place, now)[1:], start[1:] + 10 * tenth[1:], rtol=1e-5)


def test_model_that_leaves_the_range_of_bfloat16_names_a_silo(short: Any, tmp_path: Path) -> None:
    state, bundle = short("bfloat16", "float32")
    shutil.copytree(state / "plans", tmp_path / "plans")
    place = Workplace.at(tmp_path, bundle)
    huge = np.full(place.layout.parameters, 3.4e38, dtype="<f4")  # a float32, and beyond the last bfloat16
    updates = [place.send(place.key(), A, huge)]
    with pytest.raises(UnusableUpdate, match=f"the delta of silo {A} .* rounds to infinity in bfloat16") as caught:
        place.aggregator({"max_delta_norm": 0.0}).aggregate(place.key(), place.models.initial(), updates)
    assert caught.value.silo == A
    assert len(list((tmp_path / "models").glob("*/*.safetensors"))) == 1


@pytest.mark.parametrize("damage", [spoil, Path.unlink])
def test_damaged_master_is_nobodys_fault_and_named(short: Any, tmp_path: Path, damage: Any) -> None:
    state, bundle = short("bfloat16", "bfloat16")
    shutil.copytree(state / "plans", tmp_path / "plans")
    place = Workplace.at(tmp_path, bundle)
    base, updates = place.models.initial(), sent(place)
    path = next((tmp_path / "models").rglob("master.f32"))
    damage(path)
    with pytest.raises((IntegrityError, StorageError), match=re.escape(str(path))) as caught:
        place.aggregator().aggregate(place.key(), base, updates)
    assert not isinstance(caught.value, UnusableUpdate)


def test_caps_reach_the_sum(place: Workplace) -> None:
    changes = {"max_weight": 20.0, "max_weight_share": 0.5, "max_delta_norm": 0.1}
    result = place.aggregator(changes).aggregate(place.key(), place.models.initial(), sent(place))
    assert stored_vector(place.models, result.model).tobytes() == expected_rounds(place, changes, 1).tobytes()
    assert all(weight.capped for weight in result.weights)


def test_weights_are_examples_times_loss_reduction(place: Workplace) -> None:
    result = place.aggregator().aggregate(place.key(), place.models.initial(), sent(place))
    assert [(weight.silo, weight.weight) for weight in result.weights] == [(A, 10.0), (B, 50.0), (C, 17.5)]
    assert [weight.share for weight in result.weights] == pytest.approx([10 / 77.5, 50 / 77.5, 17.5 / 77.5])
    assert not result.fallback
    assert not any(weight.capped for weight in result.weights)


def test_no_loss_reduction_falls_back_to_examples_and_says_so(place: Workplace) -> None:
    updates = [
        place.send(place.key(), silo, random_vector(place.layout, examples), examples=examples, reduction=0.0)
        for silo, examples in ((A, 30), (B, 10))
    ]
    result = place.aggregator().aggregate(place.key(), place.models.initial(), updates)
    assert result.fallback
    assert [weight.share for weight in result.weights] == [0.75, 0.25]


def test_order_of_arrival_changes_nothing(place: Workplace) -> None:
    updates = sent(place)
    aggregator = place.aggregator()
    base = place.models.initial()
    results = {aggregator.aggregate(place.key(), base, order) for order in (tuple(updates), tuple(updates[::-1]))}
    assert len(results) == 1


def test_one_silo_gives_its_own_delta(place: Workplace) -> None:
    delta = random_vector(place.layout, 5)
    update = place.send(place.key(), A, delta)
    base = place.models.initial()
    result = place.aggregator({"momentum": 0.0}).aggregate(place.key(), base, [update])
    assert np.array_equal(stored_vector(place.models, result.model), stored_vector(place.models, base) + delta)


def test_tied_embedding_moves_once(place: Workplace) -> None:
    """Four modules share it; counting each would move it four times as far."""
    delta = np.zeros(place.layout.parameters, dtype="<f4")
    spans = {tensor.name: (begin, begin + tensor.elements) for tensor, begin in place.layout.placed()}
    begin, end = spans["decoder.embed_tokens.weight"]
    delta[begin:end] = 0.5
    base = place.models.initial()
    update = place.send(place.key(), A, delta)
    assert update.delta_norm == pytest.approx(0.5 * (end - begin) ** 0.5)
    result = place.aggregator({"momentum": 0.0}).aggregate(place.key(), base, [update])
    moved = stored_vector(place.models, result.model) - stored_vector(place.models, base)
    assert np.allclose(moved[begin:end], 0.5, atol=1e-6)
    assert not moved[:begin].any()
    assert not moved[end:].any()


@pytest.mark.parametrize("changes", OPTIMIZERS)
def test_round_that_is_done_again_gives_the_same_bits(place: Workplace, changes: dict[str, Any]) -> None:
    first = place.aggregator(changes).aggregate(place.key(1), place.models.initial(), sent(place, 1))
    updates = sent(place, 2)
    once = place.aggregator(changes).aggregate(place.key(2), first.model, updates)
    reopened = Workplace.at(place.state, place.bundle)
    again = reopened.aggregator(changes).aggregate(place.key(2), first.model, updates)
    assert again == once
    assert reopened.models.state(once.model).steps == 2
    assert reopened.models.state(first.model).steps == 1


class Crash(BaseException):
    """The process ends here."""


def crash_after(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The next call of Path.`name` on a file of the result ends the process before it acts."""
    original = getattr(Path, name)

    def crashing(self: Path, *arguments: Any, **named: Any) -> Any:
        if self.parent.name.startswith(".new-"):
            raise Crash
        return original(self, *arguments, **named)

    monkeypatch.setattr(Path, name, crashing)


@pytest.mark.parametrize("step", ["rename", "replace"])
def test_crash_between_state_and_model_harms_neither(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """`rename` publishes the optimizer state, `replace` the model; whichever is lost, the round is done again."""
    changes = {"momentum": 0.9}
    first = place.aggregator(changes).aggregate(place.key(1), place.models.initial(), sent(place, 1))
    updates = sent(place, 2)
    with monkeypatch.context() as patched:
        crash_after(patched, step)
        with pytest.raises(Crash):
            place.aggregator(changes).aggregate(place.key(2), first.model, updates)
    reopened = Workplace.at(place.state, place.bundle)
    result = reopened.aggregator(changes).aggregate(place.key(2), first.model, updates)
    assert stored_vector(reopened.models, result.model).tobytes() == expected_rounds(place, changes, 2).tobytes()
    assert reopened.models.state(result.model).steps == 2


def test_zero_weight_changes_no_byte(place: Workplace) -> None:
    first = place.aggregator().aggregate(place.key(1), place.models.initial(), sent(place, 1))
    updates = sent(place, 2)
    before = {path: path.read_bytes() for path in (place.state / "models").rglob("*") if path.is_file()}
    nothing = CohortWeights(
        silos=tuple(
            SiloWeight(silo=silo, raw_weight=0.0, weight=0.0, share=0.0, delta_scale=1.0, caps=frozenset())
            for silo in (A, B, C)
        ),
        total=0.0,
        fallback=False,
    )
    reducer = place.aggregator().updates
    assert isinstance(reducer, plain_module.Plain)
    result = reducer.weighed(place.key(2), first.model, updates, nothing)
    assert (result.outcome, result.model) == (Outcome.ZERO_WEIGHT, first.model)
    assert {path: path.read_bytes() for path in (place.state / "models").rglob("*") if path.is_file()} == before


# --- one silo's fault


@pytest.mark.parametrize("damage", [spoil, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
@pytest.mark.parametrize("suffix", [".delta", ".json"])
def test_damaged_spool_names_its_silo_and_the_others_go_on(place: Workplace, damage: Any, suffix: str) -> None:
    base = place.models.initial()
    updates = sent(place)
    damage(next((place.state / "spools").rglob(f"{B}{suffix}")))
    with pytest.raises(UnusableUpdate, match=f"silo {B}") as caught:
        place.aggregator().aggregate(place.key(), base, updates)
    assert caught.value.silo == B
    rest = [update for update in updates if update.silo != B]
    assert place.aggregator().aggregate(place.key(), base, rest).outcome is Outcome.APPLIED


def test_update_of_another_digest_than_committed_is_not_summed(place: Workplace) -> None:
    updates = sent(place)
    place.send(place.key(), B, random_vector(place.layout, 99))
    with pytest.raises(UnusableUpdate) as caught:
        place.aggregator().aggregate(place.key(), place.models.initial(), updates)
    assert caught.value.silo == B


def test_absurd_loss_reduction_names_its_silo(place: Workplace) -> None:
    updates = sent(place)
    told = replace(updates[1].summary, loss_max=1e300, loss_first=1e300)
    with pytest.raises(UnusableUpdate, match=f"silo {B} reports loss reduction 1e\\+300"):
        place.aggregator().aggregate(
            place.key(), place.models.initial(), [updates[0], replace(updates[1], summary=told), updates[2]]
        )


def test_delta_that_blows_the_model_up_names_its_silo(place: Workplace) -> None:
    """Finite values, but the step leaves float32: the silo with the longest delta is left out, not the round lost."""
    base = place.models.initial()
    huge = np.full(place.layout.parameters, 3e38, dtype="<f4")
    updates = [*sent(place)[:2], place.send(place.key(), C, huge, examples=1000, reduction=1.0)]
    aggregator = place.aggregator({"server_learning_rate": 2.0, "max_delta_norm": 0.0})
    with pytest.raises(UnusableUpdate, match=f"the delta of silo {C} has norm") as caught:
        aggregator.aggregate(place.key(), base, updates)
    assert caught.value.silo == C
    assert aggregator.aggregate(place.key(), base, updates[:2]).outcome is Outcome.APPLIED


# --- our own files


def test_damaged_base_model_is_nobodys_fault_and_named(place: Workplace) -> None:
    base = place.models.initial()
    updates = sent(place)
    path = next((place.state / "models").rglob(f"{base}.safetensors"))
    spoil(path)
    with pytest.raises(IntegrityError, match=re.escape(str(path))) as caught:
        place.aggregator().aggregate(place.key(), base, updates)
    assert not isinstance(caught.value, UnusableUpdate)


def after_first_round(place: Workplace) -> tuple[Digest, Path]:
    first = place.aggregator().aggregate(place.key(1), place.models.initial(), sent(place, 1))
    return first.model, next((place.state / "models").rglob(f"{first.model}.optimizer"))


@pytest.mark.parametrize("name", ["momentum.f32", "state.json"])
@pytest.mark.parametrize("damage", [spoil, Path.unlink])
def test_damaged_optimizer_state_is_named(place: Workplace, name: str, damage: Any) -> None:
    model, folder = after_first_round(place)
    damage(folder / name)
    with pytest.raises((IntegrityError, StorageError), match=re.escape(str(folder / name))) as caught:
        place.aggregator().aggregate(place.key(2), model, sent(place, 2))
    assert not isinstance(caught.value, UnusableUpdate)


def test_lost_optimizer_state_is_not_begun_anew_in_silence(place: Workplace) -> None:
    model, folder = after_first_round(place)
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match=re.escape(str(folder))):
        place.aggregator().aggregate(place.key(2), model, sent(place, 2))


def test_state_of_another_optimizer_is_refused(place: Workplace) -> None:
    model, _ = after_first_round(place)
    with pytest.raises(IntegrityError, match="needs \\['first_moment', 'second_moment'\\]"):
        place.aggregator({"server_optimizer": "adam"}).aggregate(place.key(2), model, sent(place, 2))


# --- memory and device


def test_memory_does_not_grow_with_the_number_of_silos(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """All slabs lie in buffers that are made once for an aggregation."""
    made: list[int] = []

    class Counted(SlabBuffer):
        def __init__(self, size: int, device: torch.device) -> None:
            super().__init__(size, device)
            made.append(size)

    monkeypatch.setattr(slab_buffers, "SlabBuffer", Counted)
    updates = sent(place)
    bytes_made = []
    for count in (1, 3):
        place.aggregator().aggregate(place.key(), place.models.initial(), updates[:count])
        bytes_made.append(sum(made))
        made.clear()
    assert bytes_made[0] == bytes_made[1] > 0


def test_no_thread_is_left_whatever_happens(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    base = place.models.initial()
    updates = sent(place)
    place.aggregator().aggregate(place.key(), base, updates)
    spoil(next((place.state / "spools").rglob(f"{C}.delta")))
    with pytest.raises(UnusableUpdate):
        place.aggregator().aggregate(place.key(), base, updates)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full_disk)
        with pytest.raises(StorageError, match="No space left on device"):
            place.aggregator().aggregate(place.key(), base, updates[:2])
    with monkeypatch.context() as patched:
        patched.setattr(plain_module, "aggregate_slab", defect)
        with pytest.raises(ZeroDivisionError):
            place.aggregator().aggregate(place.key(), base, updates[:2])
    assert [thread.name for thread in threading.enumerate() if thread.name == "slabs"] == []


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def defect(*_: object, **__: object) -> None:
    raise ZeroDivisionError


def test_device_setting_is_honoured_or_refused() -> None:
    assert device_for("cpu") == torch.device("cpu")
    assert device_for("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    if torch.cuda.is_available():
        assert device_for("cuda").type == "cuda"
    else:
        with pytest.raises(ConfigurationError, match="no CUDA device is usable here: set device to 'auto' or 'cpu'"):
            device_for("cuda")


@pytest.mark.parametrize("slab_bytes", [0, 2, 4097])
def test_slab_size_is_checked(place: Workplace, slab_bytes: int) -> None:
    with pytest.raises(ValueError, match="slab_bytes"):
        place.aggregator(slab_bytes=slab_bytes)
