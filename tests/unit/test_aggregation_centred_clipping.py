"""Centred clipping of slabs: by hand, against an exact calculation, and what hostile deltas can do at most."""

from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lorica_coordinator.aggregation.centred_clipping import centred_mean, clipped, parts
from lorica_coordinator.aggregation.squared_distances import to_centre
from lorica_coordinator.aggregation.streaming_sum import Scratch
from lorica_coordinator.aggregation.weighting import CohortWeights, SiloSummary, weigh
from lorica_security.identifiers import SiloName
from silo_wire.weightings.equal import EQUAL

Rows = NDArray[np.float32]


def cohort_of(silos: int) -> CohortWeights:
    return weigh(
        [
            SiloSummary(silo=SiloName(f"s{i}"), examples=1, loss_reduction=0.0, optimizer_steps=1, delta_norm=1.0)
            for i in range(silos)
        ],
        weighting=EQUAL,
    )


def centred(rows: Rows, centre: Rows, radius: float) -> Tensor:
    cohort = cohort_of(len(rows))
    counted = parts(to_centre([it.silo for it in cohort.silos], [(rows, centre)]).tolist(), radius)
    named = ((it.silo, torch.from_numpy(row)) for it, row in zip(cohort.silos, rows, strict=True))
    scratch = Scratch.of(len(centre), torch.device("cpu"))
    return centred_mean(named, torch.from_numpy(centre), cohort, counted, scratch).clone()


def row(*values: float) -> Rows:
    return np.array(values, dtype=np.float32)


def test_a_mean_by_hand() -> None:
    """From (1, 1) to (4, 5) it is 5, of which 2 counts: (1.2, 1.6); the other two are within 2."""
    rows = np.stack([row(4, 5), row(1, 2), row(2, 1)])
    assert parts([25.0, 1.0, 4.0], 2.0) == [0.4, 1.0, 1.0]
    assert centred(rows, row(1, 1), 2.0).tolist() == pytest.approx([1 + (1.2 + 0 + 1) / 3, 1 + (1.6 + 1 + 0) / 3])


def test_a_radius_that_all_are_within_is_the_mean() -> None:
    rows = np.stack([row(4, 5), row(1, 2), row(2, 1)])
    assert centred(rows, row(100, -100), 1e6).tolist() == pytest.approx(rows.mean(axis=0).tolist(), rel=1e-6)


def test_what_a_silo_counts_is_shown_as_its_share() -> None:
    shares = [it.share for it in clipped(cohort_of(4), [1.0, 0.5, 0.0, 1.0]).silos]
    assert shares == [0.25, 0.125, 0.0, 0.25]


NUMBERS = st.integers(-40, 40).map(lambda it: it / 8)
ROWS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=2, max_size=8)
FAR = st.lists(st.tuples(*[st.floats(-(2.0**100), 2.0**100, width=32)] * 3), min_size=1, max_size=4)


@settings(deadline=None, max_examples=80)
@given(ROWS, FAR, st.tuples(NUMBERS, NUMBERS, NUMBERS), st.sampled_from([0.01, 1.0, 7.0]))
def test_hostile_deltas_move_the_mean_by_no_more_than_the_docstring_says(
    honest: list[tuple[float, ...]], hostile: list[tuple[float, ...]], centre: tuple[float, ...], radius: float
) -> None:
    middle, rows = row(*centre), np.array([*honest, *hostile], dtype=np.float32)
    found = centred(rows, middle, radius).double().numpy()
    assert np.linalg.norm(found - middle) <= radius * (1 + 1e-5) + 1e-5
    apart = rows[: len(honest)].astype(np.float64) - middle
    lengths = np.maximum(np.linalg.norm(apart, axis=1), 1e-300)
    without = middle + (apart * np.minimum(1.0, radius / lengths)[:, None]).sum(axis=0) / len(rows)
    assert np.linalg.norm(found - without) <= radius * len(hostile) / len(rows) * (1 + 1e-5) + 1e-5


def test_one_that_is_far_off_uses_all_of_its_part() -> None:
    rows = np.stack([row(0, 0), row(0, 0), row(0, 0), row(1e30, 1e30)])
    found = centred(rows, row(0, 0), 1.0).double().numpy()
    assert np.linalg.norm(found) == pytest.approx(1 / 4)
    assert found == pytest.approx([1 / (4 * sqrt(2))] * 2)
