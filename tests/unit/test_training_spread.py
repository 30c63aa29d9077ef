"""A sum of deltas whose numbers are all of one size could be taken apart; deltas that are spread tell no more than their share.

The attack knows the weights and the size of a step, which is more than a coordinator has: at each coordinate it takes the signs whose
weighted sum is nearest. `cosine` is what it finds beside what it looks for; `share` is what the plain sum has in common with a part.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from silo_agent.training.spread import DRAWN_TOGETHER, MOST_ALIKE, Spread, alike
from tests.unit.test_comparable_training import SILOS, masked_plan, part

KEY = bytes(range(32))
WEIGHTS = np.array([1200.0, 500.0, 250.0, 120.0])

Floats = NDArray[np.float32]


def normal(count: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal(count).astype("<f4")


def deltas(**training: Any) -> list[Floats]:
    """Of four silos, by the true trainer."""
    plan = masked_plan({"dropout": 0.0, "batch_size": 64, "learning_rate": 1e-4, **training})
    server = plan.plan.aggregation.model_dump_json()
    sections = [plan.plan.training.for_silo(name).model_dump_json() for name in SILOS]
    return [part(at, section, server).delta.numpy().astype("<f4") for at, section in enumerate(sections)]


def cosine(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def found(parts: list[Floats], size: float) -> list[float]:
    """How near the attack comes to each part."""
    signs = np.array(list(product((-1.0, 1.0), repeat=len(parts))))
    levels = signs @ WEIGHTS * size
    total = np.sum([weight * one.astype(np.float64) for weight, one in zip(WEIGHTS, parts, strict=True)], axis=0)
    nearest = np.abs(total[:, None] - levels).argmin(axis=1)
    return [cosine(signs[nearest, at], one) for at, one in enumerate(parts)]


def share(parts: list[Floats]) -> list[float]:
    """What a sum of normal variables of these lengths has in common with each."""
    lengths = WEIGHTS * [np.linalg.norm(one) for one in parts]
    return [float(one) for one in lengths / np.linalg.norm(lengths)]


def spread(parts: list[Floats]) -> list[Floats]:
    copies = [one.copy() for one in parts]
    for at, one in enumerate(copies):
        Spread(bytes([at]) * 32).over(one, 0)
    return copies


@pytest.mark.parametrize("epochs", [1, 3])
def test_attack_a_sum_after_few_steps_of_adamw_is_not_taken_apart(epochs: int) -> None:
    raw = deltas(optimizer="adamw", learning_rate_schedule="constant", epochs=epochs)
    moved = np.all([one != 0 for one in raw], axis=0)
    raw = [one[moved] for one in raw]
    assert min(map(alike, raw)) > 0.9
    assert min(found(raw, 1e-4 * epochs)) > 0.9, "the attack finds nothing that is to be mended"
    parts = spread(raw)
    # Signs of parts that are correlated tell of each other, as in any sum.
    together = [cosine(np.sum(np.array(parts) * WEIGHTS[:, None], axis=0), one) for one in parts]
    for one, own, sums in zip(found(parts, 1e-4 * epochs), share(parts), together, strict=True):
        assert one < max(own, sums) + 0.05


def test_attack_parts_that_have_nothing_in_common_are_worth_their_share() -> None:
    signs = np.sign(np.random.default_rng(5).standard_normal((4, 100_000))).astype("<f4")
    assert min(found(list(signs), 1.0)) == pytest.approx(1.0)
    parts = spread(list(signs))
    for one, own in zip(found(parts, 1.0), share(parts), strict=True):
        assert one < own + 0.05


def test_attack_a_sum_does_not_tell_the_weights_by_its_levels() -> None:
    signs = np.sign(np.random.default_rng(5).standard_normal((4, 100_000))).astype("<f4")
    plain = np.sum(signs * WEIGHTS[:, None], axis=0).astype("<f4")
    assert len(np.unique(plain)) == 16, "of which the weights follow"
    total = np.sum(np.array(spread(list(signs))) * WEIGHTS[:, None], axis=0).astype("<f4")
    assert alike(total) < 1.1 * alike(normal(100_000))


def test_deltas_of_more_steps_stay_as_they_are() -> None:
    for one in deltas(optimizer="adamw", batch_size=4, epochs=6, learning_rate=1e-3)[2:]:
        before = one.copy()
        Spread(KEY).over(one, 0)
        assert np.array_equal(one, before)


def test_it_changes_no_mean_and_no_sign() -> None:
    values = np.sign(normal(200_000)) * np.float32(1e-3)
    before = values.copy()
    Spread(KEY).over(values, 0)
    assert np.array_equal(np.sign(values), np.sign(before))
    assert abs(float((values / before).mean()) - 1) < 0.01
    assert alike(values) < MOST_ALIKE


@given(
    begin=st.integers(0, 3 * DRAWN_TOGETHER),
    cuts=st.lists(st.integers(1, DRAWN_TOGETHER), min_size=1, max_size=4),
)
def test_a_number_is_spread_the_same_however_the_delta_is_cut(begin: int, cuts: list[int]) -> None:
    values = np.ones(sum(cuts), dtype="<f4")
    whole = values.copy()
    Spread(KEY).over(whole, begin)
    at, by_parts = 0, Spread(KEY)
    for count in cuts:
        by_parts.over(values[at : at + count], begin + at)
        at += count
    assert np.array_equal(values, whole)
    other = np.ones_like(whole)
    Spread(bytes(32)).over(other, begin)
    assert not np.array_equal(other, whole)


@pytest.mark.parametrize(
    ("values", "share_of_one_size"),
    [
        (np.zeros(7, dtype="<f4"), 0.0),
        (np.array([], dtype="<f4"), 0.0),
        (np.full(7, -2e-7, dtype="<f4"), 1.0),
        (np.array([0, 0, 1, -1, 8, 64], dtype="<f4"), 0.5),
        (np.array([0.99, 1.01] * 50, dtype="<f4"), 1.0),
        (np.concatenate([np.full(30, 3.0), normal(70)]).astype("<f4"), pytest.approx(0.33, abs=0.04)),
    ],
)
def test_how_many_numbers_are_of_one_size(values: Floats, share_of_one_size: Any) -> None:
    assert alike(values) == share_of_one_size


def test_a_tensor_of_any_shape_is_sampled_over_all_its_columns() -> None:
    """One in 32 columns is spread already: a sample of that column alone would not see the others."""
    matrix = np.full((1 << 14, 32), 1e-4, dtype="<f4")
    matrix[:, 0] = normal(1 << 14)
    assert alike(matrix.reshape(-1)) > 0.9


def test_a_tensor_is_spread_where_more_than_a_quarter_of_it_is_of_one_size() -> None:
    for alike_ones, changes in ((2_000, False), (4_000, True)):
        values = normal(10_000)
        values[:alike_ones] = 16.0
        before = values.copy()
        Spread(bytes(32)).over(values, 0)
        assert (values != before).any() == changes
