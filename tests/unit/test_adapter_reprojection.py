"""Adapters whose products are averaged: the mean of merged adapters cut to their rank, and what it is off by."""

import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lorica_coordinator.aggregation.reprojection import Cut, Part, reprojected
from lorica_coordinator.plans.plan_folder import compile_plan
from lorica_coordinator.service.unusable import UnusableUpdate
from lorica_security.errors import ConfigurationError, MalformedMessage
from silo_wire.canonical import Digest
from silo_wire.manifest import Layout, TensorSpec
from silo_wire.plans.adapters import Pair, adapter_names, pairs_of
from tests.support.checkpointed_training import killed
from tests.support.coordinator_edges import A, B, C, Vector, Workplace, make_plan, random_vector, stored_vector

EXACT = 1e-6
RANK = 2
SERVER = {"momentum": 0.0, "max_delta_norm": 0.0}
REPROJECTED = {'train = "both"': 'train = "reproject"'}
Matrix = NDArray[np.float64]


def cut(parts: list[Part], **changes: Any) -> Cut:
    (rows, rank), columns = parts[0].b.shape, parts[0].a.shape[1]
    values: dict[str, Any] = {"silos": len(parts), "rows": rows, "columns": columns, "rank": rank, **changes}
    return reprojected(iter(parts), **values)


def mean_of(parts: list[Part]) -> Matrix:
    return np.asarray(sum(part.share * part.b @ part.a for part in parts), dtype=np.float64)


# --- by hand


def test_by_hand_the_smaller_singular_value_is_dropped() -> None:
    """Shares 3/4 and 1/4 of diag(8, 0) and diag(0, 8) are diag(6, 2): rank 1 keeps the 6, and is off by 2. The mean of
    halves would be (6, 2)' (3/4, 1/4), which is off by 3."""
    e1, e2 = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
    parts = [Part(0.75, b=8 * e1.T, a=e1), Part(0.25, b=8 * e2.T, a=e2)]
    for silos in (1, 2):  # 1: by the factors, 2: by the sum itself
        found = cut(parts, silos=silos)
        assert np.allclose(found.b, [[6.0], [0.0]])
        assert np.allclose(found.a, [[1.0, 0.0]])
        assert np.allclose(found.dropped[0], 2.0)
    halves = np.outer([6.0, 2.0], [0.75, 0.25]) - np.diag([6.0, 2.0])
    assert np.linalg.norm(halves) == pytest.approx(3.0)


def test_by_hand_what_the_product_of_means_misses() -> None:
    """The numbers of tests/unit/test_adapter_halves.py: products of 2 and 18 with shares 3/4 and 1/4 come to 6, of
    which the product of means has 4.5. Nothing is cut off."""
    parts = [Part(0.75, b=np.array([[1.0]]), a=np.array([[2.0]])), Part(0.25, b=np.array([[3.0]]), a=np.array([[6.0]]))]
    found = cut(parts)
    assert float((found.b @ found.a)[0, 0]) == pytest.approx(6.0, rel=1e-12)
    assert not found.dropped.any()


# --- what is promised of any


@st.composite
def cohorts(draw: st.DrawFn) -> list[Part]:
    """Of silos whose halves have directions in common, or none, or are zero."""
    rows, columns, rank, silos = (draw(st.integers(1, most)) for most in (9, 9, 4, 5))
    common = draw(st.integers(0, rank))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shares = random.dirichlet(np.ones(silos))
    b, a = random.normal(size=(rows, rank)), random.normal(size=(rank, columns))
    parts = []
    for share in shares:
        own_b = np.where(np.arange(rank) < common, b, random.normal(size=b.shape)) * draw(st.sampled_from([0.0, 1.0]))
        own_a = np.where(np.arange(rank)[:, None] < common, a, random.normal(size=a.shape))
        parts.append(Part(float(share), b=own_b, a=own_a))
    return parts


@given(parts=cohorts())
def test_the_error_is_that_of_the_singular_values_that_are_dropped(parts: list[Part]) -> None:
    """By the factors as by the sum itself; where the mean has no higher rank there is no error."""
    mean, rank = mean_of(parts), parts[0].b.shape[1]
    values = np.linalg.svd(mean, compute_uv=False)
    rest = float(np.linalg.norm(values[rank:]))
    for silos in (0, 10**6):
        found = cut(parts, silos=silos)
        assert np.linalg.norm(found.b @ found.a - mean) == pytest.approx(rest, abs=EXACT)
        assert np.linalg.norm(found.dropped) == pytest.approx(rest, abs=EXACT)
        if np.linalg.matrix_rank(mean) <= rank:
            assert np.abs(found.b @ found.a - mean).max() < EXACT


@given(parts=cohorts())
def test_every_row_of_a_can_be_learnt_from_and_has_one_sign(parts: list[Part]) -> None:
    """A direction that adds nothing has zeros in B alone: with zeros in both it would have no gradient for good."""
    (rows, rank), columns = parts[0].b.shape, parts[0].a.shape[1]
    for silos in (0, 10**6):
        found = cut(parts, silos=silos)
        there = min(rank, rows, columns)
        assert np.allclose(found.a[:there] @ found.a[:there].T, np.eye(there), atol=1e-9)
        largest = found.a[np.arange(there), np.abs(found.a[:there]).argmax(axis=1)]
        assert (largest > 0.0).all()
        assert (np.diff(np.linalg.norm(found.b, axis=0)) <= 1e-9).all(), "the largest singular value comes first"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("silos", [0, 10**6])
def test_what_is_not_finite_is_refused(bad: float, silos: int) -> None:
    part = Part(1.0, b=np.array([[bad], [1.0]]), a=np.array([[1.0, 1.0]]))
    with pytest.raises(MalformedMessage, match="NaN or infinite"):
        cut([part], silos=silos)


def test_memory_does_not_grow_with_the_silos() -> None:
    side, rank = 48, 4

    def peak(silos: int) -> int:
        def arriving() -> Iterator[Part]:
            random = np.random.default_rng(1)
            for _ in range(silos):
                yield Part(1 / silos, b=random.normal(size=(side, rank)), a=random.normal(size=(rank, side)))

        tracemalloc.start()
        try:
            reprojected(arriving(), silos=silos, rows=side, columns=side, rank=rank)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(400) < 1.2 * peak(20)
    assert peak(400) < 12 * side * side * 8


# --- rounds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("both")
    make_plan(
        state,
        overrides={
            "adapters.rank": RANK,
            "adapters.layers": ["q", "wo"],
            "training.epochs": 2,
            "aggregation.momentum": 0.0,
        },
    )
    return state


def place_of(folder: Path, state: Path, **changed: str) -> Workplace:
    shutil.copytree(folder / "plans", state / "plans")
    toml = state / "plans" / "first" / "plan.toml"
    text = toml.read_text()
    for old, new in {**REPROJECTED, **changed}.items():
        assert old in text, old
        text = text.replace(old, new)
    toml.write_text(text)
    return Workplace.at(state, compile_plan(state / "plans" / "first"))


def products(layout: Layout, vector: Vector) -> dict[str, Matrix]:
    """B A by weight."""
    parts = {
        tensor.name: vector[start : start + tensor.elements].reshape(tensor.shape).astype(np.float64)
        for tensor, start in layout.placed()
    }
    weights = {name.replace(".lora_A", "") for name in parts if ".lora_A" in name}
    return {weight: parts[adapter_names(weight)[1]] @ parts[adapter_names(weight)[0]] for weight in weights}


SHARES = {A: 0.5, B: 0.3, C: 0.2}


def deltas(layout: Layout, *, scale: float = 0.3) -> dict[Any, Vector]:
    return {silo: random_vector(layout, seed, scale=scale) for seed, silo in enumerate(SHARES)}


def next_model(
    place: Workplace, model: Digest, sent: dict[Any, Vector], *, attempt: int = 1, slab_bytes: int = 1 << 12
) -> Digest:
    key = place.key(1, attempt)
    updates = [place.send(key, silo, delta, examples=round(100 * SHARES[silo])) for silo, delta in sent.items()]
    return place.aggregator(SERVER, slab_bytes=slab_bytes).aggregate(key, model, updates[::-1]).model


def test_the_next_model_is_the_mean_of_the_merged_adapters_but_for_what_is_cut_off(
    folder: Path, tmp_path: Path
) -> None:
    """From an initial model whose B are zeros, and from the model that this leaves."""
    place = place_of(folder, tmp_path)
    model = place.models.initial()
    for _ in range(2):
        before, sent = stored_vector(place.models, model), deltas(place.layout)
        merged = {silo: products(place.layout, before + delta) for silo, delta in sent.items()}
        model = next_model(place, model, sent, attempt=1 + (model != place.models.initial()))
        found = products(place.layout, stored_vector(place.models, model))
        assert found
        for weight, product in found.items():
            mean = sum(share * merged[silo][weight] for silo, share in SHARES.items())
            rest = np.linalg.norm(np.linalg.svd(mean, compute_uv=False)[RANK:])
            assert rest > 0.5, "three silos have more directions than one"
            assert np.linalg.norm(product - mean) == pytest.approx(float(rest), rel=1e-4)


def test_of_silos_that_agree_nothing_is_cut_off(folder: Path, tmp_path: Path) -> None:
    place = place_of(folder, tmp_path)
    model = place.models.initial()
    delta = random_vector(place.layout, 1, scale=0.3)
    wanted = products(place.layout, stored_vector(place.models, model) + delta)
    made = next_model(place, model, dict.fromkeys((A, B), delta) | {C: delta})
    found = products(place.layout, stored_vector(place.models, made))
    for weight, product in found.items():
        assert np.abs(product - wanted[weight]).max() < 1e-6 * np.linalg.norm(wanted[weight], 2)


def test_a_round_that_is_done_again_makes_the_same_bits_whatever_the_slabs(folder: Path, tmp_path: Path) -> None:
    """Of which some end within an A, and whoever was first; a coordinator that was killed has other objects."""
    made = set()
    for number, slab_bytes in enumerate((1 << 8, 1 << 12, 1 << 20)):
        place = place_of(folder, tmp_path / str(number))
        made.add(next_model(place, place.models.initial(), deltas(place.layout), slab_bytes=slab_bytes))
    again = Workplace.at(tmp_path / "2", place.bundle)
    made.add(next_model(again, again.models.initial(), dict(reversed(deltas(again.layout).items())), attempt=2))
    assert len(made) == 1


def test_killed_before_each_file_is_in_its_place_the_next_process_makes_the_same_bits(
    folder: Path, tmp_path: Path
) -> None:
    """kill -9, again and again, of a process that sums the same updates on the same disk."""

    def begun(name: str) -> tuple[Workplace, Callable[[], Digest]]:
        place = place_of(folder, tmp_path / name)
        key, model = place.key(), place.models.initial()
        updates = [place.send(key, silo, delta) for silo, delta in deltas(place.layout).items()]

        def made() -> Digest:
            again = Workplace.at(place.state, place.bundle)
            return again.aggregator(SERVER).aggregate(key, model, updates).model

        return place, made

    undisturbed, sum_up = begun("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        replaced, replace = list[Any](), os.replace

        def counted(*given: Any, **more: Any) -> None:
            replaced.append(given)
            replace(*given, **more)

        patch.setattr(os, "replace", counted)
        wanted = sum_up()
    assert len(replaced) > 1
    place, sum_up = begun("killed")
    for number in range(1, len(replaced) + 1):
        killed(sum_up, "replace", number)
    assert sum_up() == wanted
    vectors = [stored_vector(it.models, wanted) for it in (undisturbed, place)]
    assert np.array_equal(*vectors)
    assert not np.array_equal(vectors[0], stored_vector(place.models, place.models.initial()))


def test_a_delta_that_is_capped_counts_as_it_was_capped(folder: Path, tmp_path: Path) -> None:
    place = place_of(folder, tmp_path)
    model, sent = place.models.initial(), deltas(place.layout)
    key = place.key()
    updates = [place.send(key, silo, delta) for silo, delta in sent.items()]
    section = {**SERVER, "max_delta_norm": 1.0}
    capped = place.aggregator(section).aggregate(key, model, updates).model
    short = {silo: (delta / np.linalg.norm(delta)).astype("<f4") for silo, delta in sent.items()}
    key = place.key(1, 2)
    updates = [place.send(key, silo, delta) for silo, delta in short.items()]
    made = place.aggregator(SERVER).aggregate(key, model, updates).model
    one, other = (stored_vector(place.models, it) for it in (capped, made))
    found, wanted = products(place.layout, one), products(place.layout, other)
    assert all(np.allclose(found[weight], wanted[weight], atol=1e-6) for weight in found)
    assert not np.allclose(one, stored_vector(place.models, model), atol=1e-4)


def test_attack_a_delta_whose_product_is_out_of_range_names_its_silo(folder: Path, tmp_path: Path) -> None:
    """Of finite numbers, which every chunk was checked for."""
    place = place_of(folder, tmp_path)
    sent = {**deltas(place.layout), B: np.full(place.layout.parameters, 1e25, dtype="<f4")}
    with pytest.raises(UnusableUpdate, match=f"silo {B} .*leaves the range of float32: set max_delta_norm"):
        next_model(place, place.models.initial(), sent)
    sent.pop(B)
    next_model(place, place.models.initial(), sent, attempt=2)


def test_the_pairs_are_what_the_vector_consists_of(folder: Path, tmp_path: Path) -> None:
    layout = place_of(folder, tmp_path).layout
    pairs = pairs_of(layout)
    assert sum(pair.elements for pair in pairs) == layout.parameters
    assert {pair.rank for pair in pairs} == {RANK}
    assert pairs_of(Layout("float32", layout.tensors[:2])) == pairs[:1]
    a, b = layout.tensors[:2]
    assert pairs[0] == Pair(rank=RANK, rows=b.shape[0], columns=a.shape[1])
    for broken in (
        (a,),
        (b,),
        (a, layout.tensors[3]),
        (a, TensorSpec(b.name, (b.shape[0], RANK + 1))),
        layout.tensors[:3],
    ):
        with pytest.raises(ConfigurationError, match="coordinator plan new"):
            pairs_of(Layout("float32", broken))


# --- what is refused


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"secure_aggregation = false": "secure_aggregation = true"}, r"secure_aggregation = true .*: set it to false"),
        ({'level = "none"': 'level = "record"'}, r'level = "record" does not .*itself: set it to "none", or train'),
        ({'level = "none"': 'level = "silo"'}, r'level = "silo" does not .*itself: set it to "none", or train'),
        ({'reducer = "mean"': 'reducer = "median"'}, r'reducer = "median" does not .*: set it to "mean"'),
        ({'weighting = "lorar"': 'weighting = "fednova"'}, r'"fednova" does not .*products: set it to "size"'),
        ({'server_optimizer = "sgd"': 'server_optimizer = "yogi"'}, r'"yogi" does not .*: set it to "sgd"'),
        ({"server_learning_rate = 1.0": "server_learning_rate = 0.5"}, r"_rate = 0.5 does not .*: set it to 1.0"),
        ({"server_rate_at_end = 1.0": "server_rate_at_end = 0.5"}, r"_end = 0.5 does not .*: set it to 1.0"),
        ({"momentum = 0.0": "momentum = 0.5"}, r"momentum = 0.5 does not .*: set it to 0.0"),
        ({'step_length = "fixed"': 'step_length = "fedexp"'}, r'"fedexp" does not .*: set it to "fixed"'),
        ({'update = "float32"': 'update = "bfloat16"'}, r'"bfloat16" does not .*: set it to "float32"'),
        ({'update = "float32"': 'update = "int8"'}, r'"int8" does not .*: set it to "float32"'),
    ],
    ids=lambda it: next(iter(it.values())) if isinstance(it, dict) else "",
)
def test_what_it_does_not_go_with_is_refused_by_name(
    changed: dict[str, str], said: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s){said}") as refusal:
        place_of(folder, tmp_path, **changed)
    assert '[adapters] train = "reproject"' in str(refusal.value)
    assert '"alternate", whose mean is exact' in str(refusal.value)
