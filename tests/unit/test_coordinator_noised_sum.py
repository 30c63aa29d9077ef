"""Silo-level privacy at the coordinator: what one silo adds at most, noise that is bound to what it covers, and the
ledger before it."""

import asyncio
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lorica_coordinator.aggregation.noised_sum import NoisedSum
from lorica_coordinator.edges.database.state_json import STATE_VERSION, state_from_json, state_to_json
from lorica_coordinator.edges.sums.aggregator import Aggregator
from lorica_coordinator.edges.sums.noised_mean import NoisedMeanReader
from lorica_coordinator.edges.sums.reducers.noised import Noised
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger, release_statement
from lorica_coordinator.rounds.effects import DiscardUpdates, ModelMade, RoundAbandoned
from lorica_coordinator.rounds.events import Aggregated, BudgetExhausted
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.orders import waiting_for
from lorica_coordinator.rounds.phases.aggregating import SPENT
from lorica_coordinator.rounds.states import Finished as StateFinished
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome
from lorica_coordinator.service.unusable import BudgetSpent, UnusableUpdate
from lorica_security.errors import ConfigurationError, IntegrityError, StateError, WrongTime
from lorica_security.identifiers import SiloName
from lorica_security.noise.discrete_gaussian import SIGMA
from lorica_security.noise.noise_streams import BLOCK_ELEMENTS, NoiseStream, bound_key
from lorica_security.privacy.accounting import GaussianRelease
from silo_wire.canonical import digest_of
from silo_wire.messages import Finished, RoundKey
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.privacy import PrivacySection
from silo_wire.plans.sections.aggregation import AggregationSection
from tests.support.coordinator_edges import A, B, C, Workplace, make_plan, random_vector, round_key, stored_vector
from tests.support.coordinator_service import add_plan, make_coordinator_folder, running
from tests.support.rounds import AGGREGATING, FINISHED, T0

NORM, CAP, NOISE, DIVISOR = 0.5, 20.0, 3.0, 8
PRIVACY: dict[str, Any] = {
    "level": "silo",
    "target_epsilon": 8.0,
    "noise_multiplier": NOISE,
    "nominal_silos": DIVISOR,
    "max_noise_to_signal": 1e6,
}
SECTION: dict[str, Any] = {"max_delta_norm": NORM, "max_weight": CAP, "momentum": 0.0}
QUIET = {"initial": False, "every": 0, "last": False}


def arithmetic(parameters: int, noise: float = NOISE, norm: float = NORM) -> NoisedSum:
    return NoisedSum(clipping_norm=norm, weight_cap=CAP, noise_multiplier=noise, divisor=DIVISOR, parameters=parameters)


# --- what one silo adds


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    elements=st.integers(1, 300),
    scales=st.lists(st.floats(1e-20, 1e20), min_size=1, max_size=5),
    weights=st.lists(st.floats(0, 1e6), min_size=5, max_size=5),
    noise=st.floats(0.3, 1e4),
    left_out=st.integers(0, 4),
)
def test_neighbouring_sets_of_silos_differ_by_at_most_the_clipping_norm(
    seed: int, elements: int, scales: list[float], weights: list[float], noise: float, left_out: int
) -> None:
    """In whole steps, of which the noise's deviation is 2^30: the norm of the difference, exactly, as rational numbers
    are."""
    made = arithmetic(elements, noise)
    generator = np.random.default_rng(seed)
    deltas = [(generator.standard_t(2, elements) * scale).astype("<f4") for scale in scales]
    parts = [
        made.part(delta, made.factor(weight=weight, delta_norm=float(np.linalg.norm(delta.astype(float)))))
        for delta, weight in zip(deltas, weights, strict=False)
    ]
    total = np.sum(parts, axis=0)
    without = total - parts[left_out % len(parts)]
    squares = sum(int(step) ** 2 for step in total - without)
    assert math.isqrt(squares) <= SIGMA / noise  # C over the step


def test_an_honest_delta_within_the_norm_is_not_changed_but_for_its_weight() -> None:
    made = arithmetic(1000)
    delta = random_vector_of(1000, 1e-3)
    part = made.part(delta, made.factor(weight=CAP / 4, delta_norm=float(np.linalg.norm(delta))))
    assert np.allclose(part * made.step, delta / 4, atol=made.step)


def test_a_weight_above_the_cap_counts_as_the_cap() -> None:
    made = arithmetic(10)
    assert made.factor(weight=100 * CAP, delta_norm=0.1) == made.factor(weight=CAP, delta_norm=0.1) == 1.0
    assert made.factor(weight=0.0, delta_norm=0.0) == 0.0


@pytest.mark.parametrize("noise", [0.0, 1e-6, float("nan"), 1e9])
def test_constants_that_promise_nothing_are_refused(noise: float) -> None:
    with pytest.raises(ConfigurationError, match="noise_multiplier"):
        arithmetic(1_000_000_000, noise)


def random_vector_of(elements: int, scale: float) -> np.ndarray:
    return (np.random.default_rng(elements).normal(size=elements) * scale).astype("<f4")


# --- the noise


def test_the_same_block_has_the_same_noise_and_every_other_one_other_noise() -> None:
    stream = NoiseStream(bound_key(bytes(32), b"one"))
    other = NoiseStream(bound_key(bytes(32), b"two"))
    assert (stream.block(3, 1000) == NoiseStream(bound_key(bytes(32), b"one")).block(3, 1000)).all()
    for different in (
        stream.block(4, 1000),
        other.block(3, 1000),
        NoiseStream(bound_key(b"k" * 32, b"one")).block(3, 1000),
    ):
        assert abs(np.corrcoef(stream.block(3, 1000), different)[0, 1]) < 0.2
    with pytest.raises(ValueError, match="31 bytes"):
        bound_key(bytes(31), b"one")


# --- whole rounds over files


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PlanBundle]:
    state = tmp_path_factory.mktemp("state")
    return state, make_plan(state)


@pytest.fixture
def place(made: tuple[Path, PlanBundle], tmp_path: Path) -> Workplace:
    shutil.copytree(made[0] / "plans", tmp_path / "state" / "plans")
    return Workplace.at(tmp_path / "state", made[1])


def ledger_of(place: Workplace) -> ReleaseLedger:
    return ReleaseLedger(place.state / "privacy", clock=lambda: 1_800_000_000.5)


def private(
    place: Workplace, privacy: Mapping[str, Any] | None = None, *, slab_bytes: int = 16 << 10, **section: Any
) -> Aggregator:
    return Aggregator(
        AggregationSection.model_validate({**SECTION, **section}),
        models=place.models,
        spools=place.spools,
        update_dtype="float32",
        device=torch.device("cpu"),
        slab_bytes=slab_bytes,
        privacy=PrivacySection.model_validate({**PRIVACY, **(privacy or {})}),
        releases=ledger_of(place),
    )


def sent(place: Workplace, key: RoundKey, silos: Sequence[Any] = (A, B, C)) -> list[CommittedUpdate]:
    return [
        place.send(key, silo, random_vector(place.layout, seed, 1e-3), examples=5 * (seed + 1))
        for seed, silo in enumerate(silos)
    ]


def noised(place: Workplace, key: RoundKey, updates: Sequence[CommittedUpdate], **more: Any) -> AggregationResult:
    return private(place, **more).aggregate(key, place.models.initial(), updates)


def test_the_released_sum_is_the_clipped_weighed_one_with_noise_of_the_promised_size(place: Workplace) -> None:
    key = place.key()
    result = noised(place, key, sent(place, key))
    initial = place.models.initial()
    step = stored_vector(place.models, result.model).astype(float) - stored_vector(place.models, initial)
    clipped = np.zeros(place.layout.parameters)
    for seed in range(3):
        delta = random_vector(place.layout, seed, 1e-3).astype(float)
        clipped += delta * min(1.0, NORM / np.linalg.norm(delta)) * (5 * (seed + 1) / CAP)
    noise = (step - clipped / DIVISOR) * DIVISOR / (NOISE * NORM)
    count = len(noise)
    assert abs(noise.mean()) < 5 / math.sqrt(count)
    assert abs(noise.var() - 1) < 5 * math.sqrt(2 / count)
    assert stats.kstest(noise, "norm").pvalue > 1e-6
    assert result.outcome is Outcome.APPLIED


def test_of_single_silos_nothing_is_told(place: Workplace) -> None:
    key = place.key()
    result = noised(place, key, sent(place, key))
    assert (result.weights, result.weight_sum, result.fallback) == ((), 0.0, False)


def test_a_redo_of_the_same_set_gives_the_same_bits_and_is_one_release(place: Workplace) -> None:
    key = place.key()
    updates = sent(place, key)
    first = noised(place, key, updates)
    again = noised(place, key, list(reversed(updates)), slab_bytes=20 << 10)
    assert again.model == first.model
    assert len(ledger_of(place).kept.entries()) == 1


def test_another_set_of_the_same_attempt_has_other_noise_and_is_another_release(place: Workplace) -> None:
    key = place.key()
    updates = sent(place, key)
    whole, less = noised(place, key, updates), noised(place, key, updates[:2])
    assert len(ledger_of(place).kept.entries()) == 2
    one, other = (stored_vector(place.models, result.model).astype(float) for result in (whole, less))
    difference = (one - other) * DIVISOR / (NOISE * NORM)
    assert difference.var() == pytest.approx(2, rel=0.1)  # of two noises: had they been the same, C alone would be left


@pytest.mark.parametrize("edited", ["shorter than it is", "no norm at all", "counted twice", "twice by other names"])
def test_a_state_that_somebody_edited_gets_no_delta_past_the_clipping(place: Workplace, edited: str) -> None:
    """Who can write the database has no key of an update, and chooses what the state says of it."""
    key = place.key()
    updates = sent(place, key)
    if edited == "counted twice":
        with pytest.raises(IntegrityError, match="has two updates of silo"):
            noised(place, key, [*updates, updates[0]])
    elif edited == "twice by other names":
        alias = SiloName(f"../{key.round}-{key.attempt}/{A}")
        with pytest.raises(UnusableUpdate, match="is not allowed") as refused:
            noised(place, key, [*updates, replace(updates[0], silo=alias)])
        assert refused.value.silo == alias
    else:
        norm = 0.0 if edited == "no norm at all" else updates[0].delta_norm / 100
        with pytest.raises(UnusableUpdate, match="another norm than was measured") as refused:
            noised(place, key, [replace(updates[0], delta_norm=norm), *updates[1:]])
        assert refused.value.silo == A
    assert not ledger_of(place).kept.entries()


@pytest.mark.parametrize("changed", ["round", "plan", "federation", "model", "update", "factor", "silo"])
def test_noise_is_bound_to_all_that_a_release_is_of(changed: str) -> None:
    key = round_key(digest("plan"))
    parts = [(A, digest("a"), 0.5), (B, digest("b"), 0.25)]
    before = release_statement(key, digest("model"), parts)
    assert before == release_statement(replace(key, attempt=2), digest("model"), reversed(parts))
    after = {
        "round": lambda: release_statement(replace(key, round=2), digest("model"), parts),
        "plan": lambda: release_statement(replace(key, plan=digest("other")), digest("model"), parts),
        "federation": lambda: release_statement(replace(key, federation="south"), digest("model"), parts),
        "model": lambda: release_statement(key, digest("other"), parts),
        "update": lambda: release_statement(key, digest("model"), [(A, digest("c"), 0.5), parts[1]]),
        "factor": lambda: release_statement(key, digest("model"), [(A, digest("a"), 0.5000001), parts[1]]),
        "silo": lambda: release_statement(key, digest("model"), [(C, digest("a"), 0.5), parts[1]]),
    }[changed]()
    assert bound_key(bytes(32), after) != bound_key(bytes(32), before)


def digest(text: str) -> Any:
    return digest_of(text.encode())


def test_the_release_is_in_the_ledger_before_there_is_a_model(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = place.key()
    updates = sent(place, key)

    def crash(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(NoisedMeanReader, "read_into", crash)
        with pytest.raises(KeyboardInterrupt):
            noised(place, key, updates)
    (entry,) = ledger_of(place).kept.entries()
    assert (entry.mechanism, entry.release, entry.round) == ("delta", GaussianRelease(NOISE), 1)
    noised(place, key, updates)
    assert ledger_of(place).kept.entries() == (entry,)


def test_a_release_beyond_what_the_plan_promises_is_refused_and_the_one_before_is_the_last(place: Workplace) -> None:
    section = PrivacySection.model_validate(PRIVACY)
    both = {"target_epsilon": section.epsilon(rounds=2, weighted=False) * 1.0001}
    updates = [sent(place, place.key(number)) for number in (1, 2, 3)]
    assert not noised(place, place.key(1), updates[0], privacy=both).last
    assert noised(place, place.key(2), updates[1], privacy=both).last
    with pytest.raises(BudgetSpent, match=r"target_epsilon is .*: 2 were released"):
        noised(place, place.key(3), updates[2], privacy=both)
    assert noised(place, place.key(2), updates[1], privacy=both).last  # what was released may be made again
    assert len(ledger_of(place).kept.entries()) == 2


def test_secret_and_ledger_are_private_and_a_lost_secret_is_noticed(place: Workplace) -> None:
    key = place.key()
    updates = sent(place, key)
    noised(place, key, updates)
    root = place.state / "privacy" / "root"
    assert len(root.read_bytes()) == 32
    assert root.stat().st_mode & 0o077 == (place.state / "privacy" / "ledger").stat().st_mode & 0o077 == 0
    root.unlink()
    with pytest.raises(IntegrityError, match="root is missing beside a ledger"):
        noised(place, key, updates)


def test_nothing_is_noised_without_a_ledger(place: Workplace) -> None:
    bare = private(place)
    assert isinstance(bare.updates, Noised)
    bare.updates._releases = None
    with pytest.raises(StateError, match="no ledger"):
        bare.aggregate(place.key(), place.models.initial(), sent(place, place.key()))


def test_noise_blocks_and_slabs_need_not_agree(place: Workplace) -> None:
    """A vector of more than two blocks, read in stretches that end nowhere near them."""
    elements = 2 * BLOCK_ELEMENTS + 777
    stream = NoiseStream(bytes(32))
    reads = []
    for stretch in (elements, 50_001):
        reader = NoisedMeanReader([], [], arithmetic=arithmetic(elements), noise=stream, threads=2)
        out = np.empty(elements, dtype="<f4")
        for first in range(0, elements, stretch):
            reader.read_into(out[first : first + stretch].view(np.uint8).data)
        reader.close()
        reads.append(out.tobytes())
    assert reads[0] == reads[1]


# --- the end of a plan


def test_the_last_release_ends_a_plan_before_its_last_round() -> None:
    result = AggregationResult(model=digest("next"), outcome=Outcome.APPLIED, weights=(), last=True)
    event = Aggregated(now=T0, key=AGGREGATING.key, result=result, signature=b"s" * 64)
    assert AGGREGATING.round < AGGREGATING.course.terms.rounds
    after, effects = step(AGGREGATING, event)
    assert isinstance(after, StateFinished)
    assert (after.course.model, after.reason) == (digest("next"), SPENT)
    assert waiting_for(after) == SPENT
    assert any(isinstance(effect, ModelMade) for effect in effects)
    more, _ = step(AGGREGATING, replace(event, result=replace(result, last=False)))
    assert not isinstance(more, StateFinished)


def test_a_budget_that_is_exhausted_ends_a_plan_with_the_model_so_far() -> None:
    event = BudgetExhausted(now=T0, key=AGGREGATING.key, reason="epsilon 8.1 of 8")
    after, effects = step(AGGREGATING, event)
    assert isinstance(after, StateFinished)
    assert after.course.model == AGGREGATING.course.model
    (abandoned,) = (effect for effect in effects if isinstance(effect, RoundAbandoned))
    assert abandoned.reason == "epsilon 8.1 of 8"
    assert any(isinstance(effect, DiscardUpdates) for effect in effects)
    with pytest.raises(WrongTime):
        step(AGGREGATING, replace(event, key=replace(AGGREGATING.key, attempt=2)))


def test_why_a_plan_ended_survives_a_restart() -> None:
    ended = replace(FINISHED, reason=SPENT)
    text = state_to_json(ended, now=0.0)
    assert state_from_json(version=STATE_VERSION, phase="finished", text=text, where="state", now=0.0) == ended


# --- the service


async def run_noised(folder: Path, before: int, rounds: int = 2) -> tuple[StateFinished, list[Any], Any]:
    """A plan whose epsilon is that of its rounds, of which `before` other sums were released already."""
    make_coordinator_folder(folder)
    section = PrivacySection.model_validate(PRIVACY)
    sections: dict[str, Any] = {
        "schedule": {"rounds": rounds, "min_silos": 2},
        "evaluation": QUIET,
        "aggregation": SECTION,
        "privacy": {**PRIVACY, "target_epsilon": section.epsilon(rounds=rounds, weighted=False)},
    }
    plan = add_plan(folder, "noised", **sections)
    releases = ReleaseLedger(folder / "privacy")
    releases.noise_key(b"")
    for number in range(before):
        releases.enter(round_key(plan.digest), b"another set %d" % number, plan.privacy)
    async with running(folder) as coordinator:
        silos = [await coordinator.enrolled(name) for name in ("bank-a", "bank-b")]
        await coordinator.service.start_plan("noised")
        orders = await asyncio.gather(*(silo.work(coordinator.service) for silo in silos))
        assert all(isinstance(seen[-1], Finished) for seen in orders)
        state = coordinator.service._loop.state
        assert isinstance(state, StateFinished)
        told = [
            sample.name
            for family in coordinator.metrics.registry.collect()
            for sample in family.samples
            if "silo" in sample.labels
        ]
        rows = list(coordinator.store.rounds(plan.digest, 0))
    assert len(releases.kept.entries()) == rounds
    return state, rows, told


async def test_a_plan_runs_noised_and_tells_no_metric_of_a_silo(tmp_path: Path) -> None:
    state, rows, told = await run_noised(tmp_path / "coordinator", before=0)
    assert [row.outcome for row in rows] == ["applied", "applied"]
    assert state.reason == ""
    assert not any(silo.weight or silo.share for row in rows for silo in row.silos)
    assert set(told) == {"lorica_enrolled_silo_last_seen_timestamp_seconds", "lorica_enrolled_silo_connected"}, (
        "whether it is there, alone"
    )


async def test_a_plan_ends_with_the_last_round_that_its_epsilon_allows(tmp_path: Path) -> None:
    """After another set of one attempt was released, which a crash can lead to."""
    state, rows, _ = await run_noised(tmp_path / "coordinator", before=1)
    assert [row.outcome for row in rows] == ["applied"]
    assert state.reason == SPENT


async def test_a_plan_whose_epsilon_is_spent_releases_nothing_more(tmp_path: Path) -> None:
    state, rows, _ = await run_noised(tmp_path / "coordinator", before=2)
    assert [(row.outcome, row.model) for row in rows] == [("abandoned", state.course.model)]
    assert "2 were released" in rows[0].detail
    assert state.reason == SPENT
