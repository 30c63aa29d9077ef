"""Equation 4 of FedParsing as two rounds of the coordinator's own arithmetic, and who trains in which."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lorica_coordinator.aggregation.round_arithmetic import aggregate_slab
from lorica_coordinator.aggregation.weighting import SiloSummary, weigh
from lorica_security.identifiers import SiloName
from silo_wire.plans.sections.server_rates import ServerRates
from silo_wire.plans.sections.who_trains import Alone, WhoTrains
from silo_wire.server_step.server_optimizer import FED_AVG, Sgd, at_rate
from silo_wire.weightings.equal import EQUAL
from tests.support.coordinator_edges import Workplace, make_plan, stored_vector

Vector = NDArray[np.float32]
TURNS = WhoTrains(unlabelled=("ward-*",), labelled_alone="in_turn")


def after_round(model: Vector, local: Sequence[Vector], round_number: int) -> Vector:
    """What a round makes of `model`, from which silos trained `local` and sent their deltas."""
    silos = [SiloName(f"silo-{index:03}") for index in range(len(local))]
    summaries = [
        SiloSummary(silo=silo, examples=1, loss_reduction=0.0, optimizer_steps=1, delta_norm=1.0) for silo in silos
    ]
    cohort = weigh(summaries, weighting=EQUAL)
    deltas = ((silo, torch.from_numpy(own - model)) for silo, own in zip(silos, local, strict=True))
    made = torch.from_numpy(model.copy())
    optimizer = at_rate(FED_AVG, TURNS.server_rate(round_number, len(local)))
    aggregate_slab(made, deltas, cohort, optimizer, {}, step_number=round_number)
    return made.numpy()


@given(
    silos=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1e-6, 1e-2, 1.0, 1e4]),
    moved=st.sampled_from([0.0, 1e-6, 1e-2, 1.0, 3.0]),
    own=st.booleans(),
)
@example(silos=1, seed=0, size=1.0, moved=1.0, own=True)
@example(silos=40, seed=1, size=1.0, moved=3.0, own=True)
def test_two_rounds_are_equation_4(silos: int, seed: int, size: float, moved: float, own: bool) -> None:
    """(w_s + sum of w_k) / (K + 1) in float64, within (K + 3) 2^-23 of the largest parameter of any of the models.

    Models of any size; silos that move far, hardly or not at all, each in its own direction or all in one.
    """
    draws = np.random.default_rng(seed)
    start = (size * draws.standard_normal(200)).astype(np.float32)
    of_server = (start + size * moved * draws.standard_normal(200)).astype(np.float32)
    with_labels = after_round(start, [of_server], 1)
    common = draws.standard_normal(200)
    local = [
        (with_labels + size * moved * (draws.standard_normal(200) if own else common)).astype(np.float32)
        for _ in range(silos)
    ]
    made = after_round(with_labels, local, 2)
    models = np.stack([with_labels, *local]).astype(np.float64)
    largest = max(np.abs(models).max(), np.abs(start).max())
    assert np.abs(with_labels - of_server.astype(np.float64)).max() <= 4 * 2.0**-23 * largest
    assert np.abs(made - models.mean(axis=0)).max() <= (silos + 3) * 2.0**-23 * largest


def test_a_round_without_labels_is_applied_by_the_silos_that_are_in_its_sum(tmp_path: Path) -> None:
    """Of K that were asked; with a rate of its own for the round, which the optimizer keeps out of."""
    bundle = make_plan(tmp_path / "state")
    place = Workplace.at(tmp_path / "state", bundle)
    section = {"weighting": "equal", "momentum": 0.0}
    aggregator = place.aggregator(section, rates=ServerRates(who=TURNS))
    base = place.models.initial()
    before = stored_vector(place.models, base)
    delta = np.full_like(before, 0.5)
    for number, silos, rate in ((1, 2, 1.0), (2, 1, 1 / 2), (4, 3, 3 / 4)):
        key = place.key(number)
        updates = [place.send(key, SiloName(f"ward-{index}"), delta) for index in range(silos)]
        result = aggregator.updates.reduce(key, base, updates)
        assert result.step_length == rate
        after = stored_vector(place.models, result.model)
        np.testing.assert_allclose(after - before, rate * delta, atol=1e-6)


def test_the_learning_rate_of_a_plan_is_not_lost() -> None:
    assert at_rate(Sgd(learning_rate=0.5, momentum=0.9), 0.75) == Sgd(learning_rate=0.375, momentum=0.9)


@given(
    named=st.lists(st.sampled_from(["a", "b-*", "c-1", "*"]), unique=True),
    alone=st.sampled_from(["never", "in_turn", "always"]),
    silo=st.sampled_from(["a", "b-", "b-1", "c-1", "c-2"]),
    number=st.integers(1, 9),
)
def test_every_silo_has_its_rounds_and_no_round_has_both_kinds(
    named: list[str], alone: Alone, silo: str, number: int
) -> None:
    who = WhoTrains(unlabelled=tuple(named), labelled_alone=alone)
    labelled = silo not in named and not ("*" in named or ("b-*" in named and silo.startswith("b-")))
    turns = {"never": (True, True), "in_turn": (labelled == (number % 2 == 1),) * 2, "always": (labelled,) * 2}
    assert (who.trains(silo, number), who.not_its_turn(silo, number) == "") == turns[alone]
    assert who.server_rate(number, 3) == (0.75 if alone == "in_turn" and number % 2 == 0 else 1.0)
