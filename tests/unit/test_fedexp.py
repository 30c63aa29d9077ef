"""FedExP: step lengths worked by hand, what holds for all deltas, rounds over files, and the plans that it goes with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from silo_wire.plans.plan import Plan
from silo_wire.server_step.step_length import fedexp
from tests.support.coordinator_edges import Vector, stored_vector
from tests.support.federation_peer import small_bundle
from tests.support.robust_rounds import FED_AVG, drawn, place_of, reduced, sent

STEP: dict[str, Any] = {**FED_AVG, "step_length": "fedexp"}


def rows(*values: list[float]) -> dict[str, Vector]:
    return {f"silo-{index}": np.array(row, dtype="<f4") for index, row in enumerate(values)}


# --- by hand


def test_step_lengths_by_hand() -> None:
    """Of deltas alike: half of 1, and never below 1. Of four of length 2 at right angles, whose mean has length 1: half
    of 4. Of opposite ones, half the silos and no more."""
    assert fedexp([0.25] * 4, [2.0] * 4, 4.0) == 1.0
    assert fedexp([0.25] * 4, [2.0] * 4, 1.0) == 2.0
    assert fedexp([0.25] * 4, [2.0] * 4, 1.25) == 1.6
    assert fedexp([0.25] * 4, [2.0] * 4, 0.0) == 2.0
    assert fedexp([0.25] * 4, [0.0] * 4, 0.0) == 2.0
    assert fedexp([1.0], [3.0], 9.0) == 1.0


def test_a_round_of_files_by_hand(tmp_path: Path) -> None:
    """Deltas that mostly agree: 1. Three of length 9 at right angles, whose mean (3, 3, 3) has 27: 81 / (2 x 27)."""
    place = place_of(tmp_path, 2)
    result = reduced(place, STEP, sent(place, rows([3.0, 4.0], [3.0, 0.0], [4.0, 5.0])))
    assert result.step_length == 1.0
    apart = place_of(tmp_path / "apart", 3)
    result = reduced(apart, STEP, sent(apart, rows([9, 0, 0], [0, 9, 0], [0, 0, 9])))
    assert result.step_length == pytest.approx(1.5)
    assert stored_vector(apart.models, result.model) == pytest.approx([4.5] * 3)


def test_a_delta_that_is_cut_counts_as_it_is_cut(tmp_path: Path) -> None:
    """(8, 0, 0) is (4, 0, 0) under the cap: 16 / (2 x 16 / 3)."""
    place = place_of(tmp_path, 3)
    updates = sent(place, rows([8, 0, 0], [0, 4, 0], [0, 0, 4]))
    assert reduced(place, {**STEP, "max_delta_norm": 4.0}, updates).step_length == pytest.approx(1.5)


# --- for all deltas


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(*[st.floats(-8.0, 8.0)] * 3), min_size=1, max_size=7), st.data())
def test_the_step_is_the_papers_within_one_and_half_the_silos(
    deltas: list[tuple[float, ...]], data: st.DataObject
) -> None:
    raw = np.array([data.draw(st.integers(1, 9)) for _ in deltas], dtype=np.float64)
    shares, values = raw / raw.sum(), np.array(deltas)
    norms, mean = np.linalg.norm(values, axis=1), shares @ values
    found, square = fedexp(shares.tolist(), norms.tolist(), float(mean @ mean)), float(mean @ mean)
    most = max(1.0, 0.5 / float(shares @ shares))
    paper = float(shares @ norms**2) / (2 * square) if square else np.inf
    assert found == pytest.approx(min(most, max(1.0, paper)), rel=1e-9)
    assert 1.0 <= found <= max(1.0, len(deltas) / 2) * (1 + 1e-12)


def test_neither_order_nor_slab_changes_a_bit(tmp_path: Path) -> None:
    place = place_of(tmp_path, 6000)
    updates = sent(place, drawn(6, 6000, seed=1))
    first = reduced(place, STEP, updates)
    assert first.step_length == pytest.approx(3.0, rel=0.1), "random deltas are nearly at right angles"
    again = reduced(place, STEP, updates[::-1], slab_bytes=404)
    assert (again.model, again.step_length) == (first.model, first.step_length)


# --- plans


def plan(aggregation: dict[str, Any], **sections: Any) -> Plan:
    return small_bundle(aggregation=aggregation, schedule={"rounds": 3, "min_silos": 5}, **sections).plan


def test_a_plan_names_it_and_one_without_keeps_its_digest() -> None:
    made = plan(STEP)
    assert Plan.from_json(made.to_json()) == made
    assert made.digest != plan(FED_AVG).digest
    assert b"step_length" not in plan(FED_AVG).to_json()


@pytest.mark.parametrize(
    ("changes", "sections", "said"),
    [
        ({"server_optimizer": "adam"}, {}, 'server_optimizer = "adam" does not go with [aggregation] step_length'),
        ({"momentum": 0.9}, {}, "momentum = 0.9 does not go with"),
        ({"reducer": "median"}, {}, 'reducer = "median" does not go with'),
        ({"weighting": "fednova"}, {}, 'weighting = "fednova" does not go with'),
        (
            {"secure_aggregation": True},
            {},
            '[aggregation] secure_aggregation = true does not go with [aggregation] step_length = "fedexp", which needs '
            "the norms of single deltas, where masks show their sum alone: set secure_aggregation to false, or "
            'step_length to "fixed"',
        ),
        ({}, {"privacy": {"level": "silo", "nominal_silos": 5}}, '[privacy] level = "silo" does not go with'),
    ],
)
def test_what_does_not_compose_is_refused_by_name(changes: dict[str, Any], sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as found:
        plan({**STEP, **changes}, **sections)
    assert said in str(found.value)
