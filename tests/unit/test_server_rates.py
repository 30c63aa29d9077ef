"""`[aggregation] server_rate_at_end`: a server's learning rate that falls over the rounds of its plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.masked_vectors.mask_stream import Workspace
from lorica_security.secure_aggregation.model_evidence.evidence import opened
from lorica_security.secure_aggregation.silo.party import Demands
from silo_wire.checkable_round import FalseChunk, Pieces
from silo_wire.checked_chunk import CheckedRound, StepRule
from silo_wire.codecs.evidence_codec import checkable_from_bytes
from silo_wire.plans.plan import Plan
from silo_wire.plans.plan_optimizer import optimizer_of
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.server_rates import UNCHANGED, ServerRates
from silo_wire.plans.sections.who_trains import WhoTrains
from silo_wire.server_step.apply_mean import apply_mean
from silo_wire.server_step.server_optimizer import slots
from tests.support.coordinator_edges import Workplace, make_plan, stored_vector
from tests.support.federation_peer import small_bundle
from tests.support.masked_round import LAYOUT, MaskedPlace
from tests.support.secagg_federation import FEDERATION
from tests.unit.test_coordinator_evidence import next_round, store_of


def test_it_falls_in_a_straight_line_from_the_first_round_to_the_last() -> None:
    rates = ServerRates(at_end=0.2, rounds=5)
    assert [rates.of(number, 3) for number in range(1, 6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


@given(at_end=st.floats(0.01, 1.0), rounds=st.integers(1, 10_000), data=st.data())
def test_it_never_rises_and_is_never_below_its_end(at_end: float, rounds: int, data: st.DataObject) -> None:
    rates = ServerRates(at_end=at_end, rounds=rounds)
    earlier = data.draw(st.integers(1, rounds))
    later = data.draw(st.integers(earlier, rounds))
    assert rates.of(1, 3) == 1.0
    assert 1.0 >= rates.of(earlier, 3) >= rates.of(later, 3) >= at_end * (1 - 2**-40)
    assert rates.of(rounds, 3) == pytest.approx(at_end if rounds > 1 else 1.0)


def test_rounds_without_labels_have_the_part_of_both() -> None:
    rates = ServerRates(who=WhoTrains(unlabelled=("*",), labelled_alone="in_turn"), at_end=0.5, rounds=3)
    assert rates.of(2, 3) == 0.75 * 0.75


def test_a_plan_says_it(tmp_path: Path) -> None:
    plan = small_bundle(aggregation={"server_rate_at_end": 0.1}, schedule={"rounds": 7, "min_silos": 1}).plan
    assert plan.server_rates == ServerRates(at_end=0.1, rounds=7)
    assert Plan.from_json(plan.to_json()).aggregation.server_rate_at_end == 0.1
    assert "server_rate_at_end" not in json.loads(small_bundle().plan.to_json())["aggregation"], (
        "a plan of before has the digest that it had"
    )


@pytest.mark.parametrize(
    ("aggregation", "said"),
    [
        ({"server_rate_at_end": 0.0}, "server_rate_at_end"),
        ({"server_rate_at_end": 1.5}, "server_rate_at_end"),
        (
            {"server_rate_at_end": 0.05, "server_learning_rate": 0.1},
            r"\"sgd\" to 0.005 in the last round, .* almost as it was: set at least 0.1, or a higher server_learning_rate",
        ),
        (
            {"server_rate_at_end": 0.01, "server_learning_rate": 0.003, "server_optimizer": "adam"},
            r"\"adam\" to 3e-05 in the last round, .* almost as it was: set at least 0.0334",
        ),
        (
            {"server_learning_rate": 1e-3, "server_optimizer": "adam", "tau": 0.5},
            r'server_learning_rate = 0.001 of server_optimizer = "adam" leaves .* set at least 0.005',
        ),
        ({"server_learning_rate": 0.01, "server_optimizer": "yogi", "tau": 1.0}, "set at least 0.2"),
        ({"server_learning_rate": 0.01, "server_optimizer": "adagrad", "tau": 1.0}, "set at least 0.02"),
    ],
)
def test_what_would_leave_the_model_as_it_was_is_refused(aggregation: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small_bundle(aggregation=aggregation)


def test_a_plan_of_one_round_is_refused() -> None:
    with pytest.raises(ValueError, match=r"server_rate_at_end = 0.5 does not go with \[schedule\] rounds = 1, whose"):
        small_bundle(aggregation={"server_rate_at_end": 0.5}, schedule={"rounds": 1, "min_silos": 1})


@pytest.mark.parametrize("name", ["sgd", "adam", "yogi", "adagrad"])
@pytest.mark.parametrize("tau", [1e-8, 1e-3, 0.5])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_at_the_least_rate_a_first_step_is_a_hundredth_of_a_small_delta(name: str, tau: float, beta1: float) -> None:
    rest = {"server_optimizer": name, "tau": tau, "beta1": beta1, "momentum": 0.0}
    low, high = 1e-5, 1.0
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        try:
            AggregationSection.model_validate({**rest, "server_learning_rate": middle})
        except ValueError:
            low = middle
        else:
            high = middle
    optimizer = optimizer_of(AggregationSection.model_validate({**rest, "server_learning_rate": high}))
    delta = 1e-9
    model, state = torch.zeros(1), {slot: torch.full((1,), fill) for slot, fill in slots(optimizer).items()}
    apply_mean(model, torch.tensor([delta]), optimizer, state, step_number=1, scratch=torch.empty(1))
    assert float(model) >= 0.0099 * delta


def test_the_remedy_that_it_names_is_one() -> None:
    small_bundle(aggregation={"server_rate_at_end": 0.0334, "server_learning_rate": 0.003, "server_optimizer": "adam"})


@pytest.mark.parametrize(
    "reducer",
    [
        {"reducer": "mean"},
        {"reducer": "median"},
        {"reducer": "geometric_median"},
        {"reducer": "trimmed_mean", "trimmed_share": 0.25},
        {"reducer": "multi_krum", "hostile_silos": 1},
        {"reducer": "centred_clipping", "clipping_radius": 500.0},
        {"reducer": "nearest_neighbour_mixing", "hostile_silos": 1},
    ],
    ids=lambda section: section["reducer"],
)
def test_the_server_steps_by_it_and_says_so(tmp_path: Path, reducer: dict[str, Any]) -> None:
    place = Workplace.at(tmp_path / "state", make_plan(tmp_path / "state"))
    section = {"weighting": "equal", "momentum": 0.0, "server_learning_rate": 0.5, **reducer}
    aggregator = place.aggregator(section, rates=ServerRates(at_end=0.2, rounds=5))
    base = place.models.initial()
    before = stored_vector(place.models, base)
    delta = np.full_like(before, 0.5)
    for number, part in ((1, 1.0), (2, 0.8), (5, 0.2)):
        key = place.key(number)
        sent = [place.send(key, SiloName(f"ward-{silo}"), delta) for silo in range(5)]
        result = aggregator.updates.reduce(key, base, sent)
        assert result.step_length == pytest.approx(part)
        np.testing.assert_allclose(stored_vector(place.models, result.model) - before, 0.5 * part * delta, atol=1e-6)


@pytest.mark.parametrize(
    "other", [UNCHANGED, ServerRates(at_end=0.5, rounds=3), ServerRates(at_end=0.4, rounds=4)], ids=repr
)
def test_a_silo_makes_a_masked_round_again_at_its_rate_and_at_no_other(tmp_path: Path, other: ServerRates) -> None:
    rates = ServerRates(at_end=0.5, rounds=4)
    place = MaskedPlace.at(tmp_path / "state", {"weighting": "equal"}, rates=rates)
    store, initial = store_of(place), place.models.initial()
    federation, model = next_round(place, store, 2, initial)
    checkable = checkable_from_bytes(store.read(model), FEDERATION)
    rule = StepRule(optimizer=optimizer_of(place.section), layout=LAYOUT, model_layout=LAYOUT, rates=rates)
    shown = opened(checkable.evidence, federation.identities, Demands())
    pieces = Pieces.of(checkable, store.pieces(model, 0))
    CheckedRound(rule, checkable, shown).check(0, pieces, Workspace())
    with pytest.raises(FalseChunk):
        CheckedRound(replace(rule, rates=other), checkable, shown).check(0, pieces, Workspace())
