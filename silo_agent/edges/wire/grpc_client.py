"""The coordinator over mutual TLS: `CoordinatorPort`, for one silo."""

from collections.abc import Sequence

import grpc.aio

from lorica_security.audit.chain import Head
from lorica_security.identity.succession import Succession
from lorica_security.secure_aggregation.groups.release_groups import SignedLink
from silo_agent.edges.wire.calls.downloads import Downloads
from silo_agent.edges.wire.calls.evidence_calls import EvidenceCalls
from silo_agent.edges.wire.calls.order_stream import OrderStream
from silo_agent.edges.wire.calls.repeated_calls import CALL_TIMEOUT_S
from silo_agent.edges.wire.calls.uploads import Uploads
from silo_agent.edges.wire.connection import Wire
from silo_wire.canonical import Digest, digest_to_wire
from silo_wire.codecs.common_codec import detail_to_wire, round_call_key
from silo_wire.codecs.groups_codec import GroupsOffer, held_to_wire, offer_from_wire
from silo_wire.codecs.ledger_receipt import LedgerReceipt, receipt_from_wire, report_to_wire
from silo_wire.codecs.masked_orders_codec import mask_answer_to_wire
from silo_wire.codecs.renewal import RenewalAnswer, renewal_from_wire, renewal_request, succession_request
from silo_wire.codecs.updates_codec import decline_reason_to_wire, evaluation_to_wire, phase_to_wire
from silo_wire.messages import AgentPhase, DeclineReason, Evaluation, MaskAnswer, RoundKey
from silo_wire.transport import error_of
from silo_wire.v1 import federation_pb2


class GrpcCoordinator(OrderStream, Downloads, EvidenceCalls, Uploads):
    """`unreachable` hears of each failed try, with the seconds until the next."""

    async def declare_readiness(self, plan: Digest, *, ready: bool, reason: str) -> None:
        request = federation_pb2.ReadinessRequest(key=self._key(plan), ready=ready, reason=detail_to_wire(reason))
        await self._until_taken(lambda wire: wire.stub.DeclareReadiness(request, timeout=CALL_TIMEOUT_S))

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

    async def renew_certificate(self, csr_der: bytes, endorsement: bytes) -> RenewalAnswer:
        """A certificate for the key of this request; raises what the coordinator says, Unreachable,
        MalformedMessage."""
        who = self._credentials
        request = renewal_request(federation=who.federation, silo=who.silo, csr_der=csr_der, endorsement=endorsement)
        try:
            async with self._wire.used() as wire:
                return renewal_from_wire(await wire.stub.RenewCertificate(request, timeout=CALL_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error

    async def fetch_groups(self, after: int, *, held: Sequence[SignedLink] = ()) -> GroupsOffer:
        """Release groups from number `after` on, and what is proposed; raises what the coordinator says, Unreachable,
        MalformedMessage.

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
