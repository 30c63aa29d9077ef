"""Silo-level privacy in a plan: its cost in closed form, what does not go with it, and what the forecast says and
refuses."""

import math
from typing import Any

import pytest
from pydantic import ValidationError
from scipy import optimize, stats

from lorica_coordinator.plans.forecast import forecast, require_worth
from lorica_security.errors import ConfigurationError
from lorica_security.privacy.accounting import GaussianRelease
from silo_wire.canonical import digest_of
from silo_wire.plans.plan import Plan
from silo_wire.plans.privacy import PrivacySection, calibrated_noise

QUIET = {"every": 0, "initial": False, "last": False}
LEVEL = {"level": "silo", "target_epsilon": 4.0, "noise_multiplier": 5.0, "nominal_silos": 400}
WEIGHED = {"weighting": "lorar", "max_weight": 500.0, "max_delta_norm": 2.0}
MASKED = {**WEIGHED, "secure_aggregation": True}


def plan(parameters: int = 10_000, min_silos: int = 3, **sections: Any) -> Plan:
    values: dict[str, Any] = {
        "name": "first",
        "federation": "north",
        "model": {
            "source": "none",
            "parameters": parameters,
            "layout": digest_of(b"layout"),
            "initial": digest_of(b"initial"),
            "files": {"config.json": digest_of(b"{}"), "layout.json": digest_of(b"[]")},
        },
        "schedule": {"rounds": 20, "min_silos": min_silos},
        "aggregation": WEIGHED,
        "evaluation": QUIET,
        "privacy": LEVEL,
    }
    for name, changes in sections.items():
        values[name] = {**values[name], **changes} if name in values else changes
    return Plan.model_validate(values)


def closed_form(noise: float, rounds: int, dp_delta: float, *, shift: float = 1.0) -> float:
    """Balle and Wang 2018, by scipy."""
    mu = shift * math.sqrt(rounds) / noise

    def excess(epsilon: float) -> float:
        return float(
            stats.norm.cdf(mu / 2 - epsilon / mu)
            - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
            - dp_delta
        )

    return float(optimize.brentq(excess, 0, 200))


@pytest.mark.parametrize(("relation", "shift"), [("add_or_remove_one", 1.0), ("replace_one", 2.0)])
@pytest.mark.parametrize(("noise", "rounds"), [(5.0, 20), (1.2, 3), (30.0, 500)])
def test_rounds_cost_what_the_closed_form_says(noise: float, rounds: int, relation: str, shift: float) -> None:
    section = PrivacySection.model_validate({**LEVEL, "noise_multiplier": noise, "neighbouring_relation": relation})
    cost = section.epsilon(rounds=rounds, weighted=True)
    assert cost == pytest.approx(closed_form(noise, rounds, 1e-5, shift=shift), rel=1e-6)
    assert section.epsilon(rounds=rounds, weighted=False) == cost  # the weights are in the sum


def test_the_noise_for_a_target_is_found() -> None:
    section = PrivacySection.model_validate(LEVEL)
    noise = calibrated_noise(section, rounds=20, weighted=True)
    assert closed_form(noise, 20, 1e-5) <= 4.0 < closed_form(noise * 0.998, 20, 1e-5)


def test_who_makes_the_noise_and_who_enters_it() -> None:
    """The silo's ledger counts records: one more or less can turn a clipped delta round, which is twice C."""
    assert plan().noise_at == "coordinator"
    assert plan().releases_of_round == []
    assert plan(aggregation=MASKED).noise_at == "silos"
    assert plan(aggregation=MASKED).releases_of_round == [("delta", GaussianRelease(2.5))]
    assert plan(privacy={"level": "none"}).noise_at == "nowhere"


@pytest.mark.parametrize(
    ("section", "changes", "said"),
    [
        ("aggregation", {"weighting": "size"}, r'weighting = "size".*set it to "lorar" or "equal"'),
        ("aggregation", {"weighting": "loss_reduction"}, r"weighting = \"loss_reduction\""),
        ("aggregation", {"max_weight": 0.0}, r"max_weight = 0 .*the most that a silo may weigh"),
        ("aggregation", {"max_delta_norm": 0.0}, r"max_delta_norm = 0 .*clipped to"),
        ("aggregation", {"max_weight_share": 0.5}, r"max_weight_share = 0\.5 .*nominal_silos.*set it to 0"),
        ("wire", {"update": "bfloat16"}, r'update = "bfloat16".*set it to "float32"'),
        ("wire", {"update": "int8"}, r'update = "int8".*whose clipping bounds.*set it to "float32"'),
        ("evaluation", {"every": 1}, r"\[evaluation\] every = 1 .*set it to 0"),
        ("evaluation", {"initial": True}, r"\[evaluation\] initial = True .*set it to false"),
        ("evaluation", {"last": True}, r"\[evaluation\] last = True"),
        ("privacy", {"nominal_silos": 0}, r"nominal_silos"),
        ("privacy", {"max_noise_to_signal": 0.0}, r"max_noise_to_signal"),
    ],
)
def test_what_does_not_go_with_it_is_refused(section: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        plan(**{section: changes})


def test_equal_weights_need_no_cap() -> None:
    assert plan(aggregation={"weighting": "equal", "max_weight": 0.0}).aggregation.weight_cap == 1.0


def test_a_plan_whose_noise_drowns_its_sum_is_refused_with_how_many_silos_would_do() -> None:
    require_worth(plan(parameters=6_400), "plan.toml")
    drowned = plan(parameters=1_000_000)
    with pytest.raises(ConfigurationError, match=r"plan\.toml: .* 12\.5 times as long as 400 silos .*: 5,000 silos"):
        require_worth(drowned, "plan.toml")
    enough = plan(parameters=1_000_000, privacy={**LEVEL, "nominal_silos": 5000})
    require_worth(enough, "plan.toml")
    assert any("noise to signal: 1 with 5000 silos" in line for line in forecast(enough))
    with pytest.raises(ConfigurationError):
        require_worth(plan(parameters=1_000_000, privacy={**LEVEL, "nominal_silos": 4999}), "plan.toml")


def test_silos_that_make_the_noise_are_as_many_as_secure_aggregation_takes() -> None:
    masked = {"privacy": {**LEVEL, "nominal_silos": 200}, "aggregation": MASKED}
    require_worth(plan(parameters=1600, **masked), "plan.toml")
    with pytest.raises(ConfigurationError, match=r"nominal_silos = 400, and secure aggregation .* at most 200"):
        require_worth(plan(parameters=1600, aggregation=MASKED), "plan.toml")
    drowned = {**LEVEL, "noise_multiplier": 1e6, "max_noise_to_signal": 1e12, "nominal_silos": 200}
    with pytest.raises(ConfigurationError, match=r"cohort of 3 silos cannot keep the promise: .* 32-bit words"):
        require_worth(plan(privacy=drowned, aggregation=MASKED), "plan.toml")


def test_the_forecast_names_unit_relation_cost_and_whom_the_promise_is_towards() -> None:
    (promise, towards, ratio) = forecast(plan())
    for said in (
        "epsilon",
        "of 4 at dp_delta 1e-05 for 20 rounds",
        "a silo with all of its records",
        "add_or_remove_one",
    ):
        assert said in promise
    assert "the coordinator makes the noise: it sees every delta" in towards
    assert "noise to signal: 1.25 with 400 silos (at most 1), 167 with min_silos = 3" in ratio
    assert "towards the coordinator" in forecast(plan(aggregation=MASKED))[1]
    assert forecast(plan(privacy={"level": "none"})) == ()


def records(**privacy: Any) -> Plan:
    section = {"level": "record", "noise_multiplier": 1.0, "loss_noise_multiplier": 5.0, "loss_bound": 10.0, **privacy}
    return plan(privacy=section, training={"max_grad_norm": 1.0, "dropout": 0.0})


def test_the_forecast_says_where_noise_drowns_the_weights() -> None:
    few, many = records(nominal_records=400), records(nominal_records=600)
    assert any('weighting = "equal"' in line for line in forecast(few))  # 50 beside 80
    assert not any('weighting = "equal"' in line for line in forecast(many))  # 50 beside 120
    assert "noise on a silo's weight: 50, beside 120" in forecast(many)[1]
    assert (
        len(
            forecast(
                records(nominal_records=400).model_copy(
                    update={"aggregation": plan(aggregation={"weighting": "equal"}).aggregation}
                )
            )
        )
        == 1
    )
