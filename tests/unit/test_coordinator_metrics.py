"""What the coordinator's metrics tell of silos that come and go, of plans that show single silos and of those that do
not."""

import math
import time
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lorica_coordinator.edges.telemetry.metrics import DROPPED, DROPPING_PHASES, CoordinatorMetrics
from lorica_coordinator.rounds.effects import Cause
from lorica_coordinator.rounds.states import Collecting, Gathering, Idle, Stopped
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome, SiloWeight
from lorica_coordinator.service.attendance import Attendance
from lorica_coordinator.service.views.disclosure import Means
from lorica_coordinator.service.views.pulse import Pulse, Quorum, pulse
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator import states as protocol_states
from lorica_security.secure_aggregation.masked_vectors.scores import Scores
from tests.support.rounds import COLLECTING, GATHERING, A, B, C, course, key, model_after, summary, terms

ABOUT_SILOS = (
    *("lorica_silo_weight", "lorica_silo_weight_share_ratio", "lorica_silo_loss_reduction", "lorica_silo_examples"),
    *("lorica_silo_delta_norm", "lorica_silo_training_loss", "lorica_silo_exact_match_ratio"),
    *("lorica_silo_execution_accuracy_ratio", "lorica_mean_training_loss"),
)


@pytest.fixture
def metrics() -> CoordinatorMetrics:
    return CoordinatorMetrics(CollectorRegistry())


def a_pulse(*, seen: dict[SiloName, float], connected: set[SiloName] | None = None, **changed: Any) -> Pulse:
    values: dict[str, Any] = {
        "silos": {"enrolled": len(seen), "connected": len(connected or ()), "ready": 0},
        "quorums": {"all": Quorum(least=1, enrolled=len(seen), connected=len(connected or ()))},
        "running": True,
        "seconds_left": None,
        "single_silos": True,
    }
    return Pulse(connected=frozenset(connected or ()), last_seen_unix_s=seen, **{**values, **changed})


def value(metrics: CoordinatorMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def a_round(metrics: CoordinatorMetrics) -> None:
    update = CommittedUpdate(silo=A, digest=model_after(3), summary=summary(examples=7), delta_norm=0.5)
    metrics.update_committed(update)
    weights = (SiloWeight(silo=A, weight=2.0, share=1.0),)
    result = AggregationResult(model=model_after(1), outcome=Outcome.APPLIED, weights=weights)
    metrics.round_closed(result, Means(loss_first=3.0, loss_last=1.0, loss_reduction=2.0, weight=2.0), seconds=1.0)


def test_what_single_silos_told_goes_when_a_plan_comes_that_shows_none(metrics: CoordinatorMetrics) -> None:
    metrics.standing_changed(a_pulse(seen={A: 1.0, B: 2.0}))
    a_round(metrics)
    shown = generate_latest(metrics.registry).decode()
    assert all(f"{name}{{" in shown for name in ABOUT_SILOS)
    assert value(metrics, "lorica_silo_training_loss", silo=A, point="first") == summary().loss_first
    metrics.standing_changed(a_pulse(seen={A: 1.0, B: 2.0}, single_silos=False))
    hidden = generate_latest(metrics.registry).decode()
    assert not any(f"{name}{{" in hidden for name in ABOUT_SILOS)
    assert value(metrics, "lorica_enrolled_silo_connected", silo=A) == 0.0  # that it is there everybody may know
    metrics.standing_changed(a_pulse(seen={A: 1.0, B: 2.0}))
    assert value(metrics, "lorica_silo_weight", silo=A) == 0.0  # anew, and not what was there before


def test_a_silo_is_seen_now_while_it_is_connected_and_then_when_it_left(metrics: CoordinatorMetrics) -> None:
    metrics.standing_changed(a_pulse(seen={A: 5.0, B: 0.0}, connected={A}))
    before = time.time()
    seen = value(metrics, "lorica_enrolled_silo_last_seen_timestamp_seconds", silo=A)
    assert seen is not None
    assert before <= seen <= time.time()
    assert value(metrics, "lorica_enrolled_silo_last_seen_timestamp_seconds", silo=B) == 0.0
    metrics.standing_changed(a_pulse(seen={A: 77.0, B: 0.0}))
    assert value(metrics, "lorica_enrolled_silo_last_seen_timestamp_seconds", silo=A) == 77.0
    assert value(metrics, "lorica_enrolled_silo_connected", silo=A) == 0.0


def test_a_silo_that_is_revoked_takes_its_series_with_it(metrics: CoordinatorMetrics) -> None:
    metrics.standing_changed(a_pulse(seen={A: 5.0, B: 5.0}))
    a_round(metrics)
    metrics.silo_certificate_expiry.labels(A).set(9e9)
    metrics.standing_changed(a_pulse(seen={B: 5.0}))
    text = generate_latest(metrics.registry).decode()
    assert f'silo="{A}"' not in text
    assert f'silo="{B}"' in text


def test_attempts_without_a_model_count_by_cause(metrics: CoordinatorMetrics) -> None:
    for cause in Cause:
        assert value(metrics, "lorica_abandoned_rounds_total", cause=cause.value) == 0.0
    metrics.round_abandoned(Cause.LATE, seconds=3.0)
    assert value(metrics, "lorica_abandoned_rounds_total", cause="late") == 1.0
    assert value(metrics, "lorica_rounds_total", outcome="abandoned") == 1.0


def test_every_phase_that_can_drop_a_silo_has_its_counters(metrics: CoordinatorMetrics) -> None:
    asking = (
        protocol_states.Advertising,
        protocol_states.Sharing,
        protocol_states.Masking,
        protocol_states.Agreeing,
        protocol_states.Unmasking,
    )
    phases = [phase.phase.replace(" ", "_") for phase in asking]
    assert set(phases) < set(DROPPING_PHASES)
    for phase in DROPPING_PHASES:
        for outcome in DROPPED:
            assert value(metrics, "lorica_dropped_silos_total", phase=phase, outcome=outcome) == 0.0


def test_what_is_not_known_is_no_zero(metrics: CoordinatorMetrics) -> None:
    result = AggregationResult(model=model_after(1), outcome=Outcome.APPLIED, weights=())
    for _ in range(2):
        for name in ("lorica_mean_loss_reduction", "lorica_mean_silo_weight"):
            assert math.isnan(value(metrics, name) or 0.0)
        metrics.round_closed(result, Means(), seconds=1.0)


MEANS = (
    *("lorica_macro_exact_match_ratio", "lorica_micro_exact_match_ratio"),
    *("lorica_mean_loss_reduction", "lorica_mean_silo_weight"),
)


def test_means_of_one_plan_are_not_those_of_the_next(metrics: CoordinatorMetrics) -> None:
    metrics.evaluated(key(0), reports=(), scores=None, macro=0.5, micro=0.25)
    metrics.round_opened(key(1), (A, B))
    assert value(metrics, "lorica_macro_exact_match_ratio") == 0.5  # of the model that this plan began with
    a_round(metrics)
    metrics.round_opened(key(2), (A, B))
    assert not any(math.isnan(value(metrics, name) or 0.0) for name in MEANS)
    metrics.round_opened(replace(key(1), plan=model_after(9)), (A, B))
    assert all(math.isnan(value(metrics, name) or 0.0) for name in MEANS)
    assert value(metrics, "lorica_mean_training_loss", point="last") is None


def test_a_mean_that_may_not_be_shown_is_not_the_one_before(metrics: CoordinatorMetrics) -> None:
    metrics.evaluated(key(1), reports=(), scores=None, macro=0.5, micro=0.25)
    metrics.evaluated(key(2), reports=(), scores=None, macro=None, micro=None)
    assert all(math.isnan(value(metrics, name) or 0.0) for name in MEANS[:2])


def test_scores_of_a_sum_are_shown_as_they_are_and_go_with_their_plan(metrics: CoordinatorMetrics) -> None:
    summed = Scores(questions=50, exact_matches=20, executed=10, execution_matches=4, loss=64 * 50 * 3)
    names = ("lorica_summed_questions", "lorica_summed_execution_accuracy_ratio", "lorica_summed_loss_per_token")
    metrics.evaluated(key(1), reports=(), scores=summed, macro=None, micro=0.4)
    assert [value(metrics, name) for name in names] == [50, 0.4, 3.0]
    assert value(metrics, "lorica_micro_exact_match_ratio") == 0.4
    metrics.round_closed(
        AggregationResult(model=model_after(1), outcome=Outcome.SCORED, weights=()), Means(weight=1.0), seconds=1.0
    )
    assert value(metrics, "lorica_rounds_total", outcome="scored") == 1
    assert math.isnan(value(metrics, "lorica_mean_silo_weight") or 0.0), "nobody trained"
    metrics.round_opened(replace(key(1), plan=model_after(9)), (A, B))
    assert all(math.isnan(value(metrics, name) or 0.0) for name in names)


def test_epsilon_left_is_never_below_zero(metrics: CoordinatorMetrics) -> None:
    metrics.epsilon(spent=3.0, allowed=8.0)
    assert value(metrics, "lorica_plan_epsilon_left") == 5.0
    metrics.epsilon(spent=9.0, allowed=8.0)
    assert value(metrics, "lorica_plan_epsilon_left") == 0.0


@pytest.mark.parametrize(
    ("state", "running"),
    [
        (Idle(), False),
        (GATHERING, True),
        (Gathering(course=GATHERING.course, opening=GATHERING.opening, started=False), False),
        (Gathering(course=course(paused=True), opening=GATHERING.opening, started=True), False),
        (COLLECTING, True),
        (Stopped(course=GATHERING.course, opening=GATHERING.opening), False),
    ],
    ids=lambda value: value if isinstance(value, bool) else type(value).__name__,
)
def test_a_plan_runs_while_it_waits_for_no_operator(state: Any, running: bool) -> None:
    assert pulse(state, Attendance(), {}, seconds_left=None).running is running


def test_a_pulse_knows_every_enrolled_silo_and_what_the_plan_asks() -> None:
    attendance = Attendance()
    attendance.take(A, bytes(16))
    of = course(terms=terms(min_silos=2), population=frozenset({A, B}))
    state = Collecting(course=of, round=1, attempt=1, cohort=(A, B), deadline=1234.0)
    it = pulse(state, attendance, {A: 10.0}, seconds_left=12.0)
    assert (it.seconds_left, it.single_silos) == (12.0, True)
    assert it.quorums == {"all": Quorum(least=2, enrolled=2, connected=1)}
    assert (it.connected, it.last_seen_unix_s) == ({A}, {A: 10.0, B: 0.0})
    assert it.silos == {"enrolled": 2, "connected": 1, "ready": len(of.ready)}


TURNS = {"without_labels": ("bank-b", "clinic-*"), "min_silos": 2, "min_labelled": 1}
"""Of three silos, A has labels."""


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (
            {**TURNS, "labelled_alone": "in_turn"},
            {
                "labelled": Quorum(least=1, enrolled=1, connected=1),
                "unlabelled": Quorum(least=2, enrolled=2, connected=1),
            },
        ),
        ({**TURNS, "labelled_alone": "always"}, {"labelled": Quorum(least=2, enrolled=1, connected=1)}),
        ({**TURNS, "labelled_alone": "never"}, {"all": Quorum(least=2, enrolled=3, connected=2)}),
    ],
    ids=["in turn", "supervised alone", "together"],
)
def test_each_kind_of_round_has_a_quorum_among_its_own_silos(of: Any, expected: Any) -> None:
    attendance = Attendance()
    for silo in (A, B):
        attendance.take(silo, bytes(16))
    state = replace(GATHERING, course=course(terms=terms(**of), population=frozenset({A, B, C})))
    assert pulse(state, attendance, {}, seconds_left=None).quorums == expected


def quorums(metrics: CoordinatorMetrics) -> list[float | None]:
    return [value(metrics, "lorica_quorum_silos", of=kind) for kind in ("all", "labelled", "unlabelled")]


def test_series_of_a_kind_of_round_go_with_the_plan_that_has_it(metrics: CoordinatorMetrics) -> None:
    turns = {
        "labelled": Quorum(least=1, enrolled=3, connected=2),
        "unlabelled": Quorum(least=4, enrolled=5, connected=0),
    }
    assert quorums(metrics) == [0, None, None], "before there is a plan"
    metrics.standing_changed(a_pulse(seen={A: 1.0}, quorums=turns))
    assert quorums(metrics) == [None, 1, 4]
    assert value(metrics, "lorica_quorum_candidate_silos", of="labelled", state="connected") == 2
    assert value(metrics, "lorica_quorum_candidate_silos", of="unlabelled", state="enrolled") == 5
    metrics.standing_changed(a_pulse(seen={A: 1.0}))
    assert quorums(metrics) == [1, None, None]
    assert value(metrics, "lorica_quorum_candidate_silos", of="labelled", state="connected") is None


def test_the_score_that_answers_count_by_is_told(metrics: CoordinatorMetrics) -> None:
    """One at a time: dashboards head the ratios with it."""
    for score in ("exact match", "ROUGE-L", "", "ROUGE-L"):
        metrics.standing_changed(a_pulse(seen={A: 1.0}, score=score))
        told = [sample.labels["name"] for sample in next(iter(metrics.score.collect())).samples]
        assert told == ([score] if score else [])
