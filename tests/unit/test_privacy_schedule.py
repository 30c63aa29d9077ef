"""`[privacy]` of a plan: the releases of a round, what they cost, and the noise that keeps within the target."""

import pytest
from pydantic import ValidationError

from lorica_security.errors import ConfigurationError
from lorica_security.privacy.accounting import GaussianRelease
from silo_wire.plans.privacy import PrivacySection, calibrated_noise

pytestmark = pytest.mark.slow

SECTION = PrivacySection(
    level="record",
    target_epsilon=4.0,
    nominal_records=5000,
    expected_batch_size=100,
    steps=20,
    loss_noise_multiplier=10.0,
)


def test_a_round_releases_gradients_and_a_weight() -> None:
    section = SECTION.model_copy(update={"noise_multiplier": 1.5})
    assert section.releases_of_round(weighted=True) == [
        ("gradients", GaussianRelease(1.5, 0.02, 20)),
        ("loss_reduction", GaussianRelease(10.0)),
    ]
    assert section.releases_of_round(weighted=False) == [("gradients", GaussianRelease(1.5, 0.02, 20))]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_the_noise_keeps_within_the_target_and_little_less_does_not(weighted: bool, relation: str) -> None:
    section = SECTION.model_copy(update={"neighbouring_relation": relation})
    noise = calibrated_noise(section, rounds=10, weighted=weighted)
    assert section.epsilon(rounds=10, weighted=weighted, noise_multiplier=noise) <= 4.0
    assert section.epsilon(rounds=10, weighted=weighted, noise_multiplier=noise * 0.98) > 4.0


def test_more_rounds_and_weights_take_more_noise() -> None:
    few = calibrated_noise(SECTION, rounds=5, weighted=False)
    assert (
        few < calibrated_noise(SECTION, rounds=20, weighted=False) < calibrated_noise(SECTION, rounds=20, weighted=True)
    )


def test_where_records_are_replaced_it_takes_more_noise() -> None:
    replacing = SECTION.model_copy(update={"neighbouring_relation": "replace_one"})
    for weighted in (True, False):
        added = calibrated_noise(SECTION, rounds=10, weighted=weighted)
        assert calibrated_noise(replacing, rounds=10, weighted=weighted) > 1.05 * added


def test_a_target_below_what_the_weights_alone_cost() -> None:
    section = SECTION.model_copy(update={"target_epsilon": 0.5, "loss_noise_multiplier": 2.0})
    with pytest.raises(
        ConfigurationError, match=r"target_epsilon = 0\.5 cannot be reached: the weights of 10 rounds alone cost"
    ):
        calibrated_noise(section, rounds=10, weighted=True)
    assert calibrated_noise(section, rounds=10, weighted=False) > 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_epsilon", 0.0),
        ("target_epsilon", float("inf")),
        ("dp_delta", 0.0),
        ("dp_delta", 1.0),
        ("noise_multiplier", -1.0),
        ("loss_noise_multiplier", float("nan")),
        ("loss_bound", 0.0),
        ("steps", 0),
        ("nominal_records", 0),
        ("neighbouring_relation", "zero_out_one"),
        ("level", "silo-ish"),
    ],
)
def test_values_that_promise_nothing(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=key):
        PrivacySection.model_validate({"level": "record", key: value})


def test_a_sampling_rate_above_one() -> None:
    with pytest.raises(ValidationError, match="sampling rate would be above 1"):
        PrivacySection(level="record", nominal_records=100, expected_batch_size=101)
