"""The Operator service over gRPC, and the same replies for commands that run without a coordinator."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from blake3 import blake3

from lorica_coordinator.edges.keys.key_store import OPERATOR_NAME
from lorica_coordinator.edges.models.export_scratch import ExportScratch
from lorica_coordinator.edges.telemetry.caller import CALLER, CERTIFICATE
from lorica_coordinator.edges.upkeep.garbage import Garbage
from lorica_coordinator.service.federation import Federation
from lorica_coordinator.service.members.authority_succession import AuthorityRow, label
from lorica_coordinator.service.records import PresentPlan, RoundRow, SiloRow
from lorica_coordinator.service.views.standing import Standing
from lorica_security.errors import ConfigurationError, MalformedMessage, StateError
from lorica_security.host.software_version import software_version
from lorica_security.identifiers import Role
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES, check_bytes
from silo_wire import wire_version
from silo_wire.canonical import Digest, digest_to_wire
from silo_wire.codecs.groups_codec import groups_from_request, signed_groups_to_wire
from silo_wire.v1 import operator_pb2, operator_pb2_grpc

NO_DEADLINE = -1.0
NOT_EVALUATED = -1.0


PIECE_BYTES = 1 << 20
DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class OnThisHost:
    """What commands from elsewhere cannot know: how long things hold, where the coordinator is, how a model becomes a
    folder.

    `export` writes a model of a plan to a new folder; `scratch` is where such a folder may be until it is sent.
    `collect` lets go of what is needed no more, given the present plan, or with True tells what that would be.
    """

    invitation_s: float
    access_s: float
    address: str
    export: Callable[[Digest, Digest, Path], None]
    scratch: ExportScratch
    collect: Callable[[PresentPlan, bool], Sequence[Garbage]]


class OperatorServicer(operator_pb2_grpc.OperatorServicer):
    def __init__(self, service: Federation, host: OnThisHost) -> None:
        self._service = service
        self._host = host

    async def GetStatus(self, request: operator_pb2.GetStatusRequest, context: Any) -> operator_pb2.StatusReply:
        return status_reply(await self._service.status())

    async def ListRounds(self, request: operator_pb2.ListRoundsRequest, context: Any) -> operator_pb2.ListRoundsReply:
        rows = await self._service.rounds(request.last)
        return operator_pb2.ListRoundsReply(rounds=[round_record(row) for row in rows], score=self._service.score)

    async def Invite(self, request: operator_pb2.InviteRequest, context: Any) -> operator_pb2.InviteReply:
        valid = request.valid_seconds or int(self._host.invitation_s)
        token, expires = await self._service.enrolment.invite(request.silo, valid)
        await self._service.enrolment.until_listening(expires)
        return operator_pb2.InviteReply(token=token, expires_unix_s=expires)

    async def StartPlan(self, request: operator_pb2.StartPlanRequest, context: Any) -> operator_pb2.StartPlanReply:
        started = await self._service.start_plan(request.plan, leave=request.leave)
        return operator_pb2.StartPlanReply(
            plan_digest=digest_to_wire(started.plan), detail=started.waits_for, plan_name=started.name
        )

    async def StopPlan(self, request: operator_pb2.StopPlanRequest, context: Any) -> operator_pb2.StopPlanReply:
        return operator_pb2.StopPlanReply(detail=await self._service.stop_plan())

    async def PausePlan(self, request: operator_pb2.PausePlanRequest, context: Any) -> operator_pb2.PausePlanReply:
        return operator_pb2.PausePlanReply(detail=await self._service.pause_plan())

    async def ResumePlan(self, request: operator_pb2.ResumePlanRequest, context: Any) -> operator_pb2.ResumePlanReply:
        return operator_pb2.ResumePlanReply(detail=await self._service.resume_plan())

    async def Revoke(self, request: operator_pb2.RevokeRequest, context: Any) -> operator_pb2.RevokeReply:
        role = _role(request.role)
        _check_not_the_hosts_own(role, request.name)
        return operator_pb2.RevokeReply(detail=await self._service.revoke(role, request.name))

    async def GetGroups(self, request: operator_pb2.GetGroupsRequest, context: Any) -> operator_pb2.GroupsStanding:
        return self._groups_standing()

    async def ProposeGroups(
        self, request: operator_pb2.ProposeGroupsRequest, context: Any
    ) -> operator_pb2.GroupsStanding:
        await self._service.groups.propose(
            groups_from_request(request.groups),
            colluders=request.colluders if request.HasField("colluders") else None,
            smallest_group=request.smallest_group if request.HasField("smallest_group") else None,
        )
        return self._groups_standing()

    async def TakeGroupsBack(
        self, request: operator_pb2.TakeGroupsBackRequest, context: Any
    ) -> operator_pb2.GroupsStanding:
        check_bytes("release groups", DIGEST_BYTES, digest=request.digest)
        await self._service.groups.begin_with(request.digest)
        return self._groups_standing()

    def _groups_standing(self) -> operator_pb2.GroupsStanding:
        groups = self._service.groups
        standing, proposed = groups.standing, groups.proposed
        missing, needed = groups.waits_for()
        return operator_pb2.GroupsStanding(
            standing=None if standing is None else signed_groups_to_wire(standing),
            proposed=None if proposed is None else signed_groups_to_wire(proposed),
            missing=sorted(missing),
            needed=needed,
            standing_digest=b"" if standing is None else standing.link.digest,
            proposed_digest=b"" if proposed is None else proposed.link.digest,
        )

    async def GrantAccess(
        self, request: operator_pb2.GrantAccessRequest, context: Any
    ) -> operator_pb2.GrantAccessReply:
        role = _role(request.role)
        _check_not_the_hosts_own(role, request.name)
        if request.valid_seconds > self._host.access_s:
            raise ConfigurationError(
                f"access for {request.valid_seconds / DAY_S:.1f} days is asked for, and "
                f"certificates.access_lifetime_days of federation.toml is {self._host.access_s / DAY_S:g}: grant "
                f"fewer, or raise it"
            )
        granted = await self._service.grant(
            role,
            request.name,
            csr_der=request.csr_der,
            valid_s=request.valid_seconds or self._host.access_s,
        )
        return operator_pb2.GrantAccessReply(
            certificate_pem=granted.certificate_pem,
            trust_bundle_pem=granted.trusted.pem,
            address=self._host.address,
            coordinator_identity_key=self._service.enrolment.keys.identity_public_key,
        )

    async def RenewAccess(
        self, request: operator_pb2.RenewAccessRequest, context: Any
    ) -> operator_pb2.RenewAccessReply:
        caller = CALLER.get(None)
        if caller is None or (caller.role, caller.name) == (Role.OPERATOR, OPERATOR_NAME):
            raise ConfigurationError("the certificate of this coordinator's own host is renewed by itself")
        expires = CERTIFICATE.get().not_valid_after_utc.timestamp()
        renewed = await self._service.renewal.renew_access(caller, csr_der=request.csr_der, expires_unix_s=expires)
        return operator_pb2.RenewAccessReply(
            certificate_pem=renewed.certificate_pem,
            trust_bundle_pem=renewed.trusted.pem,
            signature=renewed.signature,
            trusted_since=renewed.trusted.since,
        )

    async def ListAccess(self, request: operator_pb2.ListAccessRequest, context: Any) -> operator_pb2.ListAccessReply:
        reply = operator_pb2.ListAccessReply()
        for item in self._service.register.certificates():
            if item.identity.role is not Role.SILO:
                reply.certificates.add(
                    role=item.identity.role.value,
                    name=item.identity.name,
                    serial=item.serial,
                    issued_unix_s=item.issued_unix_s,
                    expires_unix_s=item.expires_unix_s,
                    revoked_unix_s=item.revoked_unix_s or 0.0,
                )
        return reply

    async def ExportModel(
        self, request: operator_pb2.ExportModelRequest, context: Any
    ) -> AsyncGenerator[operator_pb2.ExportPiece, None]:
        standing = await self._service.status()
        model = standing.model if request.latest else standing.best_model
        if standing.plan is None or model is None:
            raise StateError("no plan has been started, so there is no model: run coordinator plan start")
        async with self._host.scratch.written(partial(self._host.export, standing.plan, model)) as folder:
            yield operator_pb2.ExportPiece(model_digest=digest_to_wire(model), plan_name=standing.plan_name)
            for path in sorted(folder.iterdir()):
                hashed = blake3()
                with path.open("rb") as file:
                    while data := await asyncio.to_thread(file.read, PIECE_BYTES):
                        hashed.update(data)
                        yield operator_pb2.ExportPiece(name=path.name, data=data)
                yield operator_pb2.ExportPiece(name=path.name, digest=hashed.digest())

    async def CollectGarbage(
        self, request: operator_pb2.CollectGarbageRequest, context: Any
    ) -> operator_pb2.CollectGarbageReply:
        found = await self._service.collect_garbage(lambda present: self._host.collect(present, request.dry_run))
        reply = operator_pb2.CollectGarbageReply()
        for item in found:
            reply.items.add(kind=item.kind, what=item.what, why=item.why, bytes=item.bytes)
        return reply

    async def ListAuthorities(
        self, request: operator_pb2.ListAuthoritiesRequest, context: Any
    ) -> operator_pb2.AuthoritiesReply:
        return authorities_reply(await self._service.authorities.rows())

    async def ChangeAuthority(
        self, request: operator_pb2.ChangeAuthorityRequest, context: Any
    ) -> operator_pb2.AuthoritiesReply:
        authorities = self._service.authorities
        await authorities.take(
            request.step, force=request.force, certificate_pem=request.certificate_pem, chain_pem=request.chain_pem
        )
        return authorities_reply(await authorities.rows())


def _check_not_the_hosts_own(role: Role, name: str) -> None:
    if role is Role.OPERATOR and name == OPERATOR_NAME:
        raise ConfigurationError(
            f"{role.value} {name} is this coordinator's own host, which has its keys: it is neither granted nor revoked"
        )


def _role(text: str) -> Role:
    try:
        return Role(text)
    except ValueError as error:
        raise MalformedMessage(f"role {text[:40]!r} is unknown: use silo, operator or viewer") from error


def authorities_reply(rows: Iterable[AuthorityRow]) -> operator_pb2.AuthoritiesReply:
    reply = operator_pb2.AuthoritiesReply()
    for row in rows:
        standing = row.standing
        reply.authorities.add(
            name=standing.name,
            stage=standing.stage,
            subject=standing.subject,
            pin=standing.pin,
            expires_unix_s=standing.expires_unix_s,
            unaware=map(label, row.unaware),
            dependent=map(label, row.dependent),
            invitations_unix_s=row.pinned_until_unix_s,
        )
    return reply


def status_reply(standing: Standing) -> operator_pb2.StatusReply:
    reply = operator_pb2.StatusReply(
        federation=standing.federation,
        plan_name=standing.plan_name,
        plan_digest=digest_to_wire(standing.plan) if standing.plan else b"",
        phase=standing.phase,
        detail=standing.detail,
        round=standing.round,
        attempt=standing.attempt,
        rounds=standing.rounds,
        seconds_left=NO_DEADLINE if standing.seconds_left is None else standing.seconds_left,
        model_digest=digest_to_wire(standing.model) if standing.model else b"",
        best_model_digest=digest_to_wire(standing.best_model) if standing.best_model else b"",
        coordinator_version=software_version(),
        wire=str(wire_version.OURS),
        score=standing.score,
    )
    for silo in standing.silos:
        reply.silos.add(
            silo=silo.silo,
            state=silo.state,
            detail=silo.detail,
            last_seen_unix_s=silo.last_seen_unix_s,
            fraction=silo.fraction,
            certificate_expires_unix_s=silo.certificate_expires_unix_s,
            agent_version=silo.agent_version,
            agent_wire=silo.agent_wire,
        )
    return reply


def round_record(row: RoundRow) -> operator_pb2.RoundRecord:
    return operator_pb2.RoundRecord(
        round=row.round,
        attempt=row.attempt,
        outcome=row.outcome,
        detail=row.detail,
        opened_unix_s=row.opened_unix_s,
        closed_unix_s=row.closed_unix_s or 0.0,
        model_digest=digest_to_wire(row.model),
        weight_fallback=row.weight_fallback,
        masked=None
        if row.masked is None
        else operator_pb2.MaskedTotals(
            weight_sum=row.masked.weight_sum, saturated=row.masked.saturated, coordinates=row.masked.coordinates
        ),
        silos=[_silo_round(silo) for silo in row.silos],
        macro_exact_match=NOT_EVALUATED if row.macro_exact_match is None else row.macro_exact_match,
        micro_exact_match=NOT_EVALUATED if row.micro_exact_match is None else row.micro_exact_match,
    )


def _silo_round(silo: SiloRow) -> operator_pb2.SiloRound:
    record = operator_pb2.SiloRound(
        silo=silo.silo,
        outcome=silo.outcome,
        detail=silo.detail,
        examples=silo.examples,
        loss_max=silo.loss_max,
        loss_min=silo.loss_min,
        loss_reduction=silo.loss_reduction,
        weight=silo.weight,
        share=silo.share,
        delta_norm=silo.delta_norm,
    )
    if silo.evaluation is not None:
        record.dev_examples = silo.evaluation.examples
        record.dev_exact_matches = silo.evaluation.exact_matches
        record.dev_executed = silo.evaluation.executed
        record.dev_execution_matches = silo.evaluation.execution_matches
    return record
