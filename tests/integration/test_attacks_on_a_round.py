"""An enrolled silo gone wrong, against the real coordinator in a real round.

Each test plays one attack as hospital-a, sees it refused with its class and status, counted and logged, and nothing
saved changed; then both silos finish the round honestly, with the agent's own client.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from structlog.testing import capture_logs

from lorica_coordinator.edges.server.federation_servicer import FederationServicer
from lorica_coordinator.edges.telemetry.caller import CALLER
from lorica_coordinator.rounds.states import Collecting, Evaluating
from lorica_security.errors import (
    Conflict,
    IntegrityError,
    LoricaError,
    MalformedMessage,
    StateError,
    WrongTime,
)
from lorica_security.identifiers import Identity, Role, coordinator_dns_name
from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.edges.wire.grpc_client import GrpcCoordinator
from silo_agent.rounds.events import SavedUpdate
from silo_wire.canonical import Digest
from silo_wire.codecs import common_codec, updates_codec
from silo_wire.manifest import Layout, TensorSpec, manifest_of
from silo_wire.messages import DeclineReason, Evaluate, Evaluation, Finished, Standby, Train
from silo_wire.plans.plan import PlanBundle
from silo_wire.transport import answer_to
from silo_wire.v1 import common_pb2, federation_pb2, federation_pb2_grpc
from tests.support.coordinator import (
    BANK,
    CHUNK_BYTES,
    FEDERATION,
    HOSPITAL,
    PATIENCE_S,
    PLAN,
    SUMMARY,
    FederationTemplate,
    HandMadeUpdate,
    RunningCoordinator,
    Silo,
    chunk_pieces,
    header_piece,
    refused,
    running,
    vector,
)
from tests.support.coordinator import federation_template as federation_template

INVALID = grpc.StatusCode.INVALID_ARGUMENT
DAMAGED = grpc.StatusCode.DATA_LOSS
NOT_NOW = grpc.StatusCode.FAILED_PRECONDITION
CONFLICT = grpc.StatusCode.ALREADY_EXISTS
NOWHERE = Digest("ab" * 32)
Chunks = list[tuple[int, bytes]]
SCORE = Evaluation(
    split="dev", examples=10, exact_matches=3, executed=0, execution_matches=0, loss_per_token=1.0, seconds=0.1
)


@dataclass(slots=True)
class Play:
    """Round 1 is collecting; both silos have their order to train."""

    at: RunningCoordinator
    bundle: PlanBundle
    hospital: Silo
    bank: Silo
    order: Train
    scratch: Path

    @property
    def plan(self) -> Digest:
        return self.bundle.plan.digest

    @property
    def layout(self) -> Layout:
        return self.bundle.layout

    def honest(self, **changes: Any) -> HandMadeUpdate:
        return self.hospital.update(self.order, self.layout, **changes)

    def client(self, silo: Silo) -> GrpcCoordinator:
        """The agent's own client."""

        def unreachable(problem: LoricaError, seconds: float) -> None:
            raise AssertionError(f"the coordinator does not answer: {problem}")

        return GrpcCoordinator(
            channel=silo.channel,
            credentials=silo.credentials,
            models=ModelCache(self.scratch / "models", kept=2),
            agent_version="test",
            unreachable=unreachable,
            new_backoff=Backoff,
        )

    async def uploads(self, silo: Silo, round_number: int = 1, value: float = 0.02) -> None:
        order = await silo.order(Train, round_number)
        file = self.scratch / f"{silo.name}.delta"
        content = vector(self.layout, value)
        file.write_bytes(content)
        update = SavedUpdate(
            key=order.key,
            model=order.model,
            manifest=manifest_of(self.layout, [content], CHUNK_BYTES),
            summary=SUMMARY,
        )
        await self.client(silo).upload(update, file, progress=lambda fraction: None)

    async def finish(self, round_number: int = 1, *, hospital_has_committed: bool = False, last: bool = False) -> None:
        """The round goes on to its end as if nothing had happened: both updates count, both silos score the model."""
        if not hospital_has_committed:
            await self.uploads(self.hospital, round_number, value=0.01)
        await self.uploads(self.bank, round_number)
        await self.evaluate(round_number, last=last)
        row = [row for row in self.at.saved()[1] if row.round == round_number][-1]  # type: ignore[attr-defined]
        assert row.outcome == "applied"
        assert [(silo.silo, silo.outcome, silo.share) for silo in row.silos] == [
            (BANK, "committed", 0.5),
            (HOSPITAL, "committed", 0.5),
        ]
        assert row.micro_exact_match == 0.3

    async def evaluate(self, round_number: int = 1, *, last: bool = False) -> None:
        """`last`: no round opens after this one."""
        for silo in (self.hospital, self.bank):
            order = await silo.order(Evaluate, round_number)
            await self.client(silo).report_evaluation(order.key, order.model, SCORE)
        if round_number == self.bundle.plan.schedule.rounds:
            await self.hospital.order(Finished)
        elif not last:
            await self.hospital.order(Train, round_number + 1)


@pytest.fixture
async def play(federation_template: FederationTemplate, tmp_path: Path) -> AsyncIterator[Play]:
    (tmp_path / "models").mkdir()
    async with (
        running(federation_template.copy(tmp_path / "coordinator"), offer=PLAN) as at,
        Silo(at, federation_template.silos[HOSPITAL]) as hospital,
        Silo(at, federation_template.silos[BANK]) as bank,
    ):
        bundle = at.coordinator.shelf.compile(PLAN)
        await hospital.join(bundle.plan.digest)
        await bank.join(bundle.plan.digest)
        order = await hospital.order(Train, 1)
        yield Play(at=at, bundle=bundle, hospital=hospital, bank=bank, order=order, scratch=tmp_path)


def report(silo: Silo, order: Evaluate | Train, **fields: Any) -> federation_pb2.EvaluationReport:
    message = updates_codec.evaluation_to_wire(order.key, silo.name, order.model, SCORE)
    for name, value in fields.items():
        setattr(message, name, value)
    return message


async def test_an_honest_round(play: Play) -> None:
    await play.finish(1)
    await play.finish(2)
    assert all(play.at.errors(kind) == 0 for kind in ("MalformedMessage", "WrongTime", "Conflict", "IntegrityError"))


# --- what is in an update ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("where", [0, -1], ids=["first", "last"])
async def test_update_that_is_not_finite(play: Play, value: float, where: int) -> None:
    elements = np.frombuffer(vector(play.layout, 0.01), dtype="<f4").copy()
    elements[where] = value
    update = play.honest(data=elements.tobytes())
    async with refused(play.at, MalformedMessage, INVALID, f"silo {HOSPITAL} holds NaN or infinite values"):
        await play.hospital.upload(update)
    await play.finish()


async def test_loss_reduction_that_no_training_gives(play: Play) -> None:
    """It would outweigh everybody. The sum goes on without it, and the next round with the silo again."""
    await play.hospital.upload(play.honest(summary=replace(SUMMARY, loss_max=1e12)))
    with capture_logs() as logs:
        await play.uploads(play.bank)
        order = await play.bank.order(Evaluate, 1)
    assert [(entry["silo"], entry["outcome"]) for entry in logs if entry["event"] == "silo dropped"] == [
        (HOSPITAL, "refused")
    ]
    assert play.at.errors("IntegrityError") == 1
    assert (
        play.at.metrics.registry.get_sample_value(
            "lorica_dropped_silos_total", {"phase": "aggregating", "outcome": "refused"}
        )
        == 1
    )
    await play.client(play.bank).report_evaluation(order.key, order.model, SCORE)
    await play.finish(2)
    (row,) = [row for row in play.at.saved()[1] if row.round == 1]  # type: ignore[attr-defined]
    assert [(silo.silo, silo.outcome, silo.share) for silo in row.silos] == [
        (BANK, "committed", 1.0),
        (HOSPITAL, "refused", 0.0),
    ]


@pytest.mark.parametrize(
    "layout_of",
    [
        lambda layout: Layout("float32", (TensorSpec("w", (layout.parameters,)),)),
        lambda layout: Layout("float32", layout.tensors[:-1]),
        lambda layout: Layout("float32", (*layout.tensors, TensorSpec("zzz", (1,)))),
        lambda layout: Layout("bfloat16", layout.tensors),
        lambda layout: Layout("int8", layout.tensors),
    ],
    ids=["other-shapes-same-size", "a-tensor-less", "an-element-more", "another-type", "int8"],
)
async def test_update_of_another_model_shape(play: Play, layout_of: Callable[[Layout], Layout]) -> None:
    other = layout_of(play.layout)
    content = b"\0" * other.total_bytes
    update = play.honest(
        data=content, manifest=manifest_of(other, [content], CHUNK_BYTES - CHUNK_BYTES % other.unit_bytes)
    )
    async with refused(play.at, MalformedMessage, INVALID, "wrong model shape"):
        await play.hospital.upload(update)
    await play.finish()


async def test_update_with_the_right_shape_and_the_wrong_length(play: Play) -> None:
    honest = play.honest().header.manifest
    short = replace(honest, total_bytes=honest.total_bytes - 4)
    async with refused(play.at, MalformedMessage, INVALID, "the plan's layout has"):
        await play.hospital.upload(play.honest(manifest=short))
    await play.finish()


def truncated(chunks: Chunks) -> Chunks:
    return chunks[:-1]


def cut_short(chunks: Chunks) -> Chunks:
    return [*chunks[:-1], (chunks[-1][0], chunks[-1][1][:-4])]


def reordered(chunks: Chunks) -> Chunks:
    return [chunks[1], chunks[0], *chunks[2:]]


def duplicated(chunks: Chunks) -> Chunks:
    return [chunks[0], *chunks]


def skipping(chunks: Chunks) -> Chunks:
    return [chunks[0], *chunks[2:]]


def oversized(chunks: Chunks) -> Chunks:
    return [(chunks[0][0], chunks[0][1] + chunks[1][1]), *chunks[2:]]


def one_too_many(chunks: Chunks) -> Chunks:
    return [*chunks, (len(chunks), b"\0" * 4)]


def far_outside(chunks: Chunks) -> Chunks:
    return [((1 << 32) - 1, chunks[0][1]), *chunks[1:]]


def empty(chunks: Chunks) -> Chunks:
    return [(0, b""), *chunks[1:]]


@pytest.mark.parametrize(
    ("tamper", "match"),
    [
        (truncated, "is not complete"),
        (lambda chunks: [], "0 of"),
        (cut_short, "bytes, its manifest says"),
        (reordered, "chunk 1 of the update of silo hospital-a came where 0 is expected"),
        (duplicated, "chunk 0 of the update of silo hospital-a came where 1 is expected"),
        (skipping, "came where 1 is expected"),
        (oversized, "bytes, its manifest says"),
        (one_too_many, "is outside the"),
        (far_outside, "came where 0 is expected"),
        (empty, "chunk 0 has 0 bytes"),
    ],
    ids=lambda value: getattr(value, "__name__", None) if callable(value) else "",
)
async def test_chunks_that_are_not_what_the_manifest_says(
    play: Play, tamper: Callable[[Chunks], Chunks], match: str
) -> None:
    update = play.honest()
    async with refused(play.at, MalformedMessage, INVALID, match):
        await play.hospital.upload(update, tamper(update.chunks))
    await play.finish()


@pytest.mark.parametrize("position", [0, 1], ids=["first-chunk", "later-chunk"])
async def test_chunk_with_another_content_than_its_digest(play: Play, position: int) -> None:
    update = play.honest()
    chunks = update.chunks
    other = play.honest(value=0.5).chunks
    chunks[position] = other[position]
    async with refused(play.at, IntegrityError, DAMAGED, "does not have the digest in its manifest"):
        await play.hospital.upload(update, chunks)
    await play.finish()


async def test_chunk_digests_that_are_not_those_of_the_content(play: Play) -> None:
    honest = play.honest().header.manifest
    forged = replace(honest, chunk_digests=(b"\0" * 32, *honest.chunk_digests[1:]))
    async with refused(play.at, IntegrityError, DAMAGED, "does not have the digest"):
        await play.hospital.upload(play.honest(manifest=forged))
    await play.finish()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda header: setattr(header.manifest, "chunk_bytes", 0), "chunk_bytes is 0"),
        (lambda header: setattr(header.manifest, "chunk_bytes", (4 << 20) + 4), "chunk_bytes is"),
        (lambda header: setattr(header.manifest, "chunk_bytes", 8), "chunk digests, its sizes ask for"),
        (lambda header: setattr(header.manifest, "total_bytes", (1 << 64) - 1), "total_bytes is"),
        (lambda header: setattr(header.manifest, "total_bytes", 0), "total_bytes is 0"),
        (lambda header: header.manifest.chunk_digests.append(b"\0" * 32), "chunk digests, its sizes ask for"),
        (lambda header: header.manifest.chunk_digests.__setitem__(0, b"short"), "not 32 bytes long"),
        (lambda header: setattr(header.manifest, "layout_digest", b"short"), "layout_digest has 5 bytes"),
        (lambda header: setattr(header, "model_digest", b""), "model_digest has 0 bytes"),
        (lambda header: header.ClearField("manifest"), "layout_digest has 0 bytes"),
        (lambda header: header.ClearField("summary"), "examples is 0"),
        (lambda header: setattr(header.summary, "examples", (1 << 64) - 1), "examples is"),
        (lambda header: setattr(header.summary, "optimizer_steps", (1 << 64) - 1), "optimizer_steps is"),
        (lambda header: setattr(header.summary, "loss_max", math.nan), "loss_max is nan"),
        (lambda header: setattr(header.summary, "loss_max", math.inf), "loss_max is inf"),
        (lambda header: setattr(header.summary, "loss_min", -1.0), "loss_min is -1.0"),
        (lambda header: setattr(header.summary, "loss_min", 3.0), "loss_min 3.0 is above loss_max"),
        (lambda header: setattr(header.summary, "seconds", math.nan), "seconds is nan"),
    ],
    ids=[
        "no-chunk-size",
        "chunks-above-the-limit",
        "too-few-digests",
        "endless",
        "empty",
        "too-many-digests",
        "short-digest",
        "short-layout",
        "no-model",
        "no-manifest",
        "no-summary",
        "examples-overflow",
        "steps-overflow",
        "nan-loss",
        "infinite-loss",
        "negative-loss",
        "upside-down-losses",
        "nan-seconds",
    ],
)
async def test_header_with_impossible_values(play: Play, change: Callable[[Any], object], match: str) -> None:
    update = play.honest()
    header = updates_codec.update_header_to_wire(update.header, HOSPITAL)
    change(header)
    async with refused(play.at, MalformedMessage, INVALID, match):
        await play.hospital.send([header_piece(header), *chunk_pieces(update.chunks)])
    await play.finish()


async def test_chunks_of_part_of_a_number(play: Play) -> None:
    async with refused(play.at, MalformedMessage, INVALID, "use a multiple of 4"):
        await play.hospital.upload(play.honest(chunk_bytes=CHUNK_BYTES + 2))
    await play.finish()


@pytest.mark.parametrize("steps", [1 << 63, (1 << 64) - 1])
async def test_signed_summary_with_more_steps_than_a_database_holds(play: Play, steps: int) -> None:
    """Signed and all: it must be refused before it reaches the loop that every round depends on."""
    header = play.honest().header
    boast = federation_pb2.TrainingSummary()
    boast.CopyFrom(updates_codec.summary_to_wire(SUMMARY))
    boast.optimizer_steps = steps
    unchecked = copy(SUMMARY)
    object.__setattr__(unchecked, "optimizer_steps", steps)
    message = updates_codec.update_header_to_wire(play.hospital.signed(replace(header, summary=unchecked)), HOSPITAL)
    assert message.summary == boast
    async with refused(play.at, MalformedMessage, INVALID, f"optimizer_steps is {steps}"):
        await play.hospital.send([header_piece(message), *chunk_pieces(play.honest().chunks)])
    await play.finish()


async def test_upload_that_does_not_begin_with_its_header(play: Play) -> None:
    update = play.honest()
    header = header_piece(updates_codec.update_header_to_wire(update.header, HOSPITAL))
    for pieces in ([], chunk_pieces(update.chunks), [federation_pb2.UpdatePiece(), header]):
        async with refused(play.at, MalformedMessage, INVALID, "begins with its header"):
            await play.hospital.send(pieces)
    for pieces in ([header, header], [header, federation_pb2.UpdatePiece()]):
        async with refused(play.at, MalformedMessage, INVALID, "chunks alone"):
            await play.hospital.send(pieces)
    await play.finish()


# --- who made it ---------------------------------------------------------------------------------------------------


async def test_update_signed_by_another_silo(play: Play) -> None:
    update = play.honest(identity_key=play.bank.credentials.identity_key)
    async with refused(play.at, IntegrityError, DAMAGED, "signature"):
        await play.hospital.upload(update)
    await play.finish()


async def test_update_that_another_silo_made(play: Play) -> None:
    """hospital-a sends bank-b's own update, with bank-b's own signature, as its own."""
    update = play.bank.update(await play.bank.order(Train, 1), play.layout, value=0.02)
    async with refused(play.at, IntegrityError, DAMAGED, "signature"):
        await play.hospital.upload(update)
    await play.finish()


@pytest.mark.parametrize("signature", [b"", b"\0" * 64, b"\1" * 65], ids=["none", "zeros", "too-long"])
async def test_update_without_a_signature(play: Play, signature: bytes) -> None:
    update = play.honest()
    async with refused(play.at, IntegrityError, DAMAGED, "signature"):
        await play.hospital.upload(replace(update, header=replace(update.header, signature=signature)))
    await play.finish()


@pytest.mark.parametrize(
    "change",
    [{"examples": SUMMARY.examples * 1000}, {"loss_min": 0.0}, {"loss_max": 200.0}, {"optimizer_steps": 11}],
    ids=["examples-times-1000", "lower-loss", "higher-loss", "steps"],
)
async def test_summary_tampered_with_after_signing(play: Play, change: dict[str, Any]) -> None:
    update = play.honest()
    tampered = replace(update.header, summary=replace(SUMMARY, **change))
    async with refused(play.at, IntegrityError, DAMAGED, "signature"):
        await play.hospital.upload(replace(update, header=tampered))
    await play.finish()


# --- when it comes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"attempt": 2}, {"attempt": 0}, {"round": 2}, {"round": 0}, {"plan": NOWHERE}], ids=str
)
async def test_update_for_another_round_attempt_or_plan(play: Play, change: dict[str, Any]) -> None:
    """Signed for that other key, so that the signature is not what stops it."""
    elsewhere = replace(play.order, key=replace(play.order.key, **change))
    update = play.hospital.update(elsewhere, play.layout)
    async with refused(play.at, WrongTime, NOT_NOW, "wait for the next order"):
        await play.hospital.upload(update)
    request = federation_pb2.UploadOffsetRequest(
        key=common_codec.round_call_key(elsewhere.key, HOSPITAL),
        update_digest=bytes.fromhex(update.header.manifest.digest),
    )
    async with refused(play.at, WrongTime, NOT_NOW, "wait for the next order"):
        await play.hospital.stub.UploadOffset(request)
    await play.finish()


async def test_update_made_from_another_model(play: Play) -> None:
    async with refused(play.at, WrongTime, NOT_NOW, f"made its update from model {NOWHERE}"):
        await play.hospital.upload(play.hospital.update(replace(play.order, model=NOWHERE), play.layout))
    await play.finish()


async def test_update_for_a_round_that_is_closed(play: Play) -> None:
    """bank-b declines, the round closes on hospital-a's update alone, and then bank-b's comes after all."""
    late = play.bank.update(await play.bank.order(Train, 1), play.layout, value=0.02)
    await play.client(play.bank).decline(play.order.key, DeclineReason.TRAINING_FAILED, "out of memory")
    await play.hospital.upload(play.honest())
    order = await play.hospital.order(Evaluate, 1)
    async with refused(play.at, WrongTime, NOT_NOW, "does not fit the phase evaluating"):
        await play.bank.upload(late)
    await play.hospital.stub.ReportEvaluation(report(play.hospital, order))
    await play.bank.stub.DeclareReadiness(federation_pb2.ReadinessRequest(key=play.bank.key(play.plan), ready=True))
    await play.finish(2)
    (row,) = [row for row in play.at.saved()[1] if row.round == 1]  # type: ignore[attr-defined]
    assert {silo.silo: silo.outcome for silo in row.silos} == {BANK: "declined", HOSPITAL: "committed"}


async def test_update_for_an_attempt_that_was_abandoned(play: Play) -> None:
    stale = play.honest()
    await play.client(play.bank).decline(play.order.key, DeclineReason.PAUSED, "")
    await play.hospital.stub.DeclineRound(decline(play.hospital, play.order))
    for silo in (play.hospital, play.bank):
        await silo.stub.DeclareReadiness(federation_pb2.ReadinessRequest(key=silo.key(play.plan), ready=True))
    second = await play.hospital.order(Train, 1)
    while second.key.attempt == 1:  # the order of the first attempt may still be the one that is known
        await asyncio.sleep(0)
        second = await play.hospital.order(Train, 1)
    async with refused(play.at, WrongTime, NOT_NOW, "attempt 1, now is plan"):
        await play.hospital.upload(stale)
    await play.hospital.upload(play.hospital.update(second, play.layout))


async def test_last_rounds_update_replayed_in_the_next(play: Play) -> None:
    first = play.honest()
    await play.hospital.upload(first)
    await play.finish(1, hospital_has_committed=True)
    order = await play.hospital.order(Train, 2)
    before = play.at.saved()
    receipt = await play.hospital.upload(replace(first, header=replace(first.header, first_chunk=13)), [])
    assert receipt.hex() == first.header.manifest.digest  # word for word it was committed before: said again,
    assert play.at.saved() == before  # counted once
    relabelled = replace(first.header, key=order.key, model=order.model)
    async with refused(play.at, IntegrityError, DAMAGED, "signature"):
        await play.hospital.upload(replace(first, header=relabelled))
    await play.finish(2)


async def test_second_different_update_after_the_commit(play: Play) -> None:
    await play.hospital.upload(play.honest())
    other = play.honest(value=0.5)
    async with refused(play.at, Conflict, CONFLICT, f"silo {HOSPITAL} has committed update"):
        await play.hospital.upload(other)
    request = federation_pb2.UploadOffsetRequest(
        key=common_codec.round_call_key(play.order.key, HOSPITAL),
        update_digest=bytes.fromhex(other.header.manifest.digest),
    )
    async with refused(play.at, Conflict, CONFLICT, f"silo {HOSPITAL} has committed update"):
        await play.hospital.stub.UploadOffset(request)
    await play.finish(hospital_has_committed=True)


async def test_same_update_with_other_words_about_it_after_the_commit(play: Play) -> None:
    """The digest is the committed one, the summary another, signed: the first stays what counts."""
    await play.hospital.upload(play.honest())
    before = play.at.saved()
    boasting = play.honest(summary=replace(SUMMARY, examples=10**9))
    again = replace(boasting, header=replace(boasting.header, first_chunk=boasting.header.manifest.chunks))
    await play.hospital.upload(again, [])
    assert play.at.saved() == before
    await play.finish(hospital_has_committed=True)


async def test_two_different_updates_at_once(play: Play) -> None:
    """Whichever commits first counts; the other is refused, and no mixture of both is ever summed."""
    updates = [play.honest(), play.honest(value=0.5)]
    outcomes = await asyncio.gather(*(play.hospital.upload(update) for update in updates), return_exceptions=True)
    won = [outcome.hex() for outcome in outcomes if isinstance(outcome, bytes)]
    lost = [outcome.code() for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
    assert len(won) == 1
    assert lost == [CONFLICT]
    state = play.at.saved()[0]
    assert isinstance(state, Collecting)
    assert [update.digest for update in state.updates] == won
    await play.finish(hospital_has_committed=True)


def decline(silo: Silo, order: Train | Evaluate, **fields: Any) -> federation_pb2.DeclineRequest:
    values = {"reason": federation_pb2.DECLINE_REASON_TRAINING_FAILED, "detail": "out of memory", **fields}
    return federation_pb2.DeclineRequest(key=common_codec.round_call_key(order.key, silo.name), **values)


async def test_decline_after_the_commit(play: Play) -> None:
    await play.hospital.upload(play.honest())
    async with refused(play.at, Conflict, CONFLICT, "it cannot decline it"):
        await play.hospital.stub.DeclineRound(decline(play.hospital, play.order))
    await play.finish(hospital_has_committed=True)


async def test_update_after_the_decline(play: Play) -> None:
    await play.hospital.stub.DeclineRound(decline(play.hospital, play.order))
    async with refused(play.at, Conflict, CONFLICT, "has declined round 1 attempt 1"):
        await play.hospital.upload(play.honest())
    await play.uploads(play.bank)
    await play.bank.order(Evaluate, 1)


async def test_decline_of_another_round(play: Play) -> None:
    later = replace(play.order, key=replace(play.order.key, round=2))
    async with refused(play.at, WrongTime, NOT_NOW, "wait for the next order"):
        await play.hospital.stub.DeclineRound(decline(play.hospital, later))
    await play.finish()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"reason": 0}, "decline reason 0"),
        ({"reason": 99}, "decline reason 99"),
        ({"detail": "x" * 501}, "501 characters"),
    ],
    ids=["no-reason", "unknown-reason", "a-novel"],
)
async def test_decline_that_says_nothing_known(play: Play, fields: dict[str, Any], match: str) -> None:
    async with refused(play.at, MalformedMessage, INVALID, match):
        await play.hospital.stub.DeclineRound(decline(play.hospital, play.order, **fields))
    await play.finish()


# --- who is there --------------------------------------------------------------------------------------------------


async def test_second_agent_with_the_same_identity(play: Play) -> None:
    async with (
        Silo(play.at, play.hospital.credentials, instance=b"the second agent") as second,
        refused(play.at, Conflict, CONFLICT, f"silo {HOSPITAL} already has a connected agent"),
    ):
        await anext(aiter(second.stub.Attend(second.attend_request())))
    await play.finish()  # the first one still gets its orders


async def test_same_agent_twice_takes_its_seat_over(play: Play) -> None:
    """Its old stream may be dead without the coordinator knowing: not an attack, and the round is not disturbed."""
    play.hospital.attend()
    await play.finish()


@pytest.mark.parametrize("instance", [b"", b"short", b"x" * 17], ids=["none", "short", "long"])
async def test_agent_without_an_instance_number(play: Play, instance: bytes) -> None:
    request = play.hospital.attend_request(agent_instance=instance)
    async with refused(play.at, MalformedMessage, INVALID, "agent_instance has"):
        await anext(aiter(play.hospital.stub.Attend(request)))
    await play.finish()


@pytest.mark.parametrize("version", [0, 1, 3, (1 << 32) - 1])
async def test_unknown_wire_version(play: Play, version: int) -> None:
    request = play.hospital.attend_request(wire_version=version)
    async with refused(play.at, StateError, NOT_NOW, f"speaks wire version {version}.0, the coordinator 2.0"):
        await anext(aiter(play.hospital.stub.Attend(request)))
    await play.finish()


@pytest.mark.parametrize("release", ["1.0\n", "a b", "\u202e", "x" * 41, "<b>"])
async def test_a_release_that_is_none(play: Play, release: str) -> None:
    request = play.hospital.attend_request(agent_version=release)
    async with refused(play.at, MalformedMessage, INVALID, "the release that the other side names is none"):
        await anext(aiter(play.hospital.stub.Attend(request)))
    await play.finish()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"fraction": math.nan}, "progress fraction is nan"),
        ({"fraction": math.inf}, "progress fraction is inf"),
        ({"fraction": -0.1}, "progress fraction is -0.1"),
        ({"fraction": 1.5}, "progress fraction is 1.5"),
        ({"phase": 0}, "agent phase 0"),
        ({"phase": 77}, "agent phase 77"),
    ],
    ids=["nan", "inf", "negative", "above-one", "no-phase", "unknown-phase"],
)
async def test_impossible_progress(play: Play, fields: dict[str, Any], match: str) -> None:
    values = {"phase": federation_pb2.AGENT_PHASE_TRAINING, "fraction": 0.5, **fields}
    message = federation_pb2.ProgressReport(key=common_codec.round_call_key(play.order.key, HOSPITAL), **values)
    async with refused(play.at, MalformedMessage, INVALID, match):
        await play.hospital.stub.ReportProgress(message)
    standing = {silo.silo: silo for silo in (await play.at.service.status()).silos}
    assert standing[HOSPITAL].fraction == 0.0
    await play.finish()


async def test_progress_and_readiness_of_a_silo_that_does_not_attend(
    play: Play, federation_template: FederationTemplate
) -> None:
    clinic = replace(await play.at.enrolled("clinic-c"), address=play.at.address)
    async with Silo(play.at, clinic) as absent:
        async with refused(play.at, WrongTime, NOT_NOW, "silo clinic-c is not attending"):
            await absent.stub.DeclareReadiness(federation_pb2.ReadinessRequest(key=absent.key(play.plan), ready=True))
        async with refused(play.at, WrongTime, NOT_NOW, "silo clinic-c is not attending"):
            await absent.stub.ReportProgress(
                federation_pb2.ProgressReport(key=absent.key(play.plan), phase=federation_pb2.AGENT_PHASE_TRAINING)
            )
        async with refused(play.at, WrongTime, NOT_NOW, "silo clinic-c is not in the cohort"):
            await absent.upload(absent.update(play.order, play.layout))
        async with refused(play.at, WrongTime, NOT_NOW, "silo clinic-c is not in the cohort"):
            await absent.stub.DeclineRound(decline(absent, play.order))
    await play.finish(last=True)  # the next round waits for the newcomer


# --- what is asked for ---------------------------------------------------------------------------------------------


async def first_of(call: Any) -> Any:
    try:
        return await anext(aiter(call))
    finally:
        call.cancel()


async def test_plan_that_is_not_under_way(play: Play) -> None:
    key = play.hospital.key(NOWHERE)
    match = f"plan {NOWHERE} is not under way"
    async with refused(play.at, WrongTime, NOT_NOW, match):
        await first_of(play.hospital.stub.FetchPlan(federation_pb2.FetchPlanRequest(key=key)))
    async with refused(play.at, WrongTime, NOT_NOW, match):
        await play.hospital.stub.DeclareReadiness(federation_pb2.ReadinessRequest(key=key, ready=False, reason="no"))
    model = federation_pb2.FetchModelRequest(key=key, model_digest=bytes.fromhex(play.order.model))
    async with refused(play.at, WrongTime, NOT_NOW, match):
        await first_of(play.hospital.stub.FetchModel(model))
    await play.finish()


@pytest.mark.parametrize(
    "raw", [b"", b"short", b"../../../etc/passwd", b"x" * 33], ids=["none", "short", "path", "long"]
)
async def test_plan_digest_that_is_none(play: Play, raw: bytes) -> None:
    key = common_pb2.CallKey(federation=FEDERATION, silo=HOSPITAL, plan_digest=raw)
    async with refused(play.at, MalformedMessage, INVALID, f"plan_digest has {len(raw)} bytes"):
        await first_of(play.hospital.stub.FetchPlan(federation_pb2.FetchPlanRequest(key=key)))
    await play.finish()


async def test_model_that_is_not_handed_out(play: Play) -> None:
    key = play.hospital.key(play.plan)
    request = federation_pb2.FetchModelRequest(key=key, model_digest=bytes.fromhex(NOWHERE))
    async with refused(play.at, WrongTime, NOT_NOW, f"model {NOWHERE} is not handed out now"):
        await first_of(play.hospital.stub.FetchModel(request))
    update = play.honest()
    await play.hospital.upload(
        update
    )  # another silo's update is a vector of the store as well: it is nobody's to fetch
    stolen = federation_pb2.FetchModelRequest(
        key=play.bank.key(play.plan), model_digest=bytes.fromhex(update.header.manifest.digest)
    )
    async with refused(play.at, WrongTime, NOT_NOW, "is not handed out now"):
        await first_of(play.bank.stub.FetchModel(stolen))
    await play.finish(hospital_has_committed=True)


@pytest.mark.parametrize("method", ["FetchPlan", "FetchModel"])
async def test_silo_that_hangs_up_when_it_has_all(play: Play, method: str) -> None:
    """Each chunk counts as sent, the last one as well. What gRPC does with such a call is done by hand here, since it is
    a matter of luck whether it goes on with it once more."""
    sent: list[int] = []
    servicer = FederationServicer(
        play.at.service, play.at.coordinator.federation, on_sent=sent.append, on_received=sent.append
    )
    key = play.hospital.key(play.plan)
    request: Any = federation_pb2.FetchPlanRequest(key=key)
    whole = len(play.at.coordinator.shelf.bundle(play.plan).encode())
    if method == "FetchModel":
        request = federation_pb2.FetchModelRequest(key=key, model_digest=bytes.fromhex(play.order.model))
        whole = play.layout.total_bytes
    token = CALLER.set(Identity(play.at.coordinator.federation, Role.SILO, HOSPITAL))
    async with aclosing(getattr(servicer, method)(request, None)) as pieces:
        if method == "FetchModel":
            await anext(pieces)  # the header
        await anext(pieces)
    CALLER.reset(token)
    assert sent == [whole], "of one chunk each"
    await play.finish()


async def test_model_from_a_chunk_that_it_does_not_have(play: Play) -> None:
    request = federation_pb2.FetchModelRequest(
        key=play.hospital.key(play.plan), model_digest=bytes.fromhex(play.order.model), first_chunk=(1 << 32) - 1
    )
    async with refused(play.at, MalformedMessage, INVALID, "first_chunk is 4294967295"):
        await first_of(play.hospital.stub.FetchModel(request))
    await play.finish()


async def test_upload_that_goes_on_where_it_has_not_been(play: Play) -> None:
    update = play.honest()
    for first in (1, (1 << 32) - 1):
        ahead = replace(update, header=replace(update.header, first_chunk=first))
        async with refused(play.at, WrongTime, NOT_NOW, f"goes on at chunk 0, not at {first}"):
            await play.hospital.upload(ahead, [])
    await play.finish()


# --- evaluation ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def evaluating(play: Play) -> AsyncIterator[Evaluate]:
    """Round 1 has its model; after the attack both silos score it and the next round opens."""
    await play.hospital.upload(play.honest())
    await play.uploads(play.bank)
    order = await play.hospital.order(Evaluate, 1)
    yield order
    assert isinstance(play.at.saved()[0], Evaluating)
    await play.evaluate()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"examples": 0}, "examples is 0"),
        ({"examples": (1 << 64) - 1}, "examples is"),
        ({"exact_matches": 11}, "counts exceed"),
        ({"executed": 11}, "counts exceed"),
        ({"executed": 5, "execution_matches": 6}, "execution_matches exceeds executed"),
        ({"loss_per_token": math.nan}, "loss_per_token is nan"),
        ({"loss_per_token": -1.0}, "loss_per_token is -1.0"),
        ({"seconds": math.inf}, "seconds is inf"),
        ({"split": "train"}, "split is 'train'"),
        ({"split": "x" * (1 << 20)}, "split is 'xxx"),
        ({"model_digest": b""}, "model_digest has 0 bytes"),
    ],
    ids=[
        "no-examples",
        "examples-overflow",
        "more-right-than-asked",
        "more-run-than-asked",
        "more-right-than-run",
        "nan-loss",
        "negative-loss",
        "endless",
        "another-split",
        "a-mebibyte-of-split",
        "no-model",
    ],
)
async def test_evaluation_with_impossible_counts(play: Play, fields: dict[str, Any], match: str) -> None:
    async with evaluating(play) as order, refused(play.at, MalformedMessage, INVALID, match):
        await play.hospital.stub.ReportEvaluation(report(play.hospital, order, **fields))


async def test_evaluation_of_another_model(play: Play) -> None:
    async with evaluating(play) as order, refused(play.at, WrongTime, NOT_NOW, f"reports on model {NOWHERE}"):
        await play.hospital.stub.ReportEvaluation(report(play.hospital, replace(order, model=NOWHERE)))


async def test_evaluation_of_another_round(play: Play) -> None:
    async with refused(play.at, WrongTime, NOT_NOW, "does not fit the phase collecting"):
        await play.hospital.stub.ReportEvaluation(report(play.hospital, play.order))
    async with evaluating(play) as order:
        later = replace(order, key=replace(order.key, round=2))
        async with refused(play.at, WrongTime, NOT_NOW, "wait for the next order"):
            await play.hospital.stub.ReportEvaluation(report(play.hospital, later))


async def test_second_different_evaluation(play: Play) -> None:
    async with evaluating(play) as order:
        await play.hospital.stub.ReportEvaluation(report(play.hospital, order))
        async with refused(play.at, Conflict, CONFLICT, "has reported another evaluation"):
            await play.hospital.stub.ReportEvaluation(report(play.hospital, order, exact_matches=10))
        async with refused(play.at, Conflict, CONFLICT, "it cannot decline it"):
            await play.hospital.stub.DeclineRound(decline(play.hospital, order))
        await play.hospital.order(Standby)
        play.hospital.standing = order  # for the honest end of the round, which says the same again


# --- messages that are none ----------------------------------------------------------------------------------------


@asynccontextmanager
async def unbounded(play: Play) -> AsyncIterator[grpc.aio.Channel]:
    """hospital-a without its client's own limits."""
    credentials = play.hospital.credentials
    tls = grpc.ssl_channel_credentials(credentials.trust.to_pem(), credentials.tls_key_pem, credentials.certificate_pem)
    options = [
        ("grpc.ssl_target_name_override", coordinator_dns_name(FEDERATION)),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),
    ]
    async with grpc.aio.secure_channel(play.at.address, tls, options=options) as channel:
        yield channel


async def test_message_of_more_than_5_mebibytes(play: Play) -> None:
    before = play.at.saved()
    update = play.honest()
    header = header_piece(updates_codec.update_header_to_wire(update.header, HOSPITAL))
    giant = chunk_pieces([(0, bytes(6 << 20))])[0]

    async def outgoing() -> AsyncIterator[federation_pb2.UpdatePiece]:
        yield header
        yield giant

    async with unbounded(play) as channel:
        stub: Any = federation_pb2_grpc.FederationStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer_to(stub.UploadUpdate(timeout=PATIENCE_S), outgoing())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.DeclineRound(decline(play.hospital, play.order, detail="x" * (6 << 20)), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert play.at.saved() == before
    await play.finish()


@pytest.mark.parametrize("call", ["DeclareReadiness", "Attend", "UploadUpdate"])
async def test_bytes_that_are_no_message(play: Play, call: str) -> None:
    path = f"/silo_wire.v1.Federation/{call}"
    garbage = b"\xff" * 100

    async def outgoing() -> AsyncIterator[bytes]:
        yield garbage

    channel = play.hospital.channel
    async with refused(play.at, MalformedMessage, INVALID, "cannot be read"):
        match call:
            case "Attend":
                await first_of(channel.unary_stream(path)(garbage))
            case "UploadUpdate":
                await answer_to(channel.stream_unary(path)(), outgoing())
            case _:
                await channel.unary_unary(path)(garbage)
    await play.finish()


async def test_defect_of_the_coordinator_tells_the_peer_nothing(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("/srv/lorica/keys is where the secrets are")

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(play.at.service, "report_progress", broken)
        message = federation_pb2.ProgressReport(key=common_codec.round_call_key(play.order.key, HOSPITAL), phase=1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await play.hospital.stub.ReportProgress(message)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secrets" not in str(caught.value)
    assert [entry["event"] for entry in logs] == ["defect"]
    assert "secrets" in str(logs[0]["exc_info"])
    assert play.at.errors("Defect") == 1
    await play.finish()


async def test_call_that_does_not_exist(play: Play) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await play.hospital.channel.unary_unary("/silo_wire.v1.Federation/GiveMeEverything")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await play.finish()
