"""Epsilons beside those of dp-accounting, the closed form for q = 1, and the figures of ops/docs/privacy.md."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from lorica_security.errors import ConfigurationError
from lorica_security.privacy.accounting import (
    LEAST_NOISE,
    MOST_NOISE,
    MOST_STEPS,
    UNLIMITED,
    GaussianRelease,
    NeighbouringRelation,
    epsilon_of,
    gaussian_delta,
    gaussian_epsilon,
    merged,
    renyi_divergences,
    renyi_epsilon,
)
from lorica_security.privacy.renyi_filter import ORDERS, filtered_epsilon
from lorica_security.privacy.replaced_unit import ReplacedUnit

pytestmark = pytest.mark.slow

DP_DELTA = 1e-5


def by_pld(
    releases: Sequence[GaussianRelease],
    dp_delta: float,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> float:
    accountant = PLDAccountant(relation)
    for release in releases:
        event = PoissonSampledDpEvent(release.sampling_rate, GaussianDpEvent(release.noise_multiplier))
        accountant.compose(SelfComposedDpEvent(event, release.steps))
    return float(accountant.get_epsilon(dp_delta))


@pytest.mark.parametrize(
    "releases",
    [
        [GaussianRelease(1.0, 0.02, 200)],
        [GaussianRelease(0.6, 0.01, 500)],
        [GaussianRelease(2.0, 0.1, 1000)],
        [GaussianRelease(5.0, 0.25, 60)],
        [GaussianRelease(1.0, 0.02, 200), GaussianRelease(4.0, 1.0, 10)],
        [GaussianRelease(1.1, 0.02, 100), GaussianRelease(0.9, 0.01, 100), GaussianRelease(10.0, 1.0, 3)],
    ],
)
@pytest.mark.parametrize("dp_delta", [1e-5, 1e-7])
def test_within_two_percent_of_dp_accounting(releases: list[GaussianRelease], dp_delta: float) -> None:
    """And not below it by more than both are uncertain: an epsilon that is too small promises what does not hold."""
    epsilon, other = epsilon_of(releases, dp_delta=dp_delta), by_pld(releases, dp_delta)
    assert abs(epsilon - other) <= 0.02 * other
    assert epsilon >= other * 0.999


def test_the_measured_example() -> None:
    assert epsilon_of([GaussianRelease(1.0, 0.02, 200)], dp_delta=DP_DELTA) == pytest.approx(1.863, abs=0.002)


@pytest.mark.parametrize("steps", [1, 20, 400])
@pytest.mark.parametrize("noise", [0.7, 5.0, 60.0])
def test_without_sampling_the_closed_form(steps: int, noise: float) -> None:
    mu = math.sqrt(steps) / noise

    def delta(epsilon: float) -> float:
        second = epsilon + stats.norm.logcdf(-epsilon / mu - mu / 2)
        return float(stats.norm.cdf(-epsilon / mu + mu / 2) - math.exp(second)) - DP_DELTA

    expected = optimize.brentq(delta, 0.0, 2000.0) if delta(0.0) > 0 else 0.0
    assert epsilon_of([GaussianRelease(noise, 1.0, steps)], dp_delta=DP_DELTA) == pytest.approx(expected, rel=1e-6)


def test_silo_level_example_and_its_double() -> None:
    rounds = [GaussianRelease(5.0, 1.0, 20)]
    assert epsilon_of(rounds, dp_delta=DP_DELTA) == pytest.approx(3.849, abs=0.001)
    doubled = epsilon_of(rounds, dp_delta=DP_DELTA, relation="replace_one")
    assert doubled == pytest.approx(gaussian_epsilon(2 * math.sqrt(20) / 5.0, DP_DELTA))
    assert doubled > 2 * 3.849


def test_the_accountant_agrees_with_the_closed_form_where_nearly_all_are_sampled() -> None:
    almost = epsilon_of([GaussianRelease(5.0, 0.99999, 20)], dp_delta=DP_DELTA)
    assert almost == pytest.approx(epsilon_of([GaussianRelease(5.0, 1.0, 20)], dp_delta=DP_DELTA), rel=0.02)


@pytest.mark.parametrize(
    "releases",
    [
        [GaussianRelease(1.0, 0.02, 200)],
        [GaussianRelease(8.0, 0.5, 60)],
        [GaussianRelease(1.1, 0.02, 50), GaussianRelease(0.9, 0.01, 50)],
    ],
)
@pytest.mark.parametrize("dp_delta", [1e-5, 1e-7])
def test_replacing_one_as_dp_accounting_has_it(releases: list[GaussianRelease], dp_delta: float) -> None:
    epsilon = epsilon_of(releases, dp_delta=dp_delta, relation="replace_one")
    other = by_pld(releases, dp_delta, NeighboringRelation.REPLACE_ONE)
    assert other * 0.999 <= epsilon <= other * 1.02


def test_replacing_one_in_the_measured_example() -> None:
    """By group privacy it was 4.47."""
    epsilon = epsilon_of([GaussianRelease(1.0, 0.02, 200)], dp_delta=DP_DELTA, relation="replace_one")
    assert epsilon == pytest.approx(2.60, abs=0.015)


def test_replacing_one_where_some_steps_take_all() -> None:
    """As weights do, beside sampled gradients."""
    alone = epsilon_of([GaussianRelease(4.0, 1.0, 3)], dp_delta=DP_DELTA, relation="replace_one")
    next_to_nothing = GaussianRelease(50.0, 1e-4, 1)
    assert epsilon_of(
        [GaussianRelease(4.0, 1.0, 3), next_to_nothing], dp_delta=DP_DELTA, relation="replace_one"
    ) == pytest.approx(alone, rel=0.02)


def hockey_stick(threshold: float, rate: float, noise: float, x: Sequence[float], other: Sequence[float]) -> float:
    """E_threshold of one step on x from one on `other`, both in the plane: by a sum over a fine grid."""
    step = noise / 12
    axis = np.arange(-1 - 9 * noise, 1 + 9 * noise, step)
    z = np.stack(np.meshgrid(axis, axis), axis=-1)

    def density(centre: Sequence[float]) -> Any:
        return np.exp(-((z - np.asarray(centre)) ** 2).sum(-1) / (2 * noise**2)) / (2 * np.pi * noise**2)

    nothing = density((0.0, 0.0))
    p, q = ((1 - rate) * nothing + rate * density(centre) for centre in (x, other))
    return float(np.maximum(p - threshold * q, 0.0).sum() * step**2)


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_no_two_vectors_in_the_plane_differ_more_than_opposite_ones(noise: float, rate: float) -> None:
    """The claim that replacing one is accounted by; its proof is in replaced_unit.py."""
    draws, opposite = np.random.default_rng(7), ReplacedUnit(noise, rate)
    for threshold in (0.3, 0.9, 1.0, 1.05, 1.5, 4.0):
        log = np.log(threshold)
        most = 1 - opposite.cdf(log) - threshold * opposite.cdf(-log)  # the loss is as likely -l under Q* as l under P*
        for _ in range(6):
            angle, other_angle = draws.uniform(0, 2 * np.pi, 2)
            length, other_length = draws.choice([0.0, 0.5, 1.0], 2, p=[0.2, 0.2, 0.6])
            x = (length * np.cos(angle), length * np.sin(angle))
            other = (other_length * np.cos(other_angle), other_length * np.sin(other_angle))
            assert hockey_stick(threshold, rate, noise, x, other) <= most + 1e-5  # of the grid


@pytest.mark.parametrize(("noise", "rate"), [(0.5, 0.01), (1.0, 0.02), (4.0, 0.5), (2.0, 1.0)])
def test_the_privacy_loss_of_a_replaced_unit(noise: float, rate: float) -> None:
    """Its distribution function beside draws, and its Renyi divergence beside an integral of scipy's."""
    unit = ReplacedUnit(noise, rate)

    def log_ratio(x: Any) -> Any:
        up, down = (np.log1p(rate * np.expm1((sign * 2 * x - 1) / (2 * noise**2))) for sign in (1, -1))
        return up - down

    at = np.linspace(-3 * noise, 3 * noise, 25)
    expected = (1 - rate) * stats.norm.cdf(at / noise) + rate * stats.norm.cdf((at - 1) / noise)
    assert unit.cdf(log_ratio(at)) == pytest.approx(expected, abs=1e-9)
    for order in (1.5, 3.0, 8.0):

        def density(x: float, order: float = order) -> float:
            down = 1 + rate * math.expm1((-2 * x - 1) / (2 * noise**2))
            return float(stats.norm.pdf(x, scale=noise) * down * math.exp(order * log_ratio(x)))

        moment, _ = integrate.quad(
            density, -12 * noise, 2 * order + 12 * noise, points=[0.0, 1.0, order, 2 * order - 1], limit=500
        )
        assert unit.renyi(order) == pytest.approx(math.log(moment) / (order - 1), rel=1e-6)


def test_epsilon_falls_as_delta_grows() -> None:
    for mu in (0.01, 0.5, 3.0, 30.0):
        epsilons = [gaussian_epsilon(mu, delta) for delta in (1e-12, 1e-9, 1e-5, 0.1)]
        assert epsilons == sorted(epsilons, reverse=True)
        for epsilon, delta in zip(epsilons, (1e-12, 1e-9, 1e-5, 0.1), strict=True):
            if epsilon:
                assert gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-3)


def test_nothing_released_costs_nothing() -> None:
    assert epsilon_of([], dp_delta=DP_DELTA) == 0.0
    assert epsilon_of([GaussianRelease(1.0, 0.5, 0)], dp_delta=DP_DELTA) == 0.0


@pytest.mark.parametrize("noise", [0.0, LEAST_NOISE / 2])
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_next_to_no_noise_promises_nothing(noise: float, relation: str) -> None:
    releases = [GaussianRelease(1.0, 0.02, 200), GaussianRelease(noise, 0.5, 1)]
    assert epsilon_of(releases, dp_delta=DP_DELTA, relation=relation) == UNLIMITED  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "release", [GaussianRelease(5.0, 0.001, MOST_STEPS + 1), GaussianRelease(0.5, 0.1, 400)], ids=["steps", "epsilon"]
)
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_what_an_accountant_would_be_long_about_promises_nothing_at_once(
    release: GaussianRelease, relation: NeighbouringRelation
) -> None:
    assert epsilon_of([release], dp_delta=DP_DELTA, relation=relation) == UNLIMITED


def test_no_noise_without_sampling() -> None:
    assert epsilon_of([GaussianRelease(0.0)], dp_delta=DP_DELTA) == UNLIMITED
    assert epsilon_of([GaussianRelease(1.0), GaussianRelease(0.0)], dp_delta=DP_DELTA) == UNLIMITED


def test_enormous_noise() -> None:
    assert epsilon_of([GaussianRelease(10 * MOST_NOISE, 0.1, 100)], dp_delta=DP_DELTA) < 0.05


@pytest.mark.parametrize("dp_delta", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_that_is_no_probability(dp_delta: float) -> None:
    with pytest.raises(ConfigurationError, match="dp_delta"):
        epsilon_of([], dp_delta=dp_delta)


def test_an_unknown_relation() -> None:
    with pytest.raises(ConfigurationError, match="zero_out_one"):
        epsilon_of([], dp_delta=DP_DELTA, relation="zero_out_one")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("noise", "rate", "steps"),
    [(-1.0, 0.5, 1), (math.nan, 0.5, 1), (math.inf, 0.5, 1), (1.0, 0.0, 1), (1.0, 1.5, 1), (1.0, 0.5, -1)],
)
def test_releases_that_are_none(noise: float, rate: float, steps: int) -> None:
    with pytest.raises(ConfigurationError):
        GaussianRelease(noise, rate, steps)


def exact_divergence(order: int, shift: int, sigma: float, rate: float) -> float:
    """Of a discrete Gaussian of which a sample is shifted by a whole number: summed up, the worse of both ways
    round."""
    reach = int(shift * order + 12 * sigma)
    numbers = np.arange(-reach, reach + 1)
    plain = np.exp(-(numbers**2) / (2 * sigma**2))
    shifted = np.exp(-((numbers - shift) ** 2) / (2 * sigma**2))
    either = (1 - rate) * plain + rate * shifted
    known = (plain > 0) & (either > 0)
    log_ratio = np.log(either[known]) - np.log(plain[known])
    total = math.fsum(plain)
    there = math.fsum(plain[known] * np.exp(order * log_ratio)) / total
    back = math.fsum(either[known] * np.exp(-order * log_ratio)) / total
    return math.log(max(there, back)) / (order - 1)


@pytest.mark.parametrize(("shift", "sigma"), [(1, 1.0), (3, 2.0), (2, 4.0)])
@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("order", [2, 3, 8])
def test_whole_orders_of_coarse_noise_are_a_gaussians(shift: int, sigma: float, rate: float, order: int) -> None:
    """Even where one step is as large as the noise: so it holds for what several silos make, which is far finer."""
    joint = GaussianRelease(sigma / shift, rate, makers=2)
    (counted,) = renyi_divergences(joint, (order,), "add_or_remove_one")
    assert counted >= exact_divergence(order, shift, sigma, rate) * (1 - 1e-9)
    assert counted == pytest.approx(exact_divergence(order, shift, sigma, rate), rel=1e-6, abs=1e-11)


@pytest.mark.parametrize("rate", [0.02, 1.0])
def test_joint_noise_costs_what_whole_orders_say(rate: float) -> None:
    alone, joint = GaussianRelease(1.5, rate, 80), GaussianRelease(1.5, rate, 80, makers=5)
    orders = range(2, 513)
    costs = [80 * cost for cost in renyi_divergences(joint, tuple(orders), "add_or_remove_one")]
    best = min(renyi_epsilon(order, cost, 1e-5) for order, cost in zip(orders, costs, strict=True))
    counted = epsilon_of([joint], dp_delta=1e-5)
    assert best <= counted <= 1.01 * best
    assert epsilon_of([alone], dp_delta=1e-5) < counted


def test_a_replaced_unit_gains_nothing_from_sampling_under_joint_noise() -> None:
    joint, all_of_them = GaussianRelease(9.0, 0.02, 20, makers=3), GaussianRelease(9.0, 1.0, 20, makers=3)
    assert epsilon_of([joint], dp_delta=1e-5, relation="replace_one") == epsilon_of(
        [all_of_them], dp_delta=1e-5, relation="replace_one"
    )


def test_one_maker_alone_made_a_root_of_the_noise() -> None:
    joint = GaussianRelease(3.0, 0.1, 7, makers=4)
    assert joint.alone == GaussianRelease(1.5, 0.1, 7, part=True)
    assert joint.alone.alone == joint.alone
    assert GaussianRelease(3.0, 0.1, 7).alone == GaussianRelease(3.0, 0.1, 7)
    assert merged([joint, GaussianRelease(3.0, 0.1, 7), joint]) == [
        GaussianRelease(3.0, 0.1, 14, makers=4),
        GaussianRelease(3.0, 0.1, 7),
    ]
    assert epsilon_of([joint.alone], dp_delta=1e-5) > epsilon_of([joint], dp_delta=1e-5)


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
@settings(max_examples=40, deadline=None)
@given(
    noise=st.floats(0.5, 20),
    rate=st.floats(0.005, 1),
    steps=st.integers(1, 300),
    makers=st.integers(2, 12),
    order=st.sampled_from(ORDERS),
)
def test_one_maker_alone_never_seems_to_promise_more_than_all_together(
    relation: NeighbouringRelation, noise: float, rate: float, steps: int, makers: int, order: int
) -> None:
    """Also where a line is replaced: for its part of the noise no more is proven of sampling than for all of it."""
    joint = GaussianRelease(noise, rate, steps, makers=makers)
    for count in (
        lambda release: filtered_epsilon([release], favoured=order, dp_delta=1e-5, relation=relation),
        lambda release: epsilon_of([release], dp_delta=1e-5, relation=relation),
    ):
        assert count(joint.alone) >= count(joint)


def test_the_example_of_the_page() -> None:
    """80 steps of a fortieth of the records: epsilon 1 towards who sees sums, and what one of five is left with."""
    low, high = 0.5, 4.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if epsilon_of([GaussianRelease(middle, 0.025, 80, makers=5)], dp_delta=1e-5) > 1
            else (low, middle)
        )
    alone = epsilon_of([GaussianRelease(high, 0.025, 80, makers=5).alone], dp_delta=1e-5)
    assert (round(high, 2), round(alone, 1)) == (1.38, 7.3)
