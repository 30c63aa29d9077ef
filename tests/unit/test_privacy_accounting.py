"""Epsilons beside those of dp-accounting, the closed form for q = 1, and the figures of ops/docs/privacy.md."""

import math
from collections.abc import Sequence

import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from scipy import optimize, stats

from security.errors import ConfigurationError
from security.privacy.accounting import (
    LEAST_NOISE,
    MOST_NOISE,
    UNLIMITED,
    GaussianRelease,
    epsilon_of,
    gaussian_delta,
    gaussian_epsilon,
)

DP_DELTA = 1e-5


def by_pld(releases: Sequence[GaussianRelease], dp_delta: float) -> float:
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
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


def test_replacing_one_with_sampling_holds_for_both_halves() -> None:
    """(e, d) for removing and for adding make (2 e, (1 + exp(e)) d)."""
    releases = [GaussianRelease(1.0, 0.02, 200)]
    whole = epsilon_of(releases, dp_delta=DP_DELTA, relation="replace_one")
    each = DP_DELTA / (1 + math.exp(whole / 2))
    assert whole >= 2 * epsilon_of(releases, dp_delta=each) - 0.1
    assert whole > 2 * epsilon_of(releases, dp_delta=DP_DELTA)


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


def test_no_noise_without_sampling() -> None:
    assert epsilon_of([GaussianRelease(0.0)], dp_delta=DP_DELTA) == UNLIMITED


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
