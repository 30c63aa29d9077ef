"""FedNova: a cohort worked by hand, what holds for every cohort, the plans that it goes with, and masks."""

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lorica_coordinator.aggregation.round_arithmetic import aggregate_slab
from lorica_coordinator.aggregation.weighting import SiloSummary, WeightCaps, weigh
from lorica_coordinator.edges.sums.aggregator import Aggregator
from lorica_coordinator.plans.forecast import forecast
from lorica_coordinator.rounds.updates import CommittedUpdate
from lorica_coordinator.service.unusable import UnusableUpdate
from lorica_security.errors import MalformedMessage, StateError
from lorica_security.identifiers import SiloName
from silo_agent.training.update.masked_vector import own_share, own_weight
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.training import TrainingSection
from silo_wire.plans.work import optimizer_steps
from silo_wire.server_step.server_optimizer import FED_AVG
from silo_wire.weightings import named
from silo_wire.weightings.fednova import FEDNOVA
from silo_wire.weightings.size import SIZE
from tests.support.coordinator_edges import stored_vector, summary, update_header
from tests.support.federation_peer import small_bundle
from tests.support.masked_round import LAYOUT, MaskedPlace, Trained
from tests.support.secagg_federation import silo_names

NAMES = silo_names(3)
EXAMPLES, STEPS, DELTAS = (100, 300, 600), (10, 30, 20), (0.010, -0.030, 0.040)
"""Sizes 0.1, 0.3 and 0.6 of all; 0.001, -0.001 and 0.002 a step, 0.001 on average; 22 steps on average, 20 in the
harmonic mean."""
TRAINING = TrainingSection(batch_size=10, overrides={NAMES[2]: {"batch_size": 30}})
"""By which the three make those steps."""


def told(silo: str, examples: int, steps: int) -> SiloSummary:
    return SiloSummary(
        silo=SiloName(silo), examples=examples, loss_reduction=0.5, optimizer_steps=steps, delta_norm=1.0
    )


COHORT = [told(*facts) for facts in zip(NAMES, EXAMPLES, STEPS, strict=True)]


# --- by hand


def test_the_weights_are_examples_per_step_and_the_length_is_that_of_an_average_silo() -> None:
    cohort = weigh(COHORT, weighting=FEDNOVA)
    assert [silo.raw_weight for silo in cohort.silos] == [10.0, 10.0, 30.0]
    assert [silo.share for silo in cohort.silos] == pytest.approx([0.2, 0.2, 0.6], rel=1e-15)
    assert cohort.length == pytest.approx(22 / 20, rel=1e-15)


def test_a_round_by_hand() -> None:
    model = torch.ones(1)
    deltas = [(name, torch.tensor([delta])) for name, delta in zip(NAMES, DELTAS, strict=True)]
    aggregate_slab(model, deltas, weigh(COHORT, weighting=FEDNOVA), FED_AVG, {}, step_number=1)
    assert float(model[0]) == pytest.approx(1 + 22 * 0.001, rel=1e-6)


def test_a_cap_cuts_the_weight_and_leaves_the_length() -> None:
    cohort = weigh(COHORT, weighting=FEDNOVA, caps=WeightCaps(max_weight=10.0))
    assert [silo.share for silo in cohort.silos] == pytest.approx([1 / 3] * 3, rel=1e-15)
    assert cohort.length == pytest.approx(22 / 20, rel=1e-15)


def test_a_silo_without_a_step_has_no_weight() -> None:
    with pytest.raises(MalformedMessage, match="a silo of 100 examples reports no optimizer step"):
        weigh([told("a", 100, 0)], weighting=FEDNOVA)


# --- for every cohort


@st.composite
def cohorts(draw: st.DrawFn) -> list[SiloSummary]:
    count = draw(st.integers(1, 9))
    return [told(f"silo-{i}", draw(st.integers(1, 10**9)), draw(st.integers(1, 10_000))) for i in range(count)]


def factors(cohort: list[SiloSummary]) -> list[float]:
    weighed = weigh(cohort, weighting=FEDNOVA)
    return [weighed.length * silo.factor for silo in weighed.silos]


@settings(deadline=None)
@given(cohorts())
def test_each_delta_counts_as_the_paper_says(cohort: list[SiloSummary]) -> None:
    size = sum(silo.examples for silo in cohort)
    of_average = sum(Fraction(silo.examples, size) * silo.optimizer_steps for silo in cohort)
    for silo, factor in zip(cohort, factors(cohort), strict=True):
        wanted = of_average * Fraction(silo.examples, size) / silo.optimizer_steps
        assert factor == pytest.approx(float(wanted), rel=1e-12)


@settings(deadline=None)
@given(cohorts(), st.integers(1, 10_000))
def test_equal_steps_are_fedavg_by_size(cohort: list[SiloSummary], steps: int) -> None:
    alike = [replace(silo, optimizer_steps=steps) for silo in cohort]
    by_size = [silo.share for silo in weigh(alike, weighting=SIZE).silos]
    assert factors(alike) == pytest.approx(by_size, rel=1e-12)


@settings(deadline=None)
@given(cohorts(), st.floats(-1.0, 1.0))
def test_silos_that_agree_on_a_step_move_the_model_by_the_average_number_of_steps(
    cohort: list[SiloSummary], step: float
) -> None:
    size = sum(silo.examples for silo in cohort)
    moved = math.fsum(
        factor * silo.optimizer_steps * step for silo, factor in zip(cohort, factors(cohort), strict=True)
    )
    assert moved == pytest.approx(step * sum(it.examples * it.optimizer_steps for it in cohort) / size, rel=1e-9)


SETTINGS = st.builds(
    TrainingSection, epochs=st.integers(1, 9), batch_size=st.integers(1, 64), gradient_accumulation=st.integers(1, 4)
)


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=9), SETTINGS)
def test_no_claim_of_examples_takes_the_model_or_makes_the_mean_long(
    sizes: list[int], section: TrainingSection
) -> None:
    """The coordinator holds steps to the plan, so that a claim of examples is a claim of steps."""
    cohort = [told(f"silo-{i}", size, optimizer_steps(size, section)) for i, size in enumerate(sizes)]
    weighed = weigh(cohort, weighting=FEDNOVA)
    most = section.batch_size * section.gradient_accumulation / section.epochs
    assert all(silo.raw_weight <= most for silo in weighed.silos)
    assert 1 - 1e-12 <= weighed.length <= len(sizes)


# --- plans


def plan(sections: Mapping[str, Any]) -> Plan:
    return small_bundle(**{"aggregation": {"weighting": "fednova"}, **sections}).plan


MASKED: dict[str, Any] = {
    "schedule": {"rounds": 3, "min_silos": 3},
    "evaluation": {"every": 0, "initial": False, "last": False},
    "aggregation": {"weighting": "fednova", "secure_aggregation": True, "max_weight": 16.0},
}


def test_a_plan_names_it_and_needs_no_loss() -> None:
    made = plan({})
    assert made.aggregation.weighs is FEDNOVA
    assert not made.weighted
    assert Plan.from_json(made.to_json()) == made
    assert plan({"training": {"overrides": {"a": {"batch_size": 4, "epochs": 2}}}}).aggregation.weighs is FEDNOVA
    assert plan(MASKED).aggregation.weight_cap == 16.0


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"training": {"fedprox_mu": 0.1}},
            r'\[training\] fedprox_mu = 0.1 does not go with .*weighting = "fednova", which counts every step alike',
        ),
        (
            {"training": {"steps": 4}},
            r'\[training\] steps = 4 does not go with .*"fednova", .*it is "size": set it to 0',
        ),
        (
            {"training": {"overrides": {"a": {"learning_rate": 0.002}}}},
            r"\[training.overrides.a\] learning_rate = 0.002 .*: set it to that of \[training\], 0.001",
        ),
        (
            {"privacy": {"level": "record"}},
            r'"fednova" does not go with .* level = "record", which releases no number of records: set it to '
            r'"lorar" or',
        ),
        (
            {"privacy": {"level": "silo"}},
            r'weighting = "fednova" does not go with \[privacy\] level = "silo"',
        ),
        (
            {"privacy": {"level": "record", "noise": "joint"}},
            r'"fednova" does not go with .* noise = "joint", under which all silos weigh the same: set it to "equal"',
        ),
        (
            {**MASKED, "aggregation": {"weighting": "fednova", "secure_aggregation": True}},
            r"begin with batch_size x gradient_accumulation / epochs, or",
        ),
    ],
)
def test_a_plan_that_it_does_not_go_with_is_refused_by_name(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        plan(sections)


def test_the_forecast_says_what_masks_change(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forecast(plan(MASKED)) == (f'weighting = "fednova" under masks: {FEDNOVA.masks}',)
    assert forecast(plan({})) == ()
    by_size = {**MASKED, "aggregation": {**MASKED["aggregation"], "weighting": "size"}}
    assert forecast(plan(by_size)) == ()
    monkeypatch.setitem(named._BY_NAME, "fednova", replace(FEDNOVA, masks=""))
    with pytest.raises(ValidationError, match='weighting = "fednova" does not go with secure_aggregation'):
        plan(MASKED)


# --- files, and masks


def trained() -> dict[SiloName, Trained]:
    return {
        name: Trained(
            delta=np.full(LAYOUT.parameters, delta, dtype="<f4"),
            summary=replace(summary(examples), optimizer_steps=steps),
        )
        for name, delta, examples, steps in zip(NAMES, DELTAS, EXAMPLES, STEPS, strict=True)
    }


def place(folder: Path, **section: Any) -> MaskedPlace:
    return MaskedPlace.at(folder, {"weighting": "fednova", "max_weight": 30.0, **section})


def in_the_clear(where: MaskedPlace, training: TrainingSection | None) -> np.ndarray[Any, Any]:
    """The model after a round of the three, whose updates the coordinator sees."""
    base, key, updates = where.models.initial(), where.key(), []
    for name, one in trained().items():
        header = update_header(key, base, LAYOUT, one.delta.tobytes(), chunk_bytes=1 << 20, told=one.summary)
        norm = where.spool(key, name, header, one.delta.tobytes(), LAYOUT)
        updates.append(CommittedUpdate(silo=name, digest=header.manifest.digest, summary=one.summary, delta_norm=norm))
    aggregator = Aggregator(
        where.section,
        models=where.models,
        spools=where.spools,
        update_dtype="float32",
        device=torch.device("cpu"),
        training=training,
    )
    return stored_vector(where.models, aggregator.aggregate(key, base, updates).model)


def test_a_round_of_files_by_hand(tmp_path: Path) -> None:
    model = in_the_clear(place(tmp_path, max_delta_norm=0.0), TRAINING)
    assert model == pytest.approx(22 * 0.001, rel=1e-6)


def test_steps_that_the_plan_does_not_make_cost_the_silo_its_place(tmp_path: Path) -> None:
    with pytest.raises(
        UnusableUpdate, match=r"reports 20 optimizer steps on 600 examples, the plan makes 60 of them"
    ) as found:
        in_the_clear(place(tmp_path), TrainingSection(batch_size=10))
    assert found.value.silo == NAMES[2]


def test_steps_are_not_believed_without_a_plan_to_compare_them_with(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"needs \[training\]"):
        in_the_clear(place(tmp_path), None)


@pytest.mark.slow
def test_under_masks_the_mean_points_the_same_way_and_is_the_harmonic_mean_of_the_steps_long(tmp_path: Path) -> None:
    where = place(tmp_path, max_delta_norm=0.0)
    base = where.models.initial()
    result = where.aggregate(1, base, *where.masked(1, base, trained()))
    assert result.weight_sum == pytest.approx(50.0, rel=1e-6)
    assert result.saturated == 0
    assert stored_vector(where.models, result.model) == pytest.approx(20 * 0.001, rel=1e-3)


@settings(deadline=None)
@given(st.integers(1, 10**9), SETTINGS)
def test_a_silo_that_trains_as_the_plan_says_is_within_the_cap_that_the_plan_names(
    examples: int, section: TrainingSection
) -> None:
    """And at most twice as far below it as others, but for the examples that it lacks to fill one batch."""
    batch = section.batch_size * section.gradient_accumulation
    masked = AggregationSection(weighting="fednova", secure_aggregation=True, max_weight=batch / section.epochs)
    one = replace(summary(examples), optimizer_steps=optimizer_steps(examples, section))
    assert own_weight(masked, one) <= masked.weight_cap * (1 + 1e-12)
    assert own_share(masked, one) >= min(0.5, max(examples / batch, 1 / masked.max_weight_ratio)) * (1 - 1e-12)
