"""q-FedAvg: a cohort worked by hand, what holds for every cohort, the plans that it goes with, and masks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lorica_coordinator.aggregation.weighting import SiloSummary, WeightCaps, weigh
from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName
from silo_agent.commands.plan_review import unusual
from silo_agent.training.update.masked_vector import own_share, own_weight
from silo_wire.messages import TrainingSummary
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.weightings.q_fedavg import q_fedavg
from silo_wire.weightings.size import SIZE
from tests.support.federation_peer import small_bundle
from tests.support.robust_rounds import FED_AVG, place_of, reduced, sent

EXAMPLES, LOSSES = (100, 300, 600), (3.0, 1.0, 0.5)


def told(silo: str, examples: int, loss: float) -> SiloSummary:
    return SiloSummary(
        silo=SiloName(silo), examples=examples, loss_reduction=0.5, optimizer_steps=1, delta_norm=1.0, loss_first=loss
    )


COHORT = [told(silo, *facts) for silo, *facts in zip("abc", EXAMPLES, LOSSES, strict=True)]


def shares(cohort: list[SiloSummary], fairness: float) -> list[float]:
    return [silo.share for silo in weigh(cohort, weighting=q_fedavg(fairness)).silos]


# --- by hand


def test_the_weights_by_hand() -> None:
    """100 x 3, 300 x 1 and 600 x 0.5 are 300 each; with squares 900, 300 and 150."""
    assert [silo.raw_weight for silo in weigh(COHORT, weighting=q_fedavg(1.0)).silos] == [300.0, 300.0, 300.0]
    assert shares(COHORT, 2.0) == pytest.approx([900 / 1350, 300 / 1350, 150 / 1350])


def test_a_claim_is_cut_by_the_caps() -> None:
    liar = [*COHORT[:2], told("c", 600, 1e9)]
    weighed = weigh(liar, weighting=q_fedavg(2.0), caps=WeightCaps(max_weight=300.0, max_weight_share=0.4))
    assert [silo.share for silo in weighed.silos] == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("loss", [-0.1, 1.1e9, float("inf"), float("nan")])
def test_a_loss_that_no_training_has_costs_the_silo_its_place(loss: float) -> None:
    with pytest.raises(
        MalformedMessage, match=r"silo a reports a first loss of .*: expected 0 to 1e.09, leave the silo"
    ):
        told("a", 1, loss)


# --- for every cohort

COHORTS = st.lists(
    st.tuples(st.integers(1, 10**9), st.floats(1e-6, 100.0)).map(lambda it: told(f"s{it[0]}", *it)),
    min_size=1,
    max_size=8,
    unique_by=lambda silo: silo.silo,
)


@settings(deadline=None, max_examples=50)
@given(COHORTS, st.floats(0.1, 10.0), st.floats(0.1, 10.0))
def test_a_silo_of_more_loss_counts_more_beside_its_size_the_larger_q(
    cohort: list[SiloSummary], one: float, other: float
) -> None:
    less, more = sorted((one, other))
    worst = max(cohort, key=lambda silo: silo.loss_first)
    at = sorted(cohort, key=lambda silo: silo.silo).index(worst)
    by_size = [silo.share for silo in weigh(cohort, weighting=SIZE).silos]
    assert by_size[at] <= shares(cohort, less)[at] * (1 + 1e-9)
    assert shares(cohort, less)[at] <= shares(cohort, more)[at] * (1 + 1e-9)


@settings(deadline=None, max_examples=50)
@given(COHORTS, st.floats(0.1, 10.0), st.floats(0.01, 100.0))
def test_the_unit_of_the_loss_changes_no_share(cohort: list[SiloSummary], fairness: float, unit: float) -> None:
    other = [told(silo.silo, silo.examples, silo.loss_first * unit) for silo in cohort]
    assert shares(other, fairness) == pytest.approx(shares(cohort, fairness), rel=1e-9, abs=1e-12)


# --- plans, files and masks

FAIR: dict[str, Any] = {"weighting": "q_fedavg", "fairness": 2.0}


def plan(aggregation: dict[str, Any], **sections: Any) -> Plan:
    return small_bundle(aggregation=aggregation, schedule={"rounds": 3, "min_silos": 3}, **sections).plan


def test_a_plan_names_it_with_its_power() -> None:
    made = plan(FAIR)
    assert made.aggregation.weighs == q_fedavg(2.0)
    assert Plan.from_json(made.to_json()) == made
    assert not made.weighted


def test_a_power_that_leaves_a_round_to_one_silo_is_named_as_unusual() -> None:
    said = "[aggregation] fairness = 8 is outside the usual 0 to 5"
    schedule = {"rounds": 3, "min_silos": 3}
    assert said in list(unusual(small_bundle(aggregation={**FAIR, "fairness": 8.0}, schedule=schedule)))
    assert not [line for line in unusual(small_bundle(aggregation=FAIR, schedule=schedule)) if "fairness" in line]


@pytest.mark.parametrize(
    ("aggregation", "sections", "said"),
    [
        (
            {"weighting": "q_fedavg"},
            {},
            r'weighting = "q_fedavg" needs fairness: set it above 0, or weighting to "size"',
        ),
        ({"weighting": "size", "fairness": 1.0}, {}, r'fairness = 1 is read by weighting = "q_fedavg" alone'),
        (FAIR | {"fairness": 11.0}, {}, "fairness"),
        (
            FAIR,
            {"training": {"loss_reduction": "logged"}},
            r'loss_reduction = "logged" does not go with \[aggregation\] weighting = "q_fedavg", which weighs by the '
            r'loss at the round model, and of logged losses none is that: set it to "evaluated"',
        ),
        (
            FAIR,
            {"privacy": {"level": "record"}},
            r'weighting = "q_fedavg" does not go with \[privacy\] level = "record"',
        ),
        (FAIR, {"privacy": {"level": "silo"}}, r'weighting = "q_fedavg" does not go with \[privacy\] level = "silo"'),
        (
            FAIR | {"secure_aggregation": True, "max_weight": 9.0, "fairness": 1.5},
            {},
            "fairness = 1.5 does not go with secure_aggregation: the silo that the model serves worst would be nearly",
        ),
        (
            FAIR | {"secure_aggregation": True},
            {},
            "begin with its examples times its loss at the initial model to the power fairness",
        ),
    ],
)
def test_a_plan_that_it_does_not_go_with_is_refused_by_name(
    aggregation: dict[str, Any], sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        plan(aggregation, **sections)


def test_a_round_of_files_weighs_by_the_loss_that_training_began_with(tmp_path: Path) -> None:
    place = place_of(tmp_path, 2)
    told_of = {"a": (100, 3.0), "b": (300, 1.0)}
    updates = [
        place.send(place.key(), SiloName(silo), np.ones(2, dtype="<f4"), examples=examples, reduction=loss)
        for silo, (examples, loss) in told_of.items()
    ]
    weights = reduced(place, {**FED_AVG, **FAIR}, updates).weights
    assert [(it.weight, it.share) for it in weights] == [(900.0, 0.75), (300.0, 0.25)]
    assert [it.weight for it in reduced(place, dict(FED_AVG), sent(place, {"a": np.ones(2, dtype="<f4")})).weights] == [
        1
    ]


def test_under_masks_a_silo_weighs_itself_the_same() -> None:
    section = AggregationSection.model_validate({**FAIR, "secure_aggregation": True, "max_weight": 1000.0})
    summary = TrainingSummary(
        examples=100, loss_max=3.5, loss_min=1.0, loss_first=3.0, loss_last=1.0, optimizer_steps=5, seconds=1.0
    )
    assert own_weight(section, summary) == 900.0
    assert own_share(section, summary) == 0.9
