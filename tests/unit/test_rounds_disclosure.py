"""What one silo told is in no log line, metric or answer to an operator where its plan promised masks or noise."""

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from lorica_coordinator.commands.look_commands import notes_of
from lorica_coordinator.edges.server.operator_servicer import round_record
from lorica_coordinator.edges.telemetry.metrics import CoordinatorMetrics
from lorica_coordinator.rounds.effects import EvaluationClosed, RoundClosed, RoundOpened, UpdateAccepted
from lorica_coordinator.rounds.scores import BestModel
from lorica_coordinator.rounds.states import Report
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome, SiloWeight
from lorica_coordinator.service.attendance import Attendance
from lorica_coordinator.service.journal import Journal
from lorica_coordinator.service.records import EnrolledSilo, RoundRow, SiloRow
from lorica_coordinator.service.views.disclosure import Means, means_of, of_all_silos
from lorica_coordinator.service.views.standing import standing
from lorica_security.identifiers import FederationName, SiloName
from silo_wire.messages import AgentPhase
from tests.support.rounds import (
    COLLECTING,
    SIGNATURE,
    T0,
    A,
    B,
    C,
    committed,
    course,
    evaluation,
    key,
    model_after,
    summary,
    terms,
)

OF_ONE_SILO = {
    "examples": "98761",
    "loss reduction": "1.2345",
    "norm": "0.43219",
    "weight": "7777.25",
    "share": "0.61803",
}
SCORE = evaluation(exact_matches=1237, examples=4111)
SCORES = ("1237", "4111", str(1237 / 4111))


def told(silos: tuple[SiloName, ...], *, weight: float = 7777.25, left_out: bool = False, **of_plan: Any) -> str:
    """All that a round leads to in the log and in the metrics, but for the times at which the counters were made.

    Those have sixteen digits of the present, among which any short number stands by chance.
    """
    registry = CollectorRegistry()
    journal = Journal(CoordinatorMetrics(registry))
    state = replace(COLLECTING, course=course(terms=terms(**of_plan)))
    # The first has the numbers that are looked for, the others have theirs: so that no mean is by chance one silo's
    # own.
    updates = tuple(an_update(silo, more=more) for more, silo in enumerate(silos))
    weights = tuple(
        SiloWeight(silo=silo, weight=weight + more, share=0.61803, left_out=left_out) for more, silo in enumerate(silos)
    )
    result = AggregationResult(model=model_after(1), outcome=Outcome.APPLIED, weights=weights)
    best = BestModel.scored(model_after(1), 1, [SCORE, evaluation(0)])
    records = [
        RoundOpened(key=key(), cohort=silos, model=model_after(0)),
        *(UpdateAccepted(key=key(), update=item, signature=SIGNATURE) for item in updates),
        RoundClosed(key=key(), result=result, updates=updates),
        EvaluationClosed(
            key=key(),
            reports=tuple(Report(silo=silo, evaluation=SCORE) for silo in silos),
            score=best,
            macro=0.4567891,
            counted=True,
            is_best=True,
        ),
    ]
    with capture_logs() as lines:
        journal.transition(state, committed(A), state, records)
    samples = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    return "\n".join([str(lines), *samples])


def an_update(silo: SiloName, *, more: int = 0) -> CommittedUpdate:
    content = replace(summary(examples=98761 + more), loss_max=3.2345 + more, loss_min=2.0)
    return CommittedUpdate(silo=silo, digest=model_after(7), summary=content, delta_norm=0.43219)


ZERO_WEIGHT = ("silo weighs nothing", "lorica_zero_weights_total 1.0")
PRIVATE = [{"secure_aggregation": True}, {"record_level": True}, {"silo_level": True}]


def test_all_of_it_is_told_where_nothing_was_promised() -> None:
    text = told((A, B, C))
    for number in (*OF_ONE_SILO.values(), str(1237 / 4111), "0.4567891"):
        assert number in text


@pytest.mark.parametrize("of_plan", PRIVATE, ids=lambda of_plan: next(iter(of_plan)))
def test_single_silos_are_in_no_log_and_no_metric(of_plan: dict[str, bool]) -> None:
    text = told((A, B, C), **of_plan)
    for name, number in OF_ONE_SILO.items():
        assert number not in text, name
    for number in SCORES:
        assert number not in text
    assert "0.4567891" in text  # the mean of three is


def test_an_update_that_a_reducer_left_out_is_no_loss_that_did_not_fall() -> None:
    text = told((A, B, C), weight=0.0, left_out=True)
    assert "silo weighs nothing" not in text
    assert "lorica_zero_weights_total 0.0" in text


def test_a_weight_of_zero_is_told_where_nothing_was_promised() -> None:
    assert all(word in told((A, B, C), weight=0.0) for word in ZERO_WEIGHT)
    assert not any(word in told((A, B, C)) for word in ZERO_WEIGHT)


@pytest.mark.parametrize("of_plan", PRIVATE, ids=lambda of_plan: next(iter(of_plan)))
def test_that_one_silo_weighs_nothing_is_in_no_log_and_no_metric(of_plan: dict[str, bool]) -> None:
    assert not any(word in told((A, B, C), weight=0.0, **of_plan) for word in ZERO_WEIGHT)


@pytest.mark.parametrize("of_plan", PRIVATE, ids=lambda of_plan: next(iter(of_plan)))
def test_a_mean_over_two_silos_is_as_good_as_their_scores(of_plan: dict[str, bool]) -> None:
    assert "0.4567891" not in told((A, B), **of_plan)


def closed_round(*silos: SiloName, masked: bool = False) -> RoundClosed:
    result = AggregationResult(model=model_after(1), outcome=Outcome.APPLIED, weights=(), weight_sum=6.0)
    updates = () if masked else tuple(an_update(silo) for silo in silos)
    return RoundClosed(key=key(), result=result, updates=updates, masked=silos if masked else None)


def test_means_that_no_noise_covers_are_not_told() -> None:
    assert means_of(closed_round(A, B, C), terms(silo_level=True)) == Means()
    assert means_of(closed_round(A, B, C, masked=True), terms(silo_level=True, secure_aggregation=True)) == Means()
    of_records = means_of(closed_round(A, B, C), terms(record_level=True))
    assert of_records.loss_reduction is not None
    assert (of_records.loss_first, of_records.loss_last) == (None, None)


def test_a_masked_mean_is_over_as_many_as_may_be_summed() -> None:
    masked = terms(secure_aggregation=True)
    assert means_of(closed_round(A, B, C, masked=True), masked) == Means(weight=2.0)
    assert means_of(closed_round(A, B, masked=True), masked) == Means()


@pytest.mark.parametrize("of_plan", [{}, *PRIVATE], ids=lambda of_plan: next(iter(of_plan), "open"))
def test_how_far_one_silo_is_tells_how_many_steps_it_makes(of_plan: dict[str, bool]) -> None:
    attendance = Attendance()
    seat = attendance.take(A, bytes(16))
    seat.phase, seat.fraction = AgentPhase.TRAINING, 3 / 7
    enrolled = EnrolledSilo(
        silo=A,
        identity_public_key=bytes(32),
        certificate_serial="1",
        certificate_digest="",
        certificate_expires_unix_s=T0,
        enrolled_unix_s=T0,
        last_seen_unix_s=T0,
    )
    (shown,) = standing(
        federation=FederationName("test-net"),
        state=replace(COLLECTING, course=course(terms=terms(**of_plan))),
        fault=None,
        enrolled=[enrolled],
        invited=[],
        attendance=attendance,
        now=T0,
        seconds_left=600.0,
    ).silos
    assert (shown.state, shown.fraction) == ("training", 0.0 if of_plan else 3 / 7)


@pytest.mark.parametrize(("scored", "shown"), [(2, -1.0), (3, 0.25)])
def test_rows_for_operators_hold_outcomes_and_means_alone(scored: int, shown: float) -> None:
    silos = tuple(
        SiloRow(
            silo=silo,
            outcome="committed",
            examples=98761,
            loss_max=3.2345,
            loss_min=2.0,
            weight=7777.25,
            share=0.61803,
            delta_norm=0.43219,
            evaluation=SCORE if number < scored else None,
        )
        for number, silo in enumerate((A, B, C))
    )
    row = RoundRow(
        round=1,
        attempt=1,
        outcome="applied",
        detail="",
        opened_unix_s=T0,
        closed_unix_s=T0,
        model=model_after(1),
        weight_fallback=False,
        silos=silos,
        macro_exact_match=0.25,
        micro_exact_match=0.25,
    )
    record = round_record(of_all_silos(row))
    assert record.macro_exact_match == record.micro_exact_match == shown
    assert [(silo.silo, silo.outcome) for silo in record.silos] == [(silo, "committed") for silo in (A, B, C)]
    for silo in record.silos:
        assert silo.ByteSize() == type(silo)(silo=silo.silo, outcome=silo.outcome).ByteSize(), "something else is told"


@pytest.mark.parametrize(
    ("outcome", "of_silo", "fell", "notes"),
    [
        ("applied", "committed", 0.0, ["bank-b weighs nothing: its loss did not fall"]),
        ("applied", "evaluated", 0.0, ["bank-b weighs nothing: its loss did not fall"]),
        ("applied", "committed", 0.5, []),  # a reducer left it out
        ("applied", "refused", 0.0, []),
        ("running", "committed", 0.0, []),
        ("abandoned", "committed", 0.0, []),
    ],
)
def test_who_weighs_nothing_is_named_once_the_round_is_closed_and_where_silos_are_shown(
    outcome: str, of_silo: str, fell: float, notes: list[str]
) -> None:
    weighs = SiloRow(silo=A, outcome="committed", examples=10, loss_max=2.0, loss_min=1.0, weight=10.0, share=1.0)
    row = RoundRow(
        round=1,
        attempt=1,
        outcome=outcome,
        detail="",
        opened_unix_s=T0,
        closed_unix_s=T0,
        model=model_after(1),
        weight_fallback=False,
        silos=(weighs, SiloRow(silo=B, outcome=of_silo, examples=30, loss_max=fell), SiloRow(silo=C, outcome="late")),
        macro_exact_match=None,
        micro_exact_match=None,
    )
    assert row.without_weight == ((B,) if notes else ())
    assert notes_of(round_record(row)) == [note.replace("bank-b", B) for note in notes]
    assert notes_of(round_record(of_all_silos(row))) == []
