"""The Federation service over gRPC: messages in, values to the service, values out. No decision is made here."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from lorica_coordinator.edges.server.places import Places
from lorica_coordinator.edges.telemetry.caller import CALLER
from lorica_coordinator.service.federation import Federation
from lorica_security.errors import AuthorisationError, MalformedMessage
from lorica_security.host.software_version import software_version
from lorica_security.identifiers import FederationName, SiloName
from silo_wire import wire_version
from silo_wire.canonical import Digest, digest_from_wire
from silo_wire.codecs import (
    common_codec,
    groups_codec,
    ledger_receipt,
    masked_orders_codec,
    orders_codec,
    secure_codec,
    update_receipt,
    updates_codec,
)
from silo_wire.codecs.chunk_piece import ChunkPiece, chunk_piece, reader, write
from silo_wire.codecs.renewal import succession_from_wire
from silo_wire.manifest import CHUNK_BYTES
from silo_wire.messages import HeldPieces, MaskedHeader, UpdateHeader
from silo_wire.transport import give_memory_back
from silo_wire.v1 import common_pb2, federation_pb2, federation_pb2_grpc
from silo_wire.wire_version import Speaker, require_compatible

INSTANCE_BYTES = 16
SERVICE = federation_pb2.DESCRIPTOR.services_by_name["Federation"].full_name

Sent = TypeVar("Sent")


class FederationServicer(federation_pb2_grpc.FederationServicer):
    """What silos call. `on_sent` and `on_received` are told the bytes of chunks; of one that is sent, before it is: a
    silo that has all it wants hangs up, and nothing that follows the last chunk is sure to run."""

    def __init__(
        self,
        service: Federation,
        federation: FederationName,
        *,
        on_sent: Callable[[int], None],
        on_received: Callable[[int], None],
    ) -> None:
        self._service = service
        self._federation = federation
        self._on_sent = on_sent
        self._on_received = on_received
        self._places = Places(tidy=give_memory_back)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`; the transfers of chunks read and write them without protobuf's copies."""
        federation_pb2_grpc.add_FederationServicer_to_server(self, server)
        transfers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "FetchModel": grpc.unary_stream_rpc_method_handler(
                self.FetchModel,
                request_deserializer=federation_pb2.FetchModelRequest.FromString,
                response_serializer=write,
            ),
            "FetchPieces": grpc.unary_stream_rpc_method_handler(
                self.FetchPieces,
                request_deserializer=federation_pb2.PiecesRequest.FromString,
                response_serializer=write,
            ),
            "UploadUpdate": grpc.stream_unary_rpc_method_handler(
                self.UploadUpdate,
                request_deserializer=reader(federation_pb2.UpdatePiece),
                response_serializer=federation_pb2.UpdateReceipt.SerializeToString,
            ),
        }
        server.add_registered_method_handlers(SERVICE, transfers)

    @property
    def transfers(self) -> int:
        """Models and updates that are on their way now."""
        return self._places.under_way

    def _caller(self, key: common_pb2.CallKey) -> SiloName:
        """The verified certificate's silo, if enrolled; raises AuthorisationError when the message claims another."""
        silo = SiloName(CALLER.get().name)
        if key.silo != silo:
            raise AuthorisationError(
                f"the certificate is of silo {silo} and the call names {key.silo[:80]!r}: only your own is served"
            )
        if key.federation != self._federation:
            raise AuthorisationError(f"the call names federation {key.federation[:80]!r}, this is {self._federation}")
        self._service.require_enrolled(silo)
        return silo

    async def Attend(self, request: federation_pb2.AttendRequest, context: Any) -> AsyncIterator[federation_pb2.Notice]:
        silo = self._caller(request.key)
        speaker = Speaker.from_wire(request.agent_version, major=request.wire_version, minor=request.wire_minor)
        require_compatible(agent=speaker.wire, coordinator=wire_version.OURS, silo=silo)
        if len(request.agent_instance) != INSTANCE_BYTES:
            raise MalformedMessage(
                f"agent_instance has {len(request.agent_instance)} bytes, it must have {INSTANCE_BYTES}"
            )
        plan = digest_from_wire(request.key.plan_digest, "plan_digest") if request.key.plan_digest else Digest("")
        async with aclosing(self._service.attend(silo, request.agent_instance, plan, speaker)) as orders:
            async for order in orders:
                notice = orders_codec.order_to_wire(order, silo)
                notice.trust_bundle = self._service.trust_digest
                notice.release_groups = self._service.groups.digest
                notice.wire_minor = wire_version.OURS.minor
                notice.coordinator_version = software_version()
                yield notice

    async def FetchPlan(
        self, request: federation_pb2.FetchPlanRequest, context: Any
    ) -> AsyncIterator[common_pb2.Chunk]:
        self._caller(request.key)
        bundle = await self._service.plan_bundle(digest_from_wire(request.key.plan_digest, "plan_digest"))
        for index, start in enumerate(range(0, len(bundle), CHUNK_BYTES)):
            data = bundle[start : start + CHUNK_BYTES]
            self._on_sent(len(data))
            yield common_pb2.Chunk(index=index, data=data)

    async def DeclareReadiness(self, request: federation_pb2.ReadinessRequest, context: Any) -> federation_pb2.Ack:
        silo = self._caller(request.key)
        await self._service.declare_readiness(
            silo,
            digest_from_wire(request.key.plan_digest, "plan_digest"),
            ready=request.ready,
            reason=common_codec.detail_from_wire(request.reason),
        )
        return federation_pb2.Ack()

    async def FetchModel(self, request: federation_pb2.FetchModelRequest, context: Any) -> AsyncIterator[Any]:
        self._caller(request.key)
        source = await self._service.model(
            digest_from_wire(request.key.plan_digest, "plan_digest"),
            digest_from_wire(request.model_digest, "model_digest"),
        )
        chunks = source.header.manifest.chunks
        if request.first_chunk > chunks:
            raise MalformedMessage(f"first_chunk is {request.first_chunk}, the model has {chunks} chunks")
        yield federation_pb2.ModelPiece(header=updates_codec.model_header_to_wire(source.header))
        async with self._places.place() as place:
            with source.reading():
                for index in range(request.first_chunk, chunks):
                    await place.keep()
                    piece = await source.piece(index)
                    place.moved_bytes += source.header.manifest.chunk_size(index)
                    self._on_sent(source.header.manifest.chunk_size(index))
                    with place.waiting_for_peer():
                        yield piece

    async def UploadOffset(
        self, request: federation_pb2.UploadOffsetRequest, context: Any
    ) -> federation_pb2.UploadOffsetReply:
        silo = self._caller(request.key)
        chunks, committed = await self._service.upload_offset(
            silo,
            common_codec.round_key_from_wire(request.key),
            digest_from_wire(request.update_digest, "update_digest"),
        )
        return federation_pb2.UploadOffsetReply(chunks=chunks, committed=committed)

    async def UploadUpdate(
        self, request_iterator: AsyncIterator[federation_pb2.UpdatePiece | ChunkPiece], context: Any
    ) -> federation_pb2.UpdateReceipt:
        pieces = aiter(request_iterator)
        first = await anext(pieces, None)
        if first is None or isinstance(first, ChunkPiece):
            raise MalformedMessage("an upload begins with its header")
        header: UpdateHeader | MaskedHeader
        match first.WhichOneof("piece"):
            case "header":
                silo = self._caller(first.header.key)
                header = updates_codec.update_header_from_wire(first.header)
            case "masked":
                silo = self._caller(first.masked.key)
                header = masked_orders_codec.masked_header_from_wire(first.masked)
            case _:
                raise MalformedMessage("an upload begins with its header")
        upload = await self._service.begin_update(silo, header)
        try:
            async with self._places.place() as place:
                await context.send_initial_metadata(())  # the silo sends no chunk before
                while (piece := await place.next(pieces)) is not None:
                    if not isinstance(piece, ChunkPiece):
                        raise MalformedMessage("after its header an upload holds chunks alone")
                    place.moved_bytes += len(piece.data)
                    await upload.write(piece.index, piece.data)
                    self._on_received(len(piece.data))
            receipt = await upload.commit()
        finally:
            await upload.close()
        return update_receipt.receipt_to_wire(receipt)

    async def DeclareTrained(self, request: federation_pb2.TrainedReport, context: Any) -> federation_pb2.Ack:
        silo = self._caller(request.key)
        await self._service.declare_trained(
            silo, common_codec.round_key_from_wire(request.key), digest_from_wire(request.model_digest, "model_digest")
        )
        return federation_pb2.Ack()

    async def AnswerMask(self, request: federation_pb2.MaskAnswer, context: Any) -> federation_pb2.Ack:
        silo = self._caller(request.key)
        await self._service.answer_mask(
            silo, common_codec.round_key_from_wire(request.key), masked_orders_codec.mask_answer_from_wire(request)
        )
        return federation_pb2.Ack()

    async def DeclineRound(self, request: federation_pb2.DeclineRequest, context: Any) -> federation_pb2.Ack:
        silo = self._caller(request.key)
        await self._service.decline(
            silo,
            common_codec.round_key_from_wire(request.key),
            updates_codec.decline_reason_from_wire(request.reason),
            common_codec.detail_from_wire(request.detail),
        )
        return federation_pb2.Ack()

    async def ReportProgress(self, request: federation_pb2.ProgressReport, context: Any) -> federation_pb2.Ack:
        silo = self._caller(request.key)
        self._service.report_progress(silo, updates_codec.phase_from_wire(request.phase), request.fraction)
        return federation_pb2.Ack()

    async def ReportEvaluation(self, request: federation_pb2.EvaluationReport, context: Any) -> federation_pb2.Ack:
        silo = self._caller(request.key)
        await self._service.report_evaluation(
            silo,
            common_codec.round_key_from_wire(request.key),
            digest_from_wire(request.model_digest, "model_digest"),
            updates_codec.evaluation_from_wire(request),
        )
        return federation_pb2.Ack()

    async def CountersignLedger(
        self, request: federation_pb2.LedgerReport, context: Any
    ) -> federation_pb2.LedgerReceipt:
        silo = self._caller(request.key)
        receipt = await self._service.countersign_ledger(
            silo,
            ledger_receipt.head_from_wire(request.head, "head"),
            after=ledger_receipt.head_from_wire(request.after, "after"),
        )
        return ledger_receipt.receipt_to_wire(receipt)

    async def FetchGroups(self, request: federation_pb2.GroupsRequest, context: Any) -> federation_pb2.GroupsReply:
        silo = self._caller(request.key)
        if request.held:
            await self._service.groups.take_back(silo, groups_codec.held_from_wire(request.held, self._federation))
        return groups_codec.offer_to_wire(await self._service.groups_offer(request.after))

    async def SignGroups(self, request: federation_pb2.SignGroupsRequest, context: Any) -> federation_pb2.Ack:
        silo = self._caller(request.key)
        await self._service.groups.sign(silo, request.groups, request.signature)
        return federation_pb2.Ack()

    async def FetchEvidence(
        self, request: federation_pb2.EvidenceRequest, context: Any
    ) -> AsyncIterator[common_pb2.Chunk]:
        self._caller(request.key)
        evidence = await self._service.evidence(
            digest_from_wire(request.key.plan_digest, "plan_digest"),
            digest_from_wire(request.model_digest, "model_digest"),
        )
        cut = (evidence[at : at + CHUNK_BYTES] for at in range(0, len(evidence), CHUNK_BYTES))
        async for chunk in self._sent(cut, lambda index, data: common_pb2.Chunk(index=index, data=data)):
            yield chunk

    async def FetchPieces(self, request: federation_pb2.PiecesRequest, context: Any) -> AsyncIterator[Any]:
        silo = self._caller(request.key)
        pieces = await self._service.pieces(
            digest_from_wire(request.key.plan_digest, "plan_digest"),
            digest_from_wire(request.model_digest, "model_digest"),
            request.chunk,
            HeldPieces(vector_of=silo if request.without_vector else None, master=request.without_master),
        )
        async for piece in self._sent(pieces, chunk_piece):
            yield piece

    async def _sent(self, pieces: Iterable[bytes], message: Callable[[int, bytes], Sent]) -> AsyncIterator[Sent]:
        async with self._places.place() as place:
            for index, piece in enumerate(pieces):
                await place.keep()
                place.moved_bytes += len(piece)
                self._on_sent(len(piece))
                with place.waiting_for_peer():
                    yield message(index, piece)

    async def ShareVerdict(self, request: federation_pb2.VerdictRequest, context: Any) -> federation_pb2.VerdictsReply:
        silo = self._caller(request.key)
        verdicts, known = await self._service.share_verdict(
            silo,
            digest_from_wire(request.key.plan_digest, "plan_digest"),
            digest_from_wire(request.model_digest, "model_digest"),
            secure_codec.verdict_from_wire(request.verdict),
            request.known,
        )
        return federation_pb2.VerdictsReply(verdicts=map(secure_codec.verdict_to_wire, verdicts), known=known)

    async def FetchVerdicts(
        self, request: federation_pb2.EvidenceRequest, context: Any
    ) -> federation_pb2.VerdictsReply:
        self._caller(request.key)
        verdicts = await self._service.verdicts(
            digest_from_wire(request.key.plan_digest, "plan_digest"),
            digest_from_wire(request.model_digest, "model_digest"),
        )
        return federation_pb2.VerdictsReply(verdicts=map(secure_codec.verdict_to_wire, verdicts))

    async def RenewCertificate(
        self, request: federation_pb2.RenewalRequest, context: Any
    ) -> federation_pb2.RenewalReply:
        silo = self._caller(request.key)
        renewed = await self._service.renewal.renew(
            silo, csr_der=request.csr_der, identity_endorsement=request.identity_endorsement
        )
        return federation_pb2.RenewalReply(
            certificate_pem=renewed.certificate_pem,
            trust_bundle_pem=renewed.trusted.pem,
            signature=renewed.signature,
            trusted_since=renewed.trusted.since,
        )

    async def SucceedIdentity(self, request: federation_pb2.SuccessionRequest, context: Any) -> federation_pb2.Ack:
        silo = self._caller(request.key)
        await self._service.renewal.succeed(silo, succession_from_wire(request.succession), request.possession)
        return federation_pb2.Ack()
