"""A sum of deltas whose numbers are all of one size could be taken apart; deltas that are spread tell no more than
their share.

So could the rows and columns that one step reached: their size is a public function of that step and of how many steps
there were.

The attack knows the weights and the size of a step, which is more than a coordinator has: at each coordinate it takes
the signs whose weighted sum is nearest. `cosine` is what it finds beside what it looks for; `share` is what the plain
sum has in common with a part.
"""

import copy
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.model.model import bind, layout_of
from silo_agent.training.model.vector_file import VectorReader
from silo_agent.training.update.client_update import Feedback, write_update
from silo_agent.training.update.residual import Residuals
from silo_agent.training.update.spread import DRAWN_TOGETHER, MOST_ALIKE, Spread, alike
from silo_wire.canonical import digest_of
from silo_wire.manifest import TensorSpec
from silo_wire.plans.sections.training import TrainingSection
from tests.support.tiny_t5 import random_model, write_model
from tests.support.undisturbed_training import train_undisturbed
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


def over(spread: Spread, values: Floats, begin: int = 0) -> None:
    """`values` as a piece of a long tensor of one dimension."""
    spread.over(values, begin, TensorSpec("vector", (1 << 30,)), 0)


def over_matrix(spread: Spread, matrix: Floats) -> None:
    spread.over(matrix.reshape(-1), 0, TensorSpec("matrix", matrix.shape), 0)


def spread(parts: list[Floats]) -> list[Floats]:
    copies = [one.copy() for one in parts]
    for at, one in enumerate(copies):
        over(Spread(bytes([at]) * 32), one)
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
        over(Spread(KEY), one)
        assert np.array_equal(one, before)


def test_it_changes_no_mean_and_no_sign() -> None:
    values = np.sign(normal(200_000)) * np.float32(1e-3)
    before = values.copy()
    over(Spread(KEY), values)
    assert np.array_equal(np.sign(values), np.sign(before))
    assert abs(float((values / before).mean()) - 1) < 0.01
    assert alike(values) < MOST_ALIKE


@given(
    begin=st.integers(0, 3 * DRAWN_TOGETHER),
    cuts=st.lists(st.integers(1, 2 * DRAWN_TOGETHER), min_size=1, max_size=4),
    shape=st.sampled_from([(1 << 20,), (1 << 15, 32), (1 << 11, 512), (1 << 5, 1 << 15), (1 << 20, 1)]),
)
def test_a_number_is_spread_the_same_however_the_delta_is_cut(
    begin: int, cuts: list[int], shape: tuple[int, ...]
) -> None:
    tensor, start = TensorSpec("ones", shape), 777
    values = np.ones(sum(cuts), dtype="<f4")
    whole = values.copy()
    Spread(KEY).over(whole, start + begin, tensor, start)
    at, by_parts = start + begin, Spread(KEY)
    for count, part_of in zip(cuts, np.split(values, np.cumsum(cuts)[:-1]), strict=True):
        by_parts.over(part_of, at, tensor, start)
        at += count
    assert np.array_equal(values, whole)
    other = np.ones_like(whole)
    Spread(bytes(32)).over(other, start + begin, tensor, start)
    assert not np.array_equal(other, whole)


@pytest.mark.parametrize("cuts", [[485], [530], [575], [480, 576], [9, 5000, 5001], [4320 + 2, 4320 + 94]])
def test_a_flat_row_is_spread_the_same_however_the_delta_is_cut(cuts: list[int]) -> None:
    """Also where the end of a block leaves less of it than can be judged."""
    tensor = TensorSpec("matrix", (200, 96))
    values = normal(200 * 96)
    rows = values.reshape(tensor.shape)
    rows[5::40] = np.sign(rows[5::40])
    whole = values.copy()
    Spread(KEY).over(whole, 0, tensor, 0)
    at, by_parts = 0, Spread(KEY)
    for part_of in np.split(values, cuts):
        by_parts.over(part_of, at, tensor, 0)
        at += len(part_of)
    assert np.array_equal(rows[5::40], whole.reshape(tensor.shape)[5::40])


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
        Spread(bytes(32)).over(values, 0, TensorSpec("tensor", (10_000,)), 0)
        assert (values != before).any() == changes


WORDS, WIDTH, COMMON = 320, 48, 20
RECORDS = (5, 9, 14)
RATE = 1e-3


def own_words(silo: int) -> list[list[int]]:
    """Two for each record of a silo, which no other record of anybody has."""
    first = COMMON + 2 * sum(RECORDS[:silo])
    return [[first + 2 * record, first + 2 * record + 1] for record in range(RECORDS[silo])]


def examples_of(silo: int) -> EncodedExamples:
    drawn = np.random.default_rng(silo)

    def words() -> list[int]:
        return [int(word) for word in drawn.integers(3, COMMON, 5)]

    inputs = [np.array([*words(), *own, 1], dtype="<i4") for own in own_words(silo)]
    targets = tuple(np.array([*words(), 1], dtype="<i4") for _ in inputs)
    return EncodedExamples(inputs=tuple(inputs), targets=targets, inputs_cut=0, targets_cut=0, targets_with_unknown=0)


def rows_of_words(folder: Path, silo: int, own: Spread | None) -> Floats:
    """The embedding's rows in a silo's delta after one epoch of one record a step, by the true trainer, as they would
    be masked."""
    folder.mkdir()
    before = random_model(
        untied=True, tie_word_embeddings=False, vocab_size=WORDS, d_model=WIDTH, num_layers=1, dropout_rate=0.0
    )
    after = copy.deepcopy(before)
    train_undisturbed(
        after,
        list(after.parameters()),
        examples_of(silo),
        TrainingSection(batch_size=1, learning_rate=RATE),
        seed=silo,
    )
    manifest, layout = write_model(before, folder / "model"), layout_of(after)
    residuals = Residuals(folder=folder, plan=digest_of(b"plan"), layout=layout, notice=lambda event, detail: None)
    write_update(
        folder / "update",
        layout,
        parameters=bind(after, layout),
        round_model=VectorReader(folder / "model", manifest, layout, None),
        feedback=Feedback(residuals=residuals, included=None),
        spread=own,
    )
    delta = np.fromfile(folder / "update", dtype="<f4")
    begin = next(begin for tensor, begin in layout.placed() if tensor.shape == (WORDS, WIDTH))
    return delta[begin : begin + WORDS * WIDTH].reshape(WORDS, WIDTH)


def size_of(step: int, steps: int) -> float:
    """What AdamW's momentum has made of a gradient of `step` alone after `steps`."""
    return RATE * sum(
        0.1 * 0.9 ** (t - step) / (1 - 0.9**t) / math.sqrt(0.001 * 0.999 ** (t - step) / (1 - 0.999**t))
        for t in range(step, steps + 1)
    )


def rows_of_one_size(rows: Floats) -> dict[int, float]:
    """By word: what the attack reads of a sum."""
    sizes = np.abs(rows)
    largest = sizes.max(axis=1)
    return {int(word): float(largest[word]) for word in np.flatnonzero(np.median(sizes, axis=1) > 0.97 * largest)}


def test_attack_rows_that_one_step_reached_tell_neither_steps_nor_words_of_one_record(tmp_path: Path) -> None:
    raw = [rows_of_words(tmp_path / f"raw-{silo}", silo, None) for silo in range(len(RECORDS))]
    total = np.sum(raw, axis=0)
    assert alike(total.reshape(-1)) < MOST_ALIKE, "the embedding as a whole is not alike"
    told = rows_of_one_size(total)
    for silo, steps in enumerate(RECORDS):
        sizes = [size_of(step, steps) for step in range(1, steps + 1)]
        for one, other in own_words(silo):
            assert told[one] == pytest.approx(told[other], rel=1e-3), "the attack finds nothing that is to be mended"
            assert min(abs(size / told[one] - 1) for size in sizes) < 1e-3

    own = [Spread(bytes([silo]) * 32) for silo in range(len(RECORDS))]
    parts = [rows_of_words(tmp_path / f"spread-{silo}", silo, own[silo]) for silo in range(len(RECORDS))]
    assert not rows_of_one_size(np.sum(parts, axis=0))
    for one, plain in zip(parts, raw, strict=True):
        moved = np.abs(plain) > RATE / 100  # what did not move has the noise of a step
        assert np.array_equal(np.sign(one[moved]), np.sign(plain[moved]))


def test_attack_lengths_of_rows_do_not_tell_what_their_silo_weighs() -> None:
    """Every number of a row has a factor of its own, which leaves its length: that has one as well."""
    rows = normal(400 * 512).reshape(400, 512)
    rows[::10] = np.sign(rows[::10])
    assert alike(rows.reshape(-1)) < MOST_ALIKE
    over_matrix(Spread(KEY), rows)
    lengths = np.linalg.norm(rows[::10], axis=1)
    assert float(np.std(lengths) / np.mean(lengths)) > 0.5

    whole = np.ones((400, 512), dtype="<f4")
    over_matrix(Spread(KEY), whole)
    lengths = np.linalg.norm(whole, axis=1)
    assert float(np.std(lengths) / np.mean(lengths)) > 0.5
    assert float(whole.mean()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_attack_a_line_that_one_step_reached_is_spread_and_no_other(axis: int) -> None:
    """A unit of ReLU that one record makes fire: a row of the layer before it, a column of the layer behind it."""
    matrix = normal(300 * 200).reshape(300, 200)
    before = matrix.copy()
    lines = matrix if axis == 0 else matrix.T
    lines[[7, 130]] = np.sign(lines[[7, 130]])
    flat = lines[[7, 130]].copy()
    over_matrix(Spread(KEY), matrix)
    for one, plain in zip(lines[[7, 130]], flat, strict=True):
        assert alike(np.ascontiguousarray(one)) < 0.35
        assert np.array_equal(np.sign(one), plain)
    others = np.delete(np.arange(len(lines)), [7, 130])
    assert np.array_equal(lines[others], (before if axis == 0 else before.T)[others])


def test_attack_numbers_that_are_spoiled_at_every_eighth_column_hide_no_row() -> None:
    matrix = normal(200 * 512).reshape(200, 512)
    matrix[11] = np.sign(matrix[11])
    matrix[11, ::8] = normal(64)
    over_matrix(Spread(KEY), matrix)
    assert alike(matrix[11].copy()) < 0.35


@pytest.mark.parametrize("shape", [(2000, 512), (128, 2048), (8, 1 << 14), (1 << 14, 32)])
def test_a_matrix_that_is_spread_already_stays_as_it_is(shape: tuple[int, int]) -> None:
    values = normal(math.prod(shape))
    before = values.copy()
    over_matrix(Spread(KEY), values.reshape(shape))
    assert float((values != before).mean()) < 1e-3


@pytest.mark.parametrize("rank", [4, 8])
def test_short_rows_of_normal_variables_are_seldom_spread(rank: int) -> None:
    """Adapters have rows as short as their rank."""
    values = normal(4096 * rank)
    before = values.copy()
    over_matrix(Spread(KEY), values.reshape(4096, rank))
    assert float((values != before).mean()) < 0.005
    flat = np.sign(before.reshape(4096, rank)[:5])
    values.reshape(4096, rank)[:5] = flat
    over_matrix(Spread(KEY), values.reshape(4096, rank))
    assert not np.isclose(np.abs(values.reshape(4096, rank)[:5]), 1).all(axis=1).any()
