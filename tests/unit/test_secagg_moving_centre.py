"""Why no silo cuts its delta around the mean of the round before under masks: sums of such deltas show single ones.

Release groups hold because each sum has the same function of a silo's delta. Around a centre that moves it is another
function in each round. What a coordinator and a silo of its own choose here: the radius, every centre, and how often.
ADR 26 has what was weighed.
"""

import copy
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.training import TrainingSection
from tests.support.coordinator_edges import summary
from tests.support.masked_round import summed
from tests.support.moving_centre import (
    BOUND,
    Cut,
    MaskedRounds,
    PlainRounds,
    Vector,
    all_deltas,
    cut,
    one_delta,
    sum_around,
)
from tests.support.undisturbed_training import train_undisturbed
from tests.unit.test_comparable_training import SIZES, examples
from tests.unit.test_masked_settings import model

seeds = st.integers(0, 2**32 - 1)


def around(radius: float) -> Cut:
    return lambda delta, centre: cut(delta, centre, radius)


def deltas(generator: np.random.Generator, silos: int, elements: int) -> list[Vector]:
    """Of lengths that differ by up to ten times."""
    return [generator.normal(size=elements) * generator.uniform(0.3, 3.0) / np.sqrt(elements) for _ in range(silos)]


def direction(generator: np.random.Generator, elements: int) -> Vector:
    drawn = generator.normal(size=elements)
    return np.asarray(drawn / np.linalg.norm(drawn))


def directions(generator: np.random.Generator, elements: int) -> Iterator[Vector]:
    while True:
        yield direction(generator, elements)


def longest(honest: list[Vector]) -> float:
    return max(float(np.linalg.norm(delta)) for delta in honest)


def off(found: Vector, honest: list[Vector]) -> float:
    """From the nearest of them."""
    return min(float(np.linalg.norm(found - delta)) for delta in honest)


# --- what would come out


def test_two_rounds_by_hand() -> None:
    """Radius 2, around 0 and then around the mean (2/3, 0) of that: the first counts (2, 0), then (8/3, 0), and the
    others are whole in both rounds. The difference is the first silo's alone."""
    honest = [np.array(delta) for delta in ((3.0, 0.0), (0.0, 1.0), (0.0, -1.0))]
    first = sum_around(np.zeros(2), 2.0, honest)
    second = sum_around(first / 3, 2.0, honest)
    assert first.tolist() == [2.0, 0.0]
    assert second.tolist() == pytest.approx([8 / 3, 0.0])


def test_attack_masked_sums_around_two_centres_give_one_silos_delta() -> None:
    """Real machines and masks, one release group of four honest silos and a colluder, no knowledge of any delta."""
    generator = np.random.default_rng(1)
    honest = deltas(generator, 4, 24)
    radius = 1.5 * longest(honest)
    found = one_delta(MaskedRounds(honest, around(radius)), radius, directions(generator, 24))
    assert found is not None
    assert found.rounds < 20
    assert off(found.delta, honest) < 1e-3


def test_the_same_attack_finds_nothing_where_silos_cut_as_agents_do() -> None:
    """By `max_delta_norm`, around 0 in every round: whatever the colluder sends, the others' sum is one sum, also where
    it cuts all of them."""
    generator = np.random.default_rng(1)
    honest = deltas(generator, 4, 24)
    for radius in (1.5 * longest(honest), 0.2):
        section = AggregationSection(
            secure_aggregation=True, weighting="equal", max_delta_norm=radius, delta_bound=BOUND
        )

        def as_agents(delta: Vector, _: Vector, section: AggregationSection = section) -> Vector:
            return summed(section, [len(delta)], delta.astype("<f4"), summary(10, 1.0))[0].astype(np.float64)

        rounds = MaskedRounds(honest, as_agents)
        assert one_delta(rounds, radius, directions(generator, 24), most_rounds=12) is None
        assert rounds.rounds >= 12


@settings(max_examples=100, deadline=None)
@given(seed=seeds, silos=st.integers(2, 8), elements=st.integers(3, 60), wide=st.floats(1.05, 3.0))
def test_attack_whatever_the_deltas_a_radius_that_cuts_nobody_at_first_gives_one_away(
    seed: int, silos: int, elements: int, wide: float
) -> None:
    """The radius that plan.md would advise."""
    generator = np.random.default_rng(seed)
    honest = deltas(generator, silos, elements)
    radius = wide * longest(honest)
    found = one_delta(PlainRounds(honest, around(radius)), radius, directions(generator, elements))
    assert found is not None
    assert off(found.delta, honest) < 1e-2


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_attack_a_radius_that_cuts_everybody_in_every_round_gives_all_away(seed: int) -> None:
    """Six sums of the same three deltas around other centres have one solution, and it is found."""
    generator = np.random.default_rng(seed)
    honest = deltas(generator, 3, 8)
    centres = [2.0 * direction(generator, 8) for _ in range(6)]
    sums = [sum_around(centre, 0.1, honest) for centre in centres]
    found = all_deltas(sums, centres, 0.1, 3, generator)
    assert found is not None
    assert all(off(delta, list(found)) < 1e-3 for delta in honest)


@settings(max_examples=300, deadline=None)
@given(
    seed=seeds,
    silos=st.integers(2, 6),
    elements=st.integers(2, 12),
    moved=st.floats(1e-3, 1.0),
    radius=st.floats(0.5, 100.0),
)
def test_no_move_of_a_centre_is_too_small(seed: int, silos: int, elements: int, moved: float, radius: float) -> None:
    """Of any two centres there are deltas of which one silo's alone is cut in one round, and nobody's in the other:
    the difference of the sums lies along what that silo is off the centre."""
    generator = np.random.default_rng(seed)
    first, step = generator.normal(size=elements), direction(generator, elements)
    second = first + moved * step
    loud = second - (radius + moved / 2) * step  # within radius of the first centre, beyond that of the second
    quiet = [first + 0.4 * (radius - moved) * direction(generator, elements) for _ in range(silos - 1)]
    if radius <= moved:
        quiet = [(first + second) / 2 for _ in range(silos - 1)]
    honest = [loud, *quiet]
    before, after = (sum_around(centre, radius, honest) for centre in (first, second))
    assert after - before == pytest.approx(moved / 2 * step, abs=1e-9 * radius)


# --- with the agents' trainer

RADIUS, PUSH = 0.38, 0.225  # the longest delta has a norm of 0.45, the others of 0.24


@lru_cache(maxsize=1)
def rounds_of_training() -> tuple[list[Vector], list[list[Vector]]]:
    """Deltas of a first round, and of six more at models that differ by a hundredth of the means: `server_learning_rate`
    of 0.01. Every silo draws another order in every round."""
    t5 = model(False)
    section = TrainingSection(
        learning_rate=1e-3, learning_rate_schedule="constant", dropout=0.0, epochs=3, batch_size=16
    )
    start = torch.nn.utils.parameters_to_vector(t5.parameters()).detach()

    def delta(silo: int, begin: torch.Tensor, seed: int) -> Vector:
        local = copy.deepcopy(t5)
        torch.nn.utils.vector_to_parameters(begin.clone(), local.parameters())
        before = [parameter.detach().clone() for parameter in local.parameters()]
        train_undisturbed(local, list(local.parameters()), examples(silo), section, seed=seed, round_parameters=before)
        after = torch.nn.utils.parameters_to_vector(local.parameters()).detach()
        return np.asarray((after - begin).double().numpy())

    first = [delta(silo, start, silo) for silo in range(len(SIZES))]
    later = []
    for number in range(1, 7):
        start = start + 0.01 * torch.from_numpy(pushed(first, number)).float()
        later.append([delta(silo, start, 100 * number + silo) for silo in range(len(SIZES))])
    return first, later


def pushed(first: list[Vector], number: int) -> Vector:
    """Where the colluder puts the centre: along the first sum, back and forth."""
    total = np.sum(first, axis=0)
    return np.asarray((-1) ** number * PUSH * total / np.linalg.norm(total))


def likeness(one: Vector, other: Vector) -> float:
    """Their cosine."""
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def difference(centre: Callable[[int], Vector]) -> Vector:
    """Of the sums of every second of the six rounds, less the others."""
    _, later = rounds_of_training()
    sums = [(-1) ** number * sum_around(centre(number), RADIUS, trained) for number, trained in enumerate(later, 1)]
    return np.asarray(np.sum(sums, axis=0))


def test_attack_six_rounds_of_true_training_show_the_longest_delta() -> None:
    """Though models and orders of data are others in each round. What the plain sum has of it does not count here: a
    sum is what a coordinator may see. Around 0 the same difference has nothing of it."""
    first, _ = rounds_of_training()
    known = np.sum(first, axis=0) / np.linalg.norm(np.sum(first, axis=0))

    def beside(vector: Vector) -> Vector:
        return np.asarray(vector - (vector @ known) * known)

    loudest = beside(max(first, key=lambda delta: float(np.linalg.norm(delta))))
    moving, still = (
        likeness(beside(difference(centre)), loudest) for centre in (partial(pushed, first), lambda _: 0 * known)
    )
    assert abs(moving) > 0.6
    assert abs(still) < 0.15
