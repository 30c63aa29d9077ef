"""The coordinator over mutual TLS: `CoordinatorPort`, for one silo.

Every call may be repeated, so a call that finds the coordinator unreachable waits (backoff.py) and tries again until
its task is cancelled; so does one that is refused since a certificate does not hold by somebody's clock, which may be set right. A word
that a round needs (not ready, ready, trained, declined, an answer, scores, a ledger's head) is also said again to a coordinator that could not
store it. So each is said until it is taken, or until the coordinator says that its time is over. What the coordinator sends is checked here, in this order, before anything is kept: its order is
for this federation; a plan has the digest that was asked for; a model's manifest has the digest of the order, fits the
plan's layout, was made by no later round, and carries the coordinator's signature; each chunk has its digest.
"""

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError

from lorica_security.audit.chain import Head
from lorica_security.audit.signed_head import SignedHead
from lorica_security.errors import (
    AuthenticationError,
    AuthorisationError,
    Conflict,
    IntegrityError,
    LoricaError,
    MalformedMessage,
    OutsideValidity,
    StateError,
    StorageError,
    Unreachable,
)
from lorica_security.host.file_mark import FileMark
from lorica_security.identity.identity_key import verify
from lorica_security.identity.succession import Succession
from lorica_security.pki.validity import Window
from lorica_security.secure_aggregation.groups.release_groups import SignedLink
from lorica_security.secure_aggregation.messages import MaskedInput
from lorica_security.secure_aggregation.model_evidence.verdicts import Verdict
from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.keys.signed_update import signed_header
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.edges.wire.connection import Wire
from silo_agent.rounds.events import SavedUpdate
from silo_agent.service.ports import Progress, RoundModel
from silo_wire import wire_version
from silo_wire.canonical import Digest, digest_to_wire
from silo_wire.checkable_round import CheckableRound
from silo_wire.codecs.chunk_piece import ChunkPiece, chunk_piece, reader
from silo_wire.codecs.common_codec import NO_DIGEST, call_key, detail_to_wire, round_call_key
from silo_wire.codecs.evidence_codec import MAX_CHECKABLE_BYTES, checkable_from_bytes
from silo_wire.codecs.groups_codec import GroupsOffer, held_to_wire, offer_from_wire
from silo_wire.codecs.ledger_receipt import LedgerReceipt, receipt_from_wire, report_to_wire
from silo_wire.codecs.masked_orders_codec import mask_answer_to_wire, masked_header_to_wire
from silo_wire.codecs.orders_codec import order_from_wire
from silo_wire.codecs.renewal import (
    RenewalAnswer,
    renewal_from_wire,
    renewal_request,
    succession_request,
    trust_digest_from_wire,
)
from silo_wire.codecs.secure_codec import MAX_COHORT
from silo_wire.codecs.secure_journals_codec import verdict_from_wire, verdict_to_wire
from silo_wire.codecs.update_receipt import UpdateReceipt
from silo_wire.codecs.update_receipt import receipt_from_wire as receipt_from_answer
from silo_wire.codecs.updates_codec import (
    decline_reason_to_wire,
    evaluation_to_wire,
    model_header_from_wire,
    phase_to_wire,
    update_header_to_wire,
)
from silo_wire.manifest import CHUNK_BYTES, Layout, Manifest
from silo_wire.messages import (
    AgentPhase,
    DeclineReason,
    Evaluate,
    Evaluation,
    HeldPieces,
    Mask,
    MaskAnswer,
    MaskedHeader,
    ModelHeader,
    Order,
    RoundKey,
    Train,
)
from silo_wire.plans.plan import MAX_BUNDLE_BYTES, PlanBundle
from silo_wire.statements import MODEL_DOMAIN, model_statement
from silo_wire.transport import answer_to, error_of, give_memory_back
from silo_wire.v1 import common_pb2, federation_pb2
from silo_wire.wire_version import Speaker, require_compatible
from silo_wire.work_behind import WorkBehind

CALL_TIMEOUT_S = 30.0
BATCH_BYTES = 2 << 20
"""Chunks come from the disk so many bytes at a time, and no more than twice as many wait in memory."""
_MOST_PIECES = 1 << 10
_THREADS = ThreadPoolExecutor(1, thread_name_prefix="chunks")
"""For what arrives: an agent fetches one model at a time."""
_PASSES = (Unreachable, OutsideValidity)
"""Troubles of the network and of clocks: they end by themselves, or people end them."""
_ENDS_THE_AGENT = (AuthenticationError, AuthorisationError, Conflict)

T = TypeVar("T")


def _ignore(_: object) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Who counts what goes over the line: bytes of plans and chunks, and whether orders come."""

    sent: Callable[[int], None] = _ignore
    received: Callable[[int], None] = _ignore
    attending: Callable[[bool], None] = _ignore


class GrpcCoordinator:
    """`unreachable` hears of each failed try, with the seconds until the next."""

    def __init__(
        self,
        *,
        channel: grpc.aio.Channel,
        credentials: SiloCredentials,
        models: ModelCache,
        agent_version: str,
        unreachable: Callable[[LoricaError, float], None],
        new_backoff: Callable[[], Backoff] = Backoff,
        instance: bytes = b"",
        log_head: Callable[[], Head] = Head,
        traffic: Traffic | None = None,
    ) -> None:
        """`instance` as in instance.py; without one, this client succeeds no other. `log_head`: how far this silo's audit log is."""
        self._wire = Wire(channel)
        self._credentials = credentials
        self._models = models
        self._agent_version = agent_version
        self._unreachable = unreachable
        self._new_backoff = new_backoff
        self._instance = instance or os.urandom(16)
        self._log_head = log_head
        self._traffic = traffic or Traffic()
        self._old_wires: set[asyncio.Task[None]] = set()
        self.on_trust: Callable[[bytes], None] = lambda digest: None
        """Hears, with each order, the digest of the trust bundle that stands at the coordinator."""
        self.on_groups: Callable[[bytes], None] = lambda digest: None
        """Hears, with each order, what stands for the coordinator's release groups."""
        self.on_speaker: Callable[[Speaker], None] = lambda speaker: None
        """Hears, as each stream of orders begins, which release the coordinator is and which wire it speaks."""

    def go_over(self, channel: grpc.aio.Channel, credentials: SiloCredentials) -> None:
        """New calls go over `channel` from now on, which shows these; the one before is closed once the last call on it has ended."""
        self._credentials = credentials
        before, self._wire = self._wire, Wire(channel)
        closing = asyncio.create_task(before.supersede())
        self._old_wires.add(closing)
        closing.add_done_callback(self._old_wires.discard)

    async def close(self) -> None:
        """Every channel, at once."""
        for closing in tuple(self._old_wires):
            closing.cancel()
        await asyncio.gather(*self._old_wires, return_exceptions=True)
        await self._wire.channel.close()

    # ---- orders -------------------------------------------------------------------------------------------------

    async def orders(self) -> AsyncIterator[Order]:
        backoff = self._new_backoff()
        before: _Attending | None = None
        try:
            while True:
                attending = _Attending(self._wire, self._attend_request())
                problem: LoricaError = Unreachable("the coordinator ended the connection")
                heard = False
                try:
                    while (notice := await attending.next()) is not None:
                        if not heard:
                            self._hear(notice)
                            heard = True
                        order = order_from_wire(notice)
                        self._require_ours(order)
                        backoff.reset()
                        self._traffic.attending(True)
                        if before is not None:
                            await before.end()  # the seat has passed to this stream: the coordinator missed nobody
                            before = None
                        if notice.trust_bundle:
                            self.on_trust(trust_digest_from_wire(notice.trust_bundle, "notice"))
                        if notice.release_groups:
                            self.on_groups(notice.release_groups)
                        yield order
                except grpc.aio.AioRpcError as error:
                    problem = error_of(error)
                except (MalformedMessage, StateError) as error:
                    problem = error
                finally:
                    if before is not None:
                        await before.end()
                        before = None
                    if attending.moved_on:
                        before = attending  # until a stream over the new channel has taken its place
                    else:
                        await attending.end()
                if before is not None:
                    continue
                self._traffic.attending(False)
                if isinstance(problem, _ENDS_THE_AGENT) and not isinstance(problem, _PASSES):
                    raise problem
                await self._wait(problem, backoff)
        finally:
            if before is not None:
                await before.end()

    def _attend_request(self) -> federation_pb2.AttendRequest:
        return federation_pb2.AttendRequest(
            key=self._key(),
            wire_version=wire_version.OURS.major,
            wire_minor=wire_version.OURS.minor,
            agent_instance=self._instance,
            agent_version=self._agent_version,
        )

    def _hear(self, notice: federation_pb2.Notice) -> None:
        """Raises StateError for a coordinator whose wire is too far from this agent's: it is tried again, until one side was upgraded."""
        speaker = Speaker.from_wire(notice.coordinator_version, major=wire_version.OURS.major, minor=notice.wire_minor)
        require_compatible(agent=wire_version.OURS, coordinator=speaker.wire, silo=self._credentials.silo)
        self.on_speaker(speaker)

    def _require_ours(self, order: Order) -> None:
        if isinstance(order, Train | Mask | Evaluate) and order.key.federation != self._credentials.federation:
            raise MalformedMessage(
                f"the coordinator sends an order for federation {order.key.federation!r}, this silo is of "
                f"{self._credentials.federation!r}"
            )

    # ---- plans and models ---------------------------------------------------------------------------------------

    async def fetch_plan(self, plan: Digest) -> PlanBundle:
        try:
            return await self._until_answered(lambda wire: self._fetch_plan(wire, plan))
        finally:
            give_memory_back()

    async def _fetch_plan(self, wire: Wire, plan: Digest) -> PlanBundle:
        raw = bytearray()
        expected = 0
        call = wire.stub.FetchPlan(federation_pb2.FetchPlanRequest(key=self._key(plan)))
        try:
            async for chunk in call:
                if chunk.index != expected:
                    raise MalformedMessage(f"plan bundle chunk {chunk.index} came where {expected} was due")
                if not chunk.data:
                    raise MalformedMessage(f"plan bundle chunk {chunk.index} is empty")
                expected += 1
                raw += chunk.data
                self._traffic.received(len(chunk.data))
                if len(raw) > MAX_BUNDLE_BYTES:
                    raise MalformedMessage(f"plan bundle has more than the {MAX_BUNDLE_BYTES} bytes allowed")
            return PlanBundle.decode(bytes(raw), plan)
        finally:
            call.cancel()
            raw.clear()  # an error would keep it

    async def declare_readiness(self, plan: Digest, *, ready: bool, reason: str) -> None:
        request = federation_pb2.ReadinessRequest(key=self._key(plan), ready=ready, reason=detail_to_wire(reason))
        await self._until_taken(lambda wire: wire.stub.DeclareReadiness(request, timeout=CALL_TIMEOUT_S))

    async def fetch_model(
        self,
        *,
        plan: Digest,
        layout: Layout,
        key: RoundKey | None,
        model: Digest,
        latest_round: int,
        progress: Progress,
    ) -> RoundModel:
        wire_key = self._key(plan) if key is None else round_call_key(key, self._credentials.silo)
        return await self._fetch_into(
            self._models, wire_key, plan=plan, layout=layout, model=model, latest_round=latest_round, progress=progress
        )

    async def fetch_base(self, *, plan: Digest, layout: Layout, model: Digest, progress: Progress) -> RoundModel:
        return await self._fetch_into(
            self._models.base(),
            self._key(plan),
            plan=plan,
            layout=layout,
            model=model,
            latest_round=0,
            progress=progress,
        )

    async def _fetch_into(
        self,
        models: ModelCache,
        key: common_pb2.CallKey,
        *,
        plan: Digest,
        layout: Layout,
        model: Digest,
        latest_round: int,
        progress: Progress,
    ) -> RoundModel:
        """The model from `models`, where it is fetched to if it is not there."""
        header = self._kept_header(models, model, plan=plan, layout=layout, latest_round=latest_round)
        if header is not None:
            mark = await asyncio.to_thread(models.whole, model, header.manifest)
            if mark is not None:
                models.touch(model)
                return RoundModel(file=models.file(model), manifest=header.manifest, mark=mark)

        async def attempt(wire: Wire) -> Manifest:
            return await self._fetch_model(
                wire, models, key, plan=plan, layout=layout, model=model, latest_round=latest_round, progress=progress
            )

        models.prune(model, coming=True)
        manifest = await self._until_answered(attempt)
        models.prune(model)
        mark = models.whole(model, manifest)  # known: its chunks were checked as they came
        return RoundModel(file=models.file(model), manifest=manifest, mark=mark)

    async def _fetch_model(
        self,
        wire: Wire,
        models: ModelCache,
        key: common_pb2.CallKey,
        *,
        plan: Digest,
        layout: Layout,
        model: Digest,
        latest_round: int,
        progress: Progress,
    ) -> Manifest:
        known = self._kept_header(models, model, plan=plan, layout=layout, latest_round=latest_round)
        partial = None
        first = 0
        if known is not None:
            partial = await asyncio.to_thread(models.open_partial, model, known)
            first = partial.held
        call = wire.model_pieces(
            federation_pb2.FetchModelRequest(key=key, model_digest=digest_to_wire(model), first_chunk=first)
        )
        behind = WorkBehind(_THREADS)
        announced = False
        try:
            async for raw in call:
                match piece := _read_piece(raw):
                    case federation_pb2.ModelPiece() if piece.HasField("header"):
                        if announced:
                            raise MalformedMessage("the coordinator sends a model's header a second time")
                        announced = True
                        header = model_header_from_wire(piece.header)
                        self._check_header(header, plan=plan, layout=layout, model=model, latest_round=latest_round)
                        if partial is None:
                            partial = await asyncio.to_thread(models.open_partial, model, header, anew=True)
                    case ChunkPiece():
                        if partial is None:
                            raise MalformedMessage("the coordinator sends a model's chunk before its header")
                        if partial.is_whole or piece.index != partial.due:
                            raise MalformedMessage(f"model chunk {piece.index} came where {partial.due} was due")
                        partial.arrive(piece.data)
                        self._traffic.received(len(piece.data))
                        await behind.put(functools.partial(partial.append, piece.data))
                        progress(partial.fraction)
                    case _:
                        raise MalformedMessage(
                            "the coordinator sends a piece of a model that is neither header nor chunk"
                        )
                if partial.is_whole:
                    break  # whatever else comes, it is not of this model
            if partial is None or not partial.is_whole:
                raise Unreachable("the coordinator ended the download before the model was whole")
            await behind.done()
            partial.finish(models.file(model))
            return partial.manifest
        finally:
            call.cancel()
            if partial is not None:
                await behind.settle()  # what has arrived is kept, if it is right
                partial.close()

    def _kept_header(
        self, models: ModelCache, model: Digest, *, plan: Digest, layout: Layout, latest_round: int
    ) -> ModelHeader | None:
        """Of a model on this silo's disk; None where it does not hold now, as of a model that came under another plan: it is fetched anew."""
        header = models.header(model)
        if header is not None:
            try:
                self._check_header(header, plan=plan, layout=layout, model=model, latest_round=latest_round)
            except (IntegrityError, MalformedMessage):
                return None
        return header

    def _check_header(
        self, header: ModelHeader, *, plan: Digest, layout: Layout, model: Digest, latest_round: int
    ) -> None:
        manifest = header.manifest
        manifest.check_layout(layout)
        if manifest.digest != model:
            raise IntegrityError(f"the coordinator ordered model {model} and hands out {manifest.digest}")
        if header.round > latest_round:
            raise IntegrityError(f"the model is said to be of round {header.round}, which comes after {latest_round}")
        verify(
            self._credentials.coordinator_key,
            domain=MODEL_DOMAIN.encode(),
            payload=model_statement(
                federation=self._credentials.federation, plan=plan, round_number=header.round, model=model
            ),
            signature=header.signature,
        )

    # ---- what round models are checked with ------------------------------------------------------------------------

    async def fetch_evidence(self, plan: Digest, model: Digest) -> CheckableRound:
        """What the coordinator says made `model`; raises what it says, MalformedMessage."""
        request = federation_pb2.EvidenceRequest(key=self._key(plan), model_digest=digest_to_wire(model))

        async def attempt(wire: Wire) -> Sequence[bytes]:
            return await self._fetch_pieces(
                wire.stub.FetchEvidence(request),
                "evidence",
                most_bytes=MAX_CHECKABLE_BYTES,
                most=_MOST_PIECES,
                read=_as_it_came,
            )

        pieces = await self._until_answered(attempt)
        return await asyncio.to_thread(checkable_from_bytes, b"".join(pieces), self._credentials.federation)

    async def fetch_pieces(
        self, plan: Digest, model: Digest, chunk: int, held: HeldPieces, most: int
    ) -> Sequence[bytes]:
        """What chunk `chunk` of the round that made `model` is made again with, without what is `held`: `most` pieces at most.

        Raises what the coordinator says, MalformedMessage.
        """
        request = federation_pb2.PiecesRequest(
            key=self._key(plan),
            model_digest=digest_to_wire(model),
            chunk=chunk,
            without_vector=held.vector_of is not None,
            without_master=held.master,
        )

        async def attempt(wire: Wire) -> Sequence[bytes]:
            call = wire.chunk_pieces(request)
            what = f"chunk {chunk} of a round"
            return await self._fetch_pieces(call, what, most_bytes=most * CHUNK_BYTES, most=most, read=_read_chunk)

        return await self._until_answered(attempt)

    async def _fetch_pieces(
        self,
        call: grpc.aio.UnaryStreamCall[Any, T],
        what: str,
        *,
        most_bytes: int,
        most: int,
        read: Callable[[T], common_pb2.Chunk | ChunkPiece],
    ) -> Sequence[bytes]:
        pieces: list[bytes] = []
        held = 0
        try:
            async for message in call:
                piece = read(message)
                if piece.index != len(pieces):
                    raise MalformedMessage(f"{what}: piece {piece.index} came where {len(pieces)} was due")
                held += len(piece.data)
                if held > most_bytes or len(pieces) == most:
                    raise MalformedMessage(f"{what} has more than the {most_bytes} bytes or {most} pieces allowed")
                pieces.append(bytes(piece.data))
                self._traffic.received(len(piece.data))
            return pieces
        finally:
            call.cancel()

    async def share_verdict(
        self, plan: Digest, model: Digest, verdict: Verdict, known: int
    ) -> tuple[Collection[Verdict], int]:
        """As EvidencePort has it. Raises what the coordinator says, MalformedMessage."""
        request = federation_pb2.VerdictRequest(
            key=self._key(plan), model_digest=digest_to_wire(model), verdict=verdict_to_wire(verdict), known=known
        )
        reply = await self._until_taken(lambda wire: wire.stub.ShareVerdict(request, timeout=CALL_TIMEOUT_S))
        return _verdicts(reply), reply.known

    async def fetch_verdicts(self, plan: Digest, model: Digest) -> Collection[Verdict]:
        """As EvidencePort has it. Raises what the coordinator says, MalformedMessage."""
        request = federation_pb2.EvidenceRequest(key=self._key(plan), model_digest=digest_to_wire(model))
        reply = await self._until_answered(lambda wire: wire.stub.FetchVerdicts(request, timeout=CALL_TIMEOUT_S))
        return _verdicts(reply)

    # ---- what leaves the silo -----------------------------------------------------------------------------------

    async def upload(
        self, update: SavedUpdate, file: Path, *, mark: FileMark | None = None, progress: Progress
    ) -> UpdateReceipt:
        def header(first_chunk: int, log: SignedHead) -> federation_pb2.UpdatePiece:
            signed = signed_header(update, self._credentials, first_chunk=first_chunk, log=log)
            return federation_pb2.UpdatePiece(header=update_header_to_wire(signed, self._credentials.silo))

        return await self._until_answered(
            lambda wire: self._upload(wire, update.key, update.manifest, header, file, mark, progress)
        )

    async def upload_masked(
        self,
        key: RoundKey,
        masked: MaskedInput,
        manifest: Manifest,
        file: Path,
        *,
        mark: FileMark | None,
        progress: Progress,
    ) -> UpdateReceipt:
        def header(first_chunk: int, log: SignedHead) -> federation_pb2.UpdatePiece:
            announced = MaskedHeader(key=key, masked=masked, manifest=manifest, first_chunk=first_chunk, log=log)
            return federation_pb2.UpdatePiece(masked=masked_header_to_wire(announced, self._credentials.silo))

        return await self._until_answered(lambda wire: self._upload(wire, key, manifest, header, file, mark, progress))

    async def _upload(
        self,
        wire: Wire,
        key: RoundKey,
        manifest: Manifest,
        header: Callable[[int, SignedHead], federation_pb2.UpdatePiece],
        file: Path,
        mark: FileMark | None,
        progress: Progress,
    ) -> UpdateReceipt:
        """`header` is of the upload that goes on at the given chunk, with the head of this silo's log; none is left of one that counts."""
        reply = await wire.stub.UploadOffset(
            federation_pb2.UploadOffsetRequest(
                key=round_call_key(key, self._credentials.silo), update_digest=digest_to_wire(manifest.digest)
            ),
            timeout=CALL_TIMEOUT_S,
        )
        held = manifest.chunks if reply.committed else reply.chunks
        if held > manifest.chunks:
            raise MalformedMessage(f"the coordinator says it holds {held} chunks of an update of {manifest.chunks}")
        who = self._credentials
        log = SignedHead.sign(who.identity_key, writer=who.identity.uri, head=self._log_head())
        pieces = _pieces(header(held, log), manifest, file, mark, held, progress, self._traffic.sent)
        receipt = receipt_from_answer(await answer_to(wire.upload_update(), pieces), key=key, silo=who.silo)
        if (receipt.update, receipt.total_bytes) != (manifest.digest, manifest.total_bytes):
            raise IntegrityError("the coordinator's receipt names another update than the one that was sent")
        if receipt.shown != log.head:
            raise IntegrityError(
                "the coordinator's receipt names another head of this silo's audit log than it was shown"
            )
        receipt.check(who.coordinator_key)
        if held == manifest.chunks:
            progress(1.0)
        return receipt

    async def declare_trained(self, key: RoundKey, model: Digest) -> None:
        request = federation_pb2.TrainedReport(
            key=round_call_key(key, self._credentials.silo), model_digest=digest_to_wire(model)
        )
        await self._until_taken(lambda wire: wire.stub.DeclareTrained(request, timeout=CALL_TIMEOUT_S))

    async def answer_mask(self, key: RoundKey, answer: MaskAnswer) -> None:
        request = mask_answer_to_wire(key, self._credentials.silo, answer)
        await self._until_taken(lambda wire: wire.stub.AnswerMask(request, timeout=CALL_TIMEOUT_S))

    async def decline(self, key: RoundKey, reason: DeclineReason, detail: str) -> None:
        request = federation_pb2.DeclineRequest(
            key=round_call_key(key, self._credentials.silo),
            reason=decline_reason_to_wire(reason),
            detail=detail_to_wire(detail),
        )
        await self._until_taken(lambda wire: wire.stub.DeclineRound(request, timeout=CALL_TIMEOUT_S))

    async def report_progress(self, key: RoundKey, phase: AgentPhase, fraction: float) -> None:
        request = federation_pb2.ProgressReport(
            key=round_call_key(key, self._credentials.silo), phase=phase_to_wire(phase), fraction=fraction
        )
        try:
            async with self._wire.used() as wire:
                await wire.stub.ReportProgress(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return  # the next report says more than this one

    async def report_evaluation(self, key: RoundKey, model: Digest, evaluation: Evaluation) -> None:
        request = evaluation_to_wire(key, self._credentials.silo, model, evaluation)
        await self._until_taken(lambda wire: wire.stub.ReportEvaluation(request, timeout=CALL_TIMEOUT_S))

    async def countersign_ledger(self, head: Head, *, after: Head) -> LedgerReceipt:
        who = self._credentials
        request = report_to_wire(federation=who.federation, silo=who.silo, head=head, after=after)
        receipt = receipt_from_wire(
            await self._until_taken(lambda wire: wire.stub.CountersignLedger(request, timeout=CALL_TIMEOUT_S))
        )
        receipt.check(who.coordinator_key, federation=who.federation, silo=who.silo)
        return receipt

    # ---- what keeps this silo fresh: one try each ------------------------------------------------------------------

    async def renew_certificate(self, csr_der: bytes, endorsement: bytes) -> RenewalAnswer:
        """A certificate for the key of this request; raises what the coordinator says, Unreachable, MalformedMessage."""
        who = self._credentials
        request = renewal_request(federation=who.federation, silo=who.silo, csr_der=csr_der, endorsement=endorsement)
        try:
            async with self._wire.used() as wire:
                return renewal_from_wire(await wire.stub.RenewCertificate(request, timeout=CALL_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error

    async def fetch_groups(self, after: int, *, held: Sequence[SignedLink] = ()) -> GroupsOffer:
        """Release groups from number `after` on, and what is proposed; raises what the coordinator says, Unreachable, MalformedMessage.

        `held` are given to a coordinator that does not have them any more.
        """
        request = federation_pb2.GroupsRequest(key=self._key(), after=after, held=held_to_wire(held))
        try:
            async with self._wire.used() as wire:
                reply = await wire.stub.FetchGroups(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        return offer_from_wire(reply, self._credentials.federation)

    async def sign_groups(self, link: bytes, signature: bytes) -> None:
        """This silo's signature under release groups; raises what the coordinator says, Unreachable."""
        request = federation_pb2.SignGroupsRequest(key=self._key(), groups=link, signature=signature)
        try:
            async with self._wire.used() as wire:
                await wire.stub.SignGroups(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error

    async def succeed_identity(self, succession: Succession, possession: bytes) -> None:
        """Have the coordinator take the successor for this silo's identity key; raises what it says."""
        who = self._credentials
        request = succession_request(
            federation=who.federation, silo=who.silo, succession=succession, possession=possession
        )

        async def attempt(wire: Wire) -> None:
            await wire.stub.SucceedIdentity(request, timeout=CALL_TIMEOUT_S)

        await self._until_answered(attempt)

    # ---- trying again -------------------------------------------------------------------------------------------

    async def _until_taken(self, word: Callable[[Wire], Awaitable[T]]) -> T:
        """`word` said until the coordinator has it, or says that it wants it no more: a LoricaError."""
        return await self._until_answered(word, passes=(*_PASSES, StorageError))

    async def _until_answered(
        self, attempt: Callable[[Wire], Awaitable[T]], *, passes: tuple[type[LoricaError], ...] = _PASSES
    ) -> T:
        """`attempt` over the channel of that moment, and over it alone: a transfer ends where it began."""
        backoff = self._new_backoff()
        while True:
            began = time.monotonic()
            try:
                async with self._wire.used() as wire:
                    return await attempt(wire)
            except grpc.aio.AioRpcError as error:
                problem = error_of(error)
            except Unreachable as error:
                problem = error
            if not isinstance(problem, passes):
                raise problem
            if time.monotonic() - began > CALL_TIMEOUT_S:
                backoff.reset()  # it worked for a while
            await self._wait(problem, backoff)

    async def _wait(self, problem: LoricaError, backoff: Backoff) -> None:
        seconds = backoff.wait_s()
        expired = Window.of(self._credentials.certificate).problem_at(datetime.now(UTC))
        if expired is not None and isinstance(problem, Unreachable):  # who refuses the handshake for that says less
            problem = Unreachable(f"this silo's certificate {expired} ({problem})")
        self._unreachable(problem, seconds)
        await asyncio.sleep(seconds)

    def _key(self, plan: Digest | None = None) -> common_pb2.CallKey:
        return call_key(
            federation=self._credentials.federation,
            silo=self._credentials.silo,
            plan=NO_DIGEST if plan is None else plan,
        )


class _Attending:
    """One stream of orders, over one channel."""

    def __init__(self, wire: Wire, request: federation_pb2.AttendRequest) -> None:
        self._wire = wire
        self._lease = wire.lease()
        self._call = wire.stub.Attend(request)
        self._reading: asyncio.Task[federation_pb2.Notice | None] | None = None
        self.moved_on = False

    async def next(self) -> federation_pb2.Notice | None:
        """None when the coordinator has ended the stream, and once newer calls go over another channel (`moved_on`)."""
        self._reading = asyncio.create_task(self._read())
        moving = asyncio.create_task(self._wire.superseded.wait())
        try:
            await asyncio.wait({self._reading, moving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moving.cancel()
        if not self._reading.done():  # not cancelled: that would end the call, and with it this silo's seat
            self.moved_on = True
            return None
        notice, self._reading = self._reading.result(), None
        return notice

    async def _read(self) -> federation_pb2.Notice | None:
        notice = await self._call.read()
        return notice if isinstance(notice, federation_pb2.Notice) else None

    async def end(self) -> None:
        self._call.cancel()
        if self._reading is not None:
            await asyncio.wait({self._reading})
            if not self._reading.cancelled():
                self._reading.exception()
        self._lease.release()


_parse_piece = reader(federation_pb2.ModelPiece)


def _read_piece(raw: bytes) -> federation_pb2.ModelPiece | ChunkPiece:
    try:
        return _parse_piece(raw)
    except DecodeError as error:
        raise MalformedMessage(f"the coordinator sends a piece of {len(raw)} bytes that does not parse") from error


def _read_chunk(raw: bytes) -> ChunkPiece:
    piece = _read_piece(raw)
    if not isinstance(piece, ChunkPiece):
        raise MalformedMessage("the coordinator sends something else than a chunk in the place of one")
    return piece


def _as_it_came(chunk: common_pb2.Chunk) -> common_pb2.Chunk:
    return chunk


async def _pieces(
    header: federation_pb2.UpdatePiece,
    manifest: Manifest,
    file: Path,
    mark: FileMark | None,
    first: int,
    progress: Progress,
    sent: Callable[[int], None],
) -> AsyncIterator[federation_pb2.UpdatePiece | bytes]:
    """The header and every chunk from `first` on; the next few are read while these are sent, and `sent` hears of their bytes."""
    yield header
    step = max(1, BATCH_BYTES // manifest.chunk_bytes)

    def read_from(index: int) -> "asyncio.Task[list[bytes]]":
        indices = range(index, min(index + step, manifest.chunks))
        return _in_thread(lambda: _read_pieces(file, manifest, mark, indices))

    ahead = read_from(first)
    for begin in range(first, manifest.chunks, step):
        pieces = await ahead
        ahead = read_from(begin + step)
        for index, piece in enumerate(pieces, begin):
            yield piece
            sent(manifest.chunk_size(index))
            progress((index + 1) / manifest.chunks)


def _verdicts(reply: federation_pb2.VerdictsReply) -> tuple[Verdict, ...]:
    if len(reply.verdicts) > MAX_COHORT:
        raise MalformedMessage(f"{len(reply.verdicts)} verdicts came: at most {MAX_COHORT} are allowed")
    return tuple(map(verdict_from_wire, reply.verdicts))


def _read_pieces(file: Path, manifest: Manifest, mark: FileMark | None, indices: range) -> list[bytes]:
    """Chunks as they were when their manifest was made: the same bytes or none. Checked unless the file is as marked."""
    if not indices:
        return []
    pieces = []
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            known = FileMark.of(descriptor) == mark
            for index in indices:
                data = os.pread(descriptor, manifest.chunk_size(index), index * manifest.chunk_bytes)
                if not known:
                    manifest.check_chunk(index, data)
                pieces.append(chunk_piece(index, data))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror}") from error
    return pieces


def _in_thread(work: Callable[[], T]) -> "asyncio.Task[T]":
    """`work` in another thread, from now on; nobody has to await it."""
    task = asyncio.create_task(asyncio.to_thread(work))
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task
