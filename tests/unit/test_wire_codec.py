"""Protobuf messages <-> values: round trips for every value, refusals for every bad field."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.codecs import common_codec, orders_codec, updates_codec
from silo_wire.manifest import Layout, TensorSpec, manifest_of
from silo_wire.messages import (
    AgentPhase,
    DeclineReason,
    Evaluate,
    Evaluation,
    Finished,
    ModelHeader,
    Order,
    Prepare,
    RoundKey,
    Standby,
    StandbyReason,
    Train,
    TrainingSummary,
    UpdateHeader,
)
from silo_wire.v1 import common_pb2, federation_pb2

SILO = SiloName("bank-b")
digests = st.binary(min_size=32, max_size=32).map(lambda raw: Digest(raw.hex()))
keys = st.builds(
    RoundKey,
    federation=st.just("north"),
    plan=digests,
    round=st.integers(0, 2**32 - 1),
    attempt=st.integers(0, 2**32 - 1),
)
amounts = st.floats(0, 1e300, allow_nan=False)
orders: st.SearchStrategy[Order] = st.one_of(
    st.builds(Standby, st.sampled_from(StandbyReason), st.text("abc ", max_size=20)),
    st.builds(Prepare, digests),
    st.builds(Train, key=keys, model=digests, seconds_left=amounts, included_update=st.none() | digests),
    st.builds(Evaluate, key=keys, model=digests, seconds_left=amounts),
    st.builds(Finished, plan=digests, rounds=st.integers(0, 2**32 - 1), final_model=digests, best_model=digests),
)


@st.composite
def summaries(draw: st.DrawFn) -> TrainingSummary:
    low, high = sorted((draw(amounts), draw(amounts)))
    return TrainingSummary(
        examples=draw(st.integers(1, 2**40)),
        loss_max=high,
        loss_min=low,
        loss_first=draw(amounts),
        loss_last=draw(amounts),
        optimizer_steps=draw(st.integers(0, 2**40)),
        seconds=draw(amounts),
    )


@given(orders)
def test_orders_round_trip(order: Order) -> None:
    notice = federation_pb2.Notice.FromString(orders_codec.order_to_wire(order, SILO).SerializeToString())
    assert orders_codec.order_from_wire(notice) == order


@given(keys, digests, summaries(), st.binary(max_size=64), st.integers(0, 100))
def test_update_headers_round_trip(
    key: RoundKey, model: Digest, summary: TrainingSummary, signature: bytes, first: int
) -> None:
    layout = Layout("float32", (TensorSpec("w", (5,)),))
    manifest = manifest_of(layout, [bytes(20)], 8)
    header = UpdateHeader(
        key=key, model=model, manifest=manifest, summary=summary, signature=signature, first_chunk=first
    )
    assert updates_codec.update_header_from_wire(updates_codec.update_header_to_wire(header, SILO)) == header
    announced = ModelHeader(manifest=manifest, round=3, signature=signature)
    assert updates_codec.model_header_from_wire(updates_codec.model_header_to_wire(announced)) == announced


def test_evaluations_round_trip() -> None:
    key = RoundKey(federation="north", plan=Digest("ab" * 32), round=2, attempt=1)
    value = Evaluation(
        split="dev", examples=9, exact_matches=4, executed=8, execution_matches=5, loss_per_token=0.25, seconds=1.5
    )
    assert (
        updates_codec.evaluation_from_wire(updates_codec.evaluation_to_wire(key, SILO, Digest("cd" * 32), value))
        == value
    )


@pytest.mark.parametrize("reason", [reason for reason in DeclineReason if reason is not DeclineReason.REVOKED])
def test_decline_reasons_round_trip(reason: DeclineReason) -> None:
    assert updates_codec.decline_reason_from_wire(updates_codec.decline_reason_to_wire(reason)) is reason


def test_no_number_on_the_wire_says_that_a_silo_was_revoked() -> None:
    """It is the operator's word alone."""
    said = [
        updates_codec.decline_reason_from_wire(number) for number in federation_pb2.DeclineReason.values() if number
    ]
    assert set(said) == set(DeclineReason) - {DeclineReason.REVOKED}


@pytest.mark.parametrize("phase", AgentPhase)
def test_phases_round_trip(phase: AgentPhase) -> None:
    assert updates_codec.phase_from_wire(updates_codec.phase_to_wire(phase)) is phase


GOOD = {
    "examples": 3,
    "loss_max": 2.0,
    "loss_min": 1.0,
    "loss_first": 2.0,
    "loss_last": 1.0,
    "optimizer_steps": 4,
    "seconds": 1.0,
}


@pytest.mark.parametrize("field", ["loss_max", "loss_min", "loss_first", "loss_last", "seconds"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_losses_that_would_buy_an_infinite_or_negative_weight_are_refused(field: str, value: float) -> None:
    with pytest.raises(MalformedMessage, match=field):
        updates_codec.summary_from_wire(federation_pb2.TrainingSummary(**{**GOOD, field: value}))


def test_a_summary_with_minimum_above_maximum_or_no_examples_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="loss_min"):
        updates_codec.summary_from_wire(federation_pb2.TrainingSummary(**{**GOOD, "loss_min": 3.0}))
    for examples in (0, 2**41):
        with pytest.raises(MalformedMessage, match="examples"):
            updates_codec.summary_from_wire(federation_pb2.TrainingSummary(**{**GOOD, "examples": examples}))


@pytest.mark.parametrize("steps", [2**40 + 1, 2**63, 2**64 - 1])
def test_a_step_count_that_no_database_holds_is_refused(steps: int) -> None:
    with pytest.raises(MalformedMessage, match=f"optimizer_steps is {steps}"):
        updates_codec.summary_from_wire(federation_pb2.TrainingSummary(**{**GOOD, "optimizer_steps": steps}))


SCORES = {"split": "dev", "examples": 4, "exact_matches": 2, "executed": 3, "execution_matches": 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"split": "train"},
        {"examples": 0},
        {"exact_matches": 5},
        {"executed": 5},
        {"execution_matches": 4},
        {"loss_per_token": math.nan},
        {"seconds": -1.0},
    ],
)
def test_scores_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    updates_codec.evaluation_from_wire(federation_pb2.EvaluationReport(**SCORES))  # type: ignore[arg-type]
    with pytest.raises(MalformedMessage):
        updates_codec.evaluation_from_wire(federation_pb2.EvaluationReport(**{**SCORES, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 31, 33])
def test_digests_of_another_length_are_refused(size: int) -> None:
    with pytest.raises(MalformedMessage, match="plan_digest"):
        common_codec.round_key_from_wire(
            common_pb2.CallKey(federation="north", plan_digest=bytes(size), round=1, attempt=1)
        )


def test_a_notice_without_an_order_or_from_the_future_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="no order"):
        orders_codec.order_from_wire(federation_pb2.Notice())
    with pytest.raises(MalformedMessage, match="not known"):
        orders_codec.order_from_wire(federation_pb2.Notice(standby=federation_pb2.Standby()))
    with pytest.raises(MalformedMessage):
        updates_codec.decline_reason_from_wire(federation_pb2.DECLINE_REASON_UNSPECIFIED)
    with pytest.raises(MalformedMessage):
        updates_codec.phase_from_wire(federation_pb2.AGENT_PHASE_UNSPECIFIED)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_deadline_that_is_no_duration_is_refused(seconds: float) -> None:
    key = common_pb2.CallKey(federation="north", plan_digest=bytes(32), round=1, attempt=1)
    train = federation_pb2.Train(key=key, model_digest=bytes(32), seconds_left=seconds)
    with pytest.raises(MalformedMessage, match="seconds_left"):
        orders_codec.order_from_wire(federation_pb2.Notice(train=train))


def test_an_included_update_that_is_no_digest_is_refused() -> None:
    key = common_pb2.CallKey(federation="north", plan_digest=bytes(32), round=1, attempt=1)
    train = federation_pb2.Train(key=key, model_digest=bytes(32), seconds_left=1.0, included_update=b"short")
    with pytest.raises(MalformedMessage, match="included_update has 5 bytes"):
        orders_codec.order_from_wire(federation_pb2.Notice(train=train))


def test_free_text_of_a_peer_cannot_forge_a_log_line_or_a_terminal_sequence() -> None:
    assert common_codec.detail_from_wire("fine\n[info] forged \x1b[2J") == "fine [info] forged  [2J"
    with pytest.raises(MalformedMessage, match="characters"):
        common_codec.detail_from_wire("x" * 501)
