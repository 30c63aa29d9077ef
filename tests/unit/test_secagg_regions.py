"""Regions, on paper in ops/docs/scale.md: the masked means of regions, masked once more, are the mean of all silos.

Each region is an attempt of its own with its own keys; the region then weighs in the attempt above as much as its silos
together.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica import secure_aggregation as secagg
from lorica.documentation.forecasts import at_scale
from lorica.secure_aggregation import Mean
from lorica_security.errors import StateError
from lorica_security.identifiers import SiloName

ELEMENTS = 40
RNG = np.random.default_rng(0)


def masked_mean(vectors: dict[str, np.ndarray], weights: dict[str, float], lost: frozenset[str] = frozenset()) -> Mean:
    silos = [SiloName(name) for name in vectors]
    terms = secagg.terms_of(silos, elements=ELEMENTS, largest=1.0, largest_weight=max(weights.values()))
    attempt = secagg.AttemptInMemory(silos, terms)
    sent = {
        silo: secagg.masked(attempt.works[silo], vectors[silo], weight=weights[silo])
        for silo in silos
        if silo not in lost
    }
    return attempt.mean(sent)


def within(silos: int, weights: dict[str, float]) -> float:
    """What fixed point may move a mean by: a step of each silo, of a range of the heaviest one's."""
    levels = (2**31 - 1) // silos - 1
    return 2 * silos * max(weights.values()) / (levels * sum(weights.values()))


@settings(max_examples=8, deadline=None)
@given(
    regions=st.lists(st.integers(3, 5), min_size=3, max_size=4),
    heaviest=st.floats(1.0, 50.0),
    lost=st.integers(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_means_of_regions_are_the_mean_of_all(regions: list[int], heaviest: float, lost: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    every: dict[str, np.ndarray] = {}
    weights: dict[str, float] = {}
    gone: set[str] = set()
    means, sums = dict[str, np.ndarray](), dict[str, float]()
    for number, size in enumerate(regions):
        names = [f"silo-{number}-{one}" for one in range(size)]
        for name in names:
            every[name], weights[name] = rng.uniform(-0.9, 0.9, ELEMENTS), float(rng.uniform(1.0, heaviest))
        missing = frozenset(names[:lost] if size > 3 else ())
        gone |= missing
        part = masked_mean({name: every[name] for name in names}, {name: weights[name] for name in names}, missing)
        means[f"region-{number}"], sums[f"region-{number}"] = part.vector, part.weight_sum
    top = masked_mean(means, sums)
    here = [name for name in every if name not in gone]
    plain = sum(weights[name] * every[name] for name in here) / sum(weights[name] for name in here)
    allowed = within(len(every), {name: weights[name] for name in here}) + within(len(means), sums)
    # A region's mean enters the attempt above as float32.
    assert np.abs(top.vector - plain).max() <= allowed + 2.0**-23
    assert math.isclose(top.weight_sum, sum(weights[name] for name in here), rel_tol=1e-6)


def test_a_region_that_fails_costs_a_region_alone() -> None:
    def region(number: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        names = [f"silo-{number}-{one}" for one in range(4)]
        return {name: RNG.uniform(-0.9, 0.9, ELEMENTS) for name in names}, dict.fromkeys(names, 1.0)

    regions = [region(number) for number in range(4)]
    vectors, weights = regions[0]
    with pytest.raises(StateError):
        masked_mean(vectors, weights, lost=frozenset(list(vectors)[:3]))
    parts = {f"region-{number}": masked_mean(*regions[number]) for number in (1, 2, 3)}
    top = masked_mean(
        {name: part.vector for name, part in parts.items()}, {name: part.weight_sum for name, part in parts.items()}
    )
    plain = np.mean([vector for vectors, _ in regions[1:] for vector in vectors.values()], axis=0)
    assert np.abs(top.vector - plain).max() <= 1e-6


@pytest.mark.parametrize(("silos", "colluding", "neighbours"), [(60, 1 / 10, 19), (200, 1 / 10, 58), (400, 1 / 3, 158)])
def test_no_fewer_neighbours_keep_the_chance(silos: int, colluding: float, neighbours: int) -> None:
    assert at_scale.degree(silos, colluding) == neighbours


def test_degrees_keep_what_a_count_of_draws_says() -> None:
    """By drawing neighbourhoods: none breaks k > 2 lost + colluding of a thousand federations of 200 silos."""
    rng = np.random.default_rng(5)
    silos, k = 200, at_scale.degree(200, 1 / 10)
    lost = rng.hypergeometric(silos // 10, silos - 1 - silos // 10, k, size=200_000)
    colluding = rng.hypergeometric(silos // 10, silos - 1 - silos // 10, k, size=200_000)
    assert (2 * lost + colluding < k).all()
    few = k // 4
    lost = rng.hypergeometric(silos // 10, silos - 1 - silos // 10, few, size=200_000)
    colluding = rng.hypergeometric(silos // 10, silos - 1 - silos // 10, few, size=200_000)
    assert (2 * lost + colluding >= few).any()


def test_a_graph_of_too_few_silos_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        at_scale.degree(8, 1 / 3, lost=1 / 2)
