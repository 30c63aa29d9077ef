"""The coordinator's side of the wire, written by hand for tests of the agent: honest unless a test makes it hostile.

A real gRPC server over mutual TLS. It takes no decision: the test gives the standing order, to all silos or to one, and
awaits what comes in.
"""

# ruff: noqa: N802 - the service's methods are named as in the .proto

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from types import TracebackType
from typing import Any, NoReturn, Self

import grpc
import grpc.aio
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from lorica_security.audit.chain import Head
from lorica_security.audit.signed_head import SignedHead
from lorica_security.errors import LoricaError, Unreachable
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity.endorsement import check_endorsement
from lorica_security.identity.identity_key import new_identity_key, public_key_bytes, sign
from lorica_security.pki.authority import Authority
from lorica_security.pki.csr import check_request
from lorica_security.pki.tls_key import new_tls_key, tls_key_to_pem
from lorica_security.pki.trust_bundle import TrustBundle
from lorica_security.secure_aggregation.messages import MaskedInput
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_wire.canonical import Digest, digest_from_wire, digest_of
from silo_wire.codecs import common_codec, orders_codec, updates_codec
from silo_wire.codecs.groups_codec import GroupsOffer, offer_to_wire
from silo_wire.codecs.ledger_receipt import (
    LEDGER_DOMAIN,
    LedgerReceipt,
    head_from_wire,
    ledger_statement,
    receipt_to_wire,
)
from silo_wire.codecs.masked_orders_codec import mask_answer_from_wire, masked_header_from_wire
from silo_wire.codecs.update_receipt import RECEIPT_DOMAIN, UpdateReceipt, coordinator_uri
from silo_wire.codecs.update_receipt import receipt_to_wire as receipt_to_wire_of_update
from silo_wire.manifest import Layout, Manifest, TensorSpec, manifest_of
from silo_wire.messages import (
    DeclineReason,
    Evaluation,
    MaskAnswer,
    MaskedHeader,
    ModelHeader,
    Order,
    RoundKey,
    Standby,
    StandbyReason,
    UpdateHeader,
)
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.statements import MODEL_DOMAIN, model_statement
from silo_wire.transport import SERVER_OPTIONS, status_of
from silo_wire.v1 import common_pb2, enrolment_pb2, enrolment_pb2_grpc, federation_pb2, federation_pb2_grpc

FEDERATION = FederationName("test-net")
SILO = SiloName("hospital-a")


@dataclass(frozen=True, slots=True)
class TestNet:
    """A federation's keys and certificates, made now."""

    __test__ = False

    authority: Authority
    coordinator_key: Ed25519PrivateKey
    server_pair: tuple[bytes, bytes]

    @classmethod
    def create(cls, federation: FederationName = FEDERATION, *, age: timedelta = timedelta(0)) -> "TestNet":
        """The CA was made `age` ago, the coordinator's certificate now."""
        now = datetime.now(UTC) - age
        authority = Authority.create(federation, now=now)
        return cls(authority, new_identity_key(), tls_pair(authority, Identity(federation, Role.COORDINATOR)))

    def credentials(self, address: str, silo: SiloName = SILO, *, age: timedelta = timedelta(0)) -> SiloCredentials:
        """Those of a silo that was enrolled `age` ago, for 7 days."""
        tls_key = new_tls_key()
        identity = Identity(self.authority.federation, Role.SILO, silo)
        return SiloCredentials(
            federation=self.authority.federation,
            silo=silo,
            address=address,
            identity_key=new_identity_key(),
            tls_key=tls_key,
            certificate=self.authority.issue(tls_key.public_key(), identity, now=datetime.now(UTC) - age),
            trust=TrustBundle((self.authority.certificate,)),
            coordinator_key=self.coordinator_key.public_key(),
        )


def tls_pair(authority: Authority, identity: Identity) -> tuple[bytes, bytes]:
    """Private key and certificate in PEM."""
    key = new_tls_key()
    certificate = authority.issue(key.public_key(), identity, now=datetime.now(UTC))
    return tls_key_to_pem(key), certificate.public_bytes(Encoding.PEM)


def small_bundle(*, elements: int = 1000, federation: str = FEDERATION, **sections: Any) -> PlanBundle:
    """A plan around a layout of `elements` float32 numbers, for tests that need no T5."""
    layout = Layout("float32", (TensorSpec("w", (elements,)),))
    files = {"config.json": b"{}", "layout.json": layout.to_json()}
    plan = Plan.model_validate(
        {
            "name": "small",
            "federation": federation,
            "model": {
                "source": "size:test",
                "parameters": elements,
                "layout": layout.digest,
                "initial": manifest_of(layout, [vector_of(layout, 0)], 1024).digest,
                "initial_bfloat16": manifest_of(
                    layout.as_type("bfloat16"), [vector_of(layout.as_type("bfloat16"), 0)], 1024
                ).digest,
                "files": {name: digest_of(content) for name, content in files.items()},
            },
            "schedule": {"rounds": 3, "min_silos": 1},
            **sections,
        }
    )
    return PlanBundle(plan, files)


def vector_of(layout: Layout, number: int) -> bytes:
    """Bytes that differ from chunk to chunk and from `number` to `number`."""
    places = np.arange(layout.parameters, dtype=np.uint64)
    pattern = (places * np.uint64(2654435761) + np.uint64(number)) & np.uint64(0xFFFFFF)
    return pattern.astype("<u4").tobytes()[: layout.total_bytes]


@dataclass(frozen=True, slots=True)
class OfferedModel:
    data: bytes
    header: ModelHeader

    @property
    def digest(self) -> Digest:
        return self.header.manifest.digest


@dataclass(slots=True)
class Received:
    chunks: dict[int, bytes] = field(default_factory=dict)
    committed: bool = False

    @property
    def data(self) -> bytes:
        return b"".join(self.chunks[index] for index in sorted(self.chunks))


@dataclass(slots=True, kw_only=True)
class ReceivedUpdate(Received):
    """A delta as it is."""

    header: UpdateHeader


@dataclass(slots=True, kw_only=True)
class ReceivedMasked(Received):
    header: MaskedHeader


class _Keeping(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc's types have no base here
    """Keeps the bytes of every message and of what a call says in its headers, before anything reads them."""

    def __init__(self, raw: list[tuple[str, bytes]]) -> None:
        self._raw = raw

    async def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Any:
        handler = await continuation(details)
        method = details.method
        for key, value in details.invocation_metadata or ():
            self._raw.append((method, f"{key}: {value}".encode()))
        read = handler.request_deserializer

        def kept(message: bytes) -> Any:
            self._raw.append((method, message))
            return read(message)

        return handler._replace(request_deserializer=kept)


class Lost(Enum):
    """Where the line is cut while a word is under way: before the coordinator has it, or before the agent knows that it
    has."""

    BEFORE = "before"
    AFTER = "after"


class _Losing(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc's types have no base here
    """Lets words be lost or refused, each as its method's fates say in turn; then they are taken."""

    def __init__(self, fates: dict[str, list[Lost | LoricaError]]) -> None:
        self._fates = fates

    async def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Any:
        handler = await continuation(details)
        fates = self._fates.get(details.method.rpartition("/")[2])
        if not fates:
            return handler
        taken, fate = handler.unary_unary, fates.pop(0)

        async def lost(request: Any, context: Any) -> NoReturn:
            if fate is Lost.AFTER:
                await taken(request, context)
            await abort(context, fate if isinstance(fate, LoricaError) else Unreachable("the line is cut"))

        return handler._replace(unary_unary=lost)


class FederationPeer(federation_pb2_grpc.FederationServicer):
    """`async with FederationPeer(net) as peer`. What comes in is in its lists; `until` awaits a change of them."""

    def __init__(self, net: TestNet) -> None:
        self._net = net
        self._changed = asyncio.Condition()
        self._standing: Order = Standby(StandbyReason.NO_PLAN)
        self._standing_of: dict[SiloName, Order] = {}
        self._orders: Counter[SiloName | None] = Counter()  # given so far to one silo; None: to all
        self._server: grpc.aio.Server | None = None
        self._cuts = 0
        self.port = 0
        self.bundles: dict[Digest, PlanBundle] = {}
        self.models: dict[Digest, OfferedModel] = {}
        self.instances: list[bytes] = []
        self.readiness: list[tuple[Digest, bool, str]] = []
        self.declined: list[tuple[RoundKey, DeclineReason, str]] = []
        self.groups_offer = GroupsOffer(links=(), proposed=None, identities=())
        self.group_signatures: list[tuple[str, bytes, bytes]] = []
        self.declined_by: dict[SiloName, list[tuple[RoundKey, DeclineReason, str]]] = defaultdict(list)
        self.trained: list[tuple[SiloName, RoundKey, Digest]] = []
        self.answers: list[tuple[SiloName, MaskAnswer | MaskedInput]] = []
        self.masked: dict[Digest, ReceivedMasked] = {}
        self.updates: dict[Digest, ReceivedUpdate] = {}
        self.evaluations: list[tuple[RoundKey, Evaluation]] = []
        self.progress: list[tuple[RoundKey, str, float]] = []
        self.ledger_reports: list[tuple[Head, Head]] = []  # the head, and after which
        self.ledger_heads: dict[SiloName, Head] = {}
        self.first_chunks: list[int] = []
        self.plan_fetches = 0
        self.raw: list[tuple[str, bytes]] = []  # every message as it came, with its method
        self.fates: dict[str, list[Lost | LoricaError]] = {}
        """What becomes of the next words, by method."""
        # What a hostile or unlucky coordinator does:
        self.change_bundle: Callable[[bytes], bytes] = lambda raw: raw
        self.endless_bundle = False
        self.change_header: Callable[[ModelHeader], ModelHeader] = lambda header: header
        self.change_chunk: Callable[[int, bytes], bytes] = lambda index, data: data
        self.cut_model_after = 0  # chunks, once
        self.cut_upload_after = 0  # chunks, once
        self.deaf = False  # to every upload after the cut
        self.refuse_attending: LoricaError | None = None
        self.refuse_upload: LoricaError | None = None
        self.change_receipt: Callable[[LedgerReceipt], LedgerReceipt] = lambda receipt: receipt
        self.change_update_receipt: Callable[[UpdateReceipt], UpdateReceipt] = lambda receipt: receipt
        self.receipts_lost = 0  # so many answers never arrive
        self.raw_notices: list[federation_pb2.Notice] = []
        self.change_notice: Callable[[SiloName, federation_pb2.Notice], federation_pb2.Notice] = lambda silo, it: it
        self.unheard: Callable[[MaskAnswer | MaskedInput], bool] = lambda answer: (
            False
        )  # it came, and is never acknowledged

    # ---- what a test does ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.listen(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def listen(self, port: int) -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(_Keeping(self.raw), _Losing(self.fates)))
        federation_pb2_grpc.add_FederationServicer_to_server(self, server)
        root = self._net.authority.certificate_pem()
        tls = grpc.ssl_server_credentials([self._net.server_pair], root_certificates=root, require_client_auth=True)
        self.port = server.add_secure_port(f"127.0.0.1:{port}", tls)
        await server.start()
        self._server = server

    async def close(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def order(self, order: Order, *silos: SiloName) -> None:
        """The standing order of these silos from now on; of all, whatever they had, when none is named."""
        if not silos:
            self._standing = order
            self._standing_of.clear()
            self._orders[None] += 1
        for silo in silos:
            self._standing_of[silo] = order
            self._orders[silo] += 1
        await self._note()

    async def until(self, holds: Callable[[], bool], *, within_s: float = 90.0) -> None:
        """Until the test's condition on what came in holds."""
        async with self._changed:
            async with asyncio.timeout(within_s):
                await self._changed.wait_for(holds)

    def offer(
        self,
        bundle: PlanBundle,
        data: bytes,
        *,
        made_by: int = 0,
        chunk_bytes: int = 1024,
        key: Ed25519PrivateKey | None = None,
    ) -> OfferedModel:
        """A signed model that FetchModel hands out."""
        manifest = manifest_of(bundle.layout, [data], chunk_bytes)
        header = self.signed(bundle.plan.digest, manifest, made_by, key=key)
        model = OfferedModel(data, header)
        self.models[model.digest] = model
        self.bundles[bundle.plan.digest] = bundle
        return model

    def signed(
        self, plan: Digest, manifest: Manifest, made_by: int, *, key: Ed25519PrivateKey | None = None
    ) -> ModelHeader:
        statement = model_statement(
            federation=self._net.authority.federation, plan=plan, round_number=made_by, model=manifest.digest
        )
        signature = sign(key or self._net.coordinator_key, domain=MODEL_DOMAIN.encode(), payload=statement)
        return ModelHeader(manifest=manifest, round=made_by, signature=signature)

    async def cut_streams(self) -> None:
        """Break every Attend stream, as a failing network would."""
        self._cuts += 1
        await self._note()

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ---- the service --------------------------------------------------------------------------------------------

    async def Attend(self, request: federation_pb2.AttendRequest, context: Any) -> AsyncIterator[federation_pb2.Notice]:
        if self.refuse_attending is not None:
            await abort(context, self.refuse_attending)
        self.instances.append(request.agent_instance)
        await self._note()
        for notice in self.raw_notices:
            yield notice
        self.raw_notices = []
        silo = SiloName(request.key.silo)
        number, cuts = -1, self._cuts
        while True:
            number = await self._order_after(silo, number, cuts)
            if self._cuts != cuts:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")
            order = self._standing_of.get(silo, self._standing)
            yield self.change_notice(silo, orders_codec.order_to_wire(order, silo))

    async def _order_after(self, silo: SiloName, number: int, cuts: int) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self._given(silo) > number or self._cuts != cuts)
            return self._given(silo)

    def _given(self, silo: SiloName) -> int:
        return self._orders[None] + self._orders[silo]

    async def FetchPlan(
        self, request: federation_pb2.FetchPlanRequest, context: Any
    ) -> AsyncIterator[common_pb2.Chunk]:
        self.plan_fetches += 1
        index = 0
        while self.endless_bundle:
            yield common_pb2.Chunk(index=index, data=bytes(4 << 20))
            index += 1
        raw = self.change_bundle(self.bundles[digest_from_wire(request.key.plan_digest, "plan")].encode())
        for index, start in enumerate(range(0, len(raw), 1000)):
            yield common_pb2.Chunk(index=index, data=raw[start : start + 1000])

    async def DeclareReadiness(self, request: federation_pb2.ReadinessRequest, context: Any) -> federation_pb2.Ack:
        self.readiness.append((digest_from_wire(request.key.plan_digest, "plan"), request.ready, request.reason))
        await self._note()
        return federation_pb2.Ack()

    async def FetchModel(
        self, request: federation_pb2.FetchModelRequest, context: Any
    ) -> AsyncIterator[federation_pb2.ModelPiece]:
        self.first_chunks.append(request.first_chunk)
        model = self.models[digest_from_wire(request.model_digest, "model")]
        manifest = model.header.manifest
        yield federation_pb2.ModelPiece(header=updates_codec.model_header_to_wire(self.change_header(model.header)))
        for sent, index in enumerate(range(request.first_chunk, manifest.chunks), 1):
            data = model.data[index * manifest.chunk_bytes : (index + 1) * manifest.chunk_bytes]
            yield federation_pb2.ModelPiece(chunk=common_pb2.Chunk(index=index, data=self.change_chunk(index, data)))
            if self.cut_model_after and sent == self.cut_model_after:
                self.cut_model_after = 0
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")

    async def UploadOffset(
        self, request: federation_pb2.UploadOffsetRequest, context: Any
    ) -> federation_pb2.UploadOffsetReply:
        digest = digest_from_wire(request.update_digest, "update")
        held = self.updates.get(digest) or self.masked.get(digest)
        if held is None:
            return federation_pb2.UploadOffsetReply(chunks=0, committed=False)
        return federation_pb2.UploadOffsetReply(chunks=len(held.chunks), committed=held.committed)

    async def UploadUpdate(
        self, request_iterator: AsyncIterator[federation_pb2.UpdatePiece], context: Any
    ) -> federation_pb2.UpdateReceipt:
        if self.deaf and not self.cut_upload_after:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "nobody listens")
        held: ReceivedUpdate | ReceivedMasked | None = None
        sent = 0
        async for piece in request_iterator:
            if piece.WhichOneof("piece") != "chunk":
                held = self._announced(piece)
                if self.refuse_upload is not None:
                    await abort(context, self.refuse_upload)
                assert held.header.first_chunk == len(held.chunks)
                await context.send_initial_metadata(())
            else:
                assert held is not None
                try:
                    held.header.manifest.check_chunk(piece.chunk.index, piece.chunk.data)
                except LoricaError as error:
                    await abort(context, error)
                held.chunks[piece.chunk.index] = piece.chunk.data
                sent += 1
                if self.cut_upload_after and sent == self.cut_upload_after:
                    self.cut_upload_after = 0
                    await self._note()
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")
        assert held is not None
        assert len(held.chunks) == held.header.manifest.chunks
        held.committed = True
        if isinstance(held, ReceivedMasked):
            await self._answered(held.header.masked.silo, held.header.masked)
        await self._note()
        return receipt_to_wire_of_update(self.change_update_receipt(self.update_receipt(held.header)))

    def update_receipt(self, header: UpdateHeader | MaskedHeader) -> UpdateReceipt:
        """As an honest coordinator signs it, whose log has as many entries as updates are held."""
        assert header.log is not None
        silo = SiloName(header.log.writer.rpartition("/")[2])
        entries = len(self.updates) + len(self.masked)
        writer = coordinator_uri(self._net.authority.federation)
        head = SignedHead.sign(
            self._net.coordinator_key, writer=writer, head=Head(entries, digest_of(bytes([entries])))
        )
        receipt = UpdateReceipt(
            key=header.key,
            silo=silo,
            update=header.manifest.digest,
            total_bytes=header.manifest.total_bytes,
            shown=header.log.head,
            head=head,
            signature=bytes(64),
        )
        return self.signed_receipt(receipt)

    def signed_receipt(self, receipt: UpdateReceipt) -> UpdateReceipt:
        return replace(
            receipt,
            signature=sign(self._net.coordinator_key, domain=RECEIPT_DOMAIN.encode(), payload=receipt.statement),
        )

    def _announced(self, piece: federation_pb2.UpdatePiece) -> ReceivedUpdate | ReceivedMasked:
        """What was received of it before, under the header that came now."""
        if piece.WhichOneof("piece") == "masked":
            masked = masked_header_from_wire(piece.masked)
            of_mask = self.masked.setdefault(masked.manifest.digest, ReceivedMasked(header=masked))
            of_mask.header = masked
            return of_mask
        header = updates_codec.update_header_from_wire(piece.header)
        held = self.updates.setdefault(header.manifest.digest, ReceivedUpdate(header=header))
        held.header = header
        return held

    async def DeclareTrained(self, request: federation_pb2.TrainedReport, context: Any) -> federation_pb2.Ack:
        key, model = common_codec.round_key_from_wire(request.key), digest_from_wire(request.model_digest, "model")
        self.trained.append((SiloName(request.key.silo), key, model))
        await self._note()
        return federation_pb2.Ack()

    async def AnswerMask(self, request: federation_pb2.MaskAnswer, context: Any) -> federation_pb2.Ack:
        await self._answered(SiloName(request.key.silo), mask_answer_from_wire(request))
        return federation_pb2.Ack()

    async def _answered(self, silo: SiloName, answer: MaskAnswer | MaskedInput) -> None:
        self.answers.append((silo, answer))
        await self._note()
        if self.unheard(answer):
            await asyncio.Event().wait()  # until the call is cancelled

    async def DeclineRound(self, request: federation_pb2.DeclineRequest, context: Any) -> federation_pb2.Ack:
        reason = updates_codec.decline_reason_from_wire(request.reason)
        declined = common_codec.round_key_from_wire(request.key), reason, request.detail
        self.declined.append(declined)
        self.declined_by[SiloName(request.key.silo)].append(declined)
        await self._note()
        return federation_pb2.Ack()

    async def ReportProgress(self, request: federation_pb2.ProgressReport, context: Any) -> federation_pb2.Ack:
        phase = updates_codec.phase_from_wire(request.phase)
        self.progress.append((common_codec.round_key_from_wire(request.key), phase.value, request.fraction))
        await self._note()
        return federation_pb2.Ack()

    async def FetchGroups(self, request: federation_pb2.GroupsRequest, context: Any) -> federation_pb2.GroupsReply:
        return offer_to_wire(self.groups_offer)

    async def SignGroups(self, request: federation_pb2.SignGroupsRequest, context: Any) -> federation_pb2.Ack:
        self.group_signatures.append((request.key.silo, request.groups, request.signature))
        return federation_pb2.Ack()

    async def CountersignLedger(
        self, request: federation_pb2.LedgerReport, context: Any
    ) -> federation_pb2.LedgerReceipt:
        head, after = head_from_wire(request.head, "head"), head_from_wire(request.after, "after")
        silo = SiloName(request.key.silo)
        known = self.ledger_heads.get(silo)
        if known is None or (known == after and known.sequence < head.sequence):
            self.ledger_heads[silo] = head
        self.ledger_reports.append((head, after))
        await self._note()
        if self.receipts_lost:
            self.receipts_lost -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")
        return receipt_to_wire(self.change_receipt(self.receipt(self.ledger_heads[silo], silo)))

    def receipt(self, head: Head, silo: SiloName = SILO) -> LedgerReceipt:
        statement = ledger_statement(federation=self._net.authority.federation, silo=silo, head=head)
        signature = sign(self._net.coordinator_key, domain=LEDGER_DOMAIN.encode(), payload=statement)
        return LedgerReceipt(newest=head, signature=signature)

    async def ReportEvaluation(self, request: federation_pb2.EvaluationReport, context: Any) -> federation_pb2.Ack:
        self.evaluations.append(
            (common_codec.round_key_from_wire(request.key), updates_codec.evaluation_from_wire(request))
        )
        await self._note()
        return federation_pb2.Ack()


async def abort(context: Any, error: LoricaError) -> NoReturn:
    await context.abort(*status_of(error))
    raise AssertionError("abort returned")


class EnrolmentPeer(enrolment_pb2_grpc.EnrolmentServicer):
    """The enrolment listener: `async with EnrolmentPeer(net) as peer`. `requests` holds every secret that reached
    it."""

    def __init__(self, net: TestNet, *, address: str = "127.0.0.1:1") -> None:
        self._net = net
        self._address = address
        self._server: grpc.aio.Server | None = None
        self.port = 0
        self.requests: list[enrolment_pb2.EnrolRequest] = []
        self.bundle = net.authority.certificate_pem()
        self.issue_for: Identity | None = None
        self.issue_other_key = False
        self.refuse: LoricaError | None = None

    async def __aenter__(self) -> Self:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        enrolment_pb2_grpc.add_EnrolmentServicer_to_server(self, server)
        self.port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([self._net.server_pair]))
        await server.start()
        self._server = server
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def GetTrustBundle(
        self, request: enrolment_pb2.GetTrustBundleRequest, context: Any
    ) -> enrolment_pb2.GetTrustBundleReply:
        return enrolment_pb2.GetTrustBundleReply(trust_bundle_pem=self.bundle)

    async def Enrol(self, request: enrolment_pb2.EnrolRequest, context: Any) -> enrolment_pb2.EnrolReply:
        self.requests.append(request)
        if self.refuse is not None:
            await abort(context, self.refuse)
        identity = Identity(self._net.authority.federation, Role.SILO, request.silo)
        public_key = check_request(request.csr_der, identity)
        check_endorsement(
            request.identity_public_key,
            request=request.csr_der,
            identity=identity,
            signature=request.identity_endorsement,
        )
        certificate = self._net.authority.issue(
            new_tls_key().public_key() if self.issue_other_key else public_key,
            self.issue_for or identity,
            now=datetime.now(UTC),
        )
        return enrolment_pb2.EnrolReply(
            certificate_pem=certificate.public_bytes(Encoding.PEM),
            trust_bundle_pem=self.bundle,
            coordinator_identity_key=public_key_bytes(self._net.coordinator_key.public_key()),
            address=self._address,
        )
