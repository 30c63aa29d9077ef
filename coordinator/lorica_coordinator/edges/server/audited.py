"""Where things pass on their way to happen, and into the audit log first: the records, the operators' commands, the
gate's refusals.

Each class stands before the real one, and says of each of its methods whether it is entered or only handed on. What is
written before it happens may stand twice, or for nothing, after a crash or a full disk; what happened is never missing.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import structlog
from google.protobuf.message import Message

from lorica_coordinator.edges.keys.key_store import register_entry
from lorica_coordinator.edges.server.gate import Refusal
from lorica_coordinator.edges.server.operator_servicer import OperatorServicer
from lorica_coordinator.edges.telemetry.caller import CALLER
from lorica_coordinator.rounds.effects import (
    EvaluationClosed,
    PlanBegun,
    Record,
    RoundAbandoned,
    RoundClosed,
    RoundOpened,
    SiloDropped,
)
from lorica_coordinator.rounds.states import State, course_of
from lorica_coordinator.service.issued import IssuedCertificate
from lorica_coordinator.service.ports import AuditPort, RoundStore
from lorica_coordinator.service.records import EnrolledSilo
from lorica_security.audit.entry import LOCAL, Event, Particular
from lorica_security.audit.repeats import Repeats
from lorica_security.errors import LoricaError
from lorica_security.identifiers import SiloName
from lorica_security.identity.identity_key import public_key_bytes
from lorica_security.identity.succession import Succession
from lorica_security.pki.parsing import parse_certificate
from lorica_security.privacy.ledger import Entry as LedgerEntry
from silo_wire.messages import RoundKey
from silo_wire.v1 import operator_pb2

_log = structlog.get_logger(__name__)
Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply")
Granted = TypeVar("Granted", operator_pb2.GrantAccessReply, operator_pb2.RenewAccessReply)


class AuditedStore:
    """A RoundStore: enrolments, and what a transition records, are in the log before they are in the records."""

    def __init__(self, store: RoundStore, audit: AuditPort) -> None:
        self._store, self._audit = store, audit
        self._phase = ""
        # Not entered here: what is only read, and what the log has from elsewhere or does not tell.
        self.lost_attempt = store.lost_attempt
        self.silos = store.silos
        self.silo = store.silo
        self.seen = store.seen
        self.announced = store.announced
        self.announce = store.announce
        self.invite = store.invite
        self.invitations = store.invitations
        self.spent_at = store.spent_at
        self.void_invitations = store.void_invitations
        self.certificates = store.certificates
        self.register = store.register
        self.grant = store.grant
        self.revoke = store.revoke
        self.held_trust = store.held_trust
        self.has_arrived = store.has_arrived
        self.successions = store.successions
        self.countersign_ledger = store.countersign_ledger
        self.release_groups = store.release_groups
        self.keep_release_groups = store.keep_release_groups
        self.has_rounds = store.has_rounds
        self.signed_model = store.signed_model
        self.committed_update = store.committed_update
        self.evaluation = store.evaluation
        self.closed_attempts = store.closed_attempts
        self.plans = store.plans
        self.rounds = store.rounds

    def load(self, now: float = 0.0) -> State:
        state = self._store.load(now)
        self._phase = state.phase
        return state

    def transition(self, state: State, records: Sequence[Record], *, at: float, now: float) -> None:
        for record in records:
            if (told := _told(record)) is not None:
                event, particulars = told
                self._audit.append(event, **particulars)
        course = course_of(state)
        if course is not None and state.phase != self._phase:
            if state.phase == "stopped":
                self._audit.append(Event.PLAN_STOPPED, plan=course.terms.plan)
            if state.phase == "finished":
                best = course.best_model or course.model
                self._audit.append(Event.PLAN_FINISHED, plan=course.terms.plan, model=course.model, best=best)
        self._store.transition(state, records, at=at, now=now)
        self._phase = state.phase

    def enrol(self, silo: EnrolledSilo, *, secret_digest: bytes, authority: str = "", trust: str = "") -> None:
        self._audit.append(
            Event.ENROLLED,
            silo=silo.silo,
            identity_key=silo.identity_public_key.hex(),
            certificate=silo.certificate_serial,
            certificate_digest=silo.certificate_digest,
            expires=int(silo.certificate_expires_unix_s),
        )
        self._store.enrol(silo, secret_digest=secret_digest, authority=authority, trust=trust)

    def renew(
        self, silo: SiloName, certificate: IssuedCertificate, *, identity_public_key: bytes, trust: str, at: float
    ) -> None:
        entry = certificate.entry
        self._audit.append(
            Event.CERTIFICATE_RENEWED,
            silo=silo,
            certificate=entry.serial,
            certificate_digest=entry.digest,
            expires=int(entry.expires_unix_s),
        )
        self._store.renew(silo, certificate, identity_public_key=identity_public_key, trust=trust, at=at)

    def succeed(self, silo: SiloName, succession: Succession, *, at: float) -> None:
        self._audit.append(
            Event.IDENTITY_SUCCEEDED,
            silo=silo,
            predecessor=public_key_bytes(succession.predecessor).hex(),
            identity_key=public_key_bytes(succession.successor).hex(),
        )
        self._store.succeed(silo, succession, at=at)


class AuditedOperator:
    """An Operator servicer: every command is in the log before it is done, with all that it says; what only looks is
    not.

    A command that failed is followed by its refusal, where it came over the wire. No request holds a secret: tokens are
    replies.
    """

    def __init__(self, servicer: OperatorServicer, audit: AuditPort) -> None:
        self._audit = audit
        self.GetStatus = servicer.GetStatus
        self.ListRounds = servicer.ListRounds
        self.GetGroups = servicer.GetGroups
        self.ListAuthorities = servicer.ListAuthorities
        self.Invite = self._entered(servicer.Invite)
        self.StartPlan = self._entered(servicer.StartPlan)
        self.StopPlan = self._entered(servicer.StopPlan)
        self.PausePlan = self._entered(servicer.PausePlan)
        self.ResumePlan = self._entered(servicer.ResumePlan)
        self.Revoke = self._entered(servicer.Revoke)
        self.GrantAccess = self._granting(servicer.GrantAccess)
        self.RenewAccess = self._granting(servicer.RenewAccess)
        self.ListAccess = self._entered(servicer.ListAccess)
        self.ExportModel = self._streaming(servicer.ExportModel)
        self.CollectGarbage = self._entered(servicer.CollectGarbage)
        self.ProposeGroups = self._entered(servicer.ProposeGroups)
        self.TakeGroupsBack = self._entered(servicer.TakeGroupsBack)
        self.ChangeAuthority = self._entered(servicer.ChangeAuthority)

    def _tell(self, command: str, request: Message) -> str:
        caller = CALLER.get(None)
        said = {f"asked_{field.name}": _particular(value) for field, value in request.ListFields()}
        who = LOCAL if caller is None else caller.uri
        self._audit.append(Event.OPERATOR_COMMAND, who=who, command=command, **said)
        return who

    def _entered(
        self, command: Callable[[Request, Any], Coroutine[Any, Any, Reply]]
    ) -> Callable[[Request, Any], Coroutine[Any, Any, Reply]]:
        async def entered(request: Request, context: Any) -> Reply:
            self._tell(command.__name__, request)
            return await command(request, context)

        return entered

    def _granting(
        self, command: Callable[[Request, Any], Coroutine[Any, Any, Granted]]
    ) -> Callable[[Request, Any], Coroutine[Any, Any, Granted]]:
        async def granting(request: Request, context: Any) -> Granted:
            who = self._tell(command.__name__, request)
            reply = await command(request, context)
            self._tell_granted(who, reply)
            return reply

        return granting

    def _streaming(
        self, command: Callable[[Request, Any], AsyncGenerator[Reply, None]]
    ) -> Callable[[Request, Any], AsyncIterator[Reply]]:
        async def streaming(request: Request, context: Any) -> AsyncIterator[Reply]:
            self._tell(command.__name__, request)
            async with aclosing(command(request, context)) as replies:
                async for reply in replies:
                    yield reply

        return streaming

    def _tell_granted(self, who: str, reply: operator_pb2.GrantAccessReply | operator_pb2.RenewAccessReply) -> None:
        """Before the certificate is handed over; the register, which has it by now, can be held against this."""
        certificate = parse_certificate(reply.certificate_pem)
        entry = register_entry(certificate, certificate.not_valid_before_utc)
        self._audit.append(
            Event.ACCESS_GRANTED,
            who=who,
            to=entry.identity.uri,
            certificate=entry.serial,
            certificate_digest=entry.digest,
            expires=int(entry.expires_unix_s),
        )


class RefusalLog:
    """What the gate turned away: the first of a kind as they come, of a flood how many there were."""

    def __init__(self, audit: AuditPort, clock: Callable[[], float], repeats: Repeats | None = None) -> None:
        self._audit, self._clock = audit, clock
        self._repeats = repeats or Repeats()

    def refused(self, refusal: Refusal) -> None:
        """Whoever was refused is told so whether or not the log can be written."""
        kind = f"{refusal.kind} {refusal.method} {refusal.peer}"
        try:
            self.tell_counts()
            if self._repeats.is_news(kind, self._clock()):
                self._audit.append(
                    Event.REFUSED,
                    who=refusal.peer,
                    kind=refusal.kind,
                    method=refusal.method,
                    detail=refusal.detail,
                )
        except LoricaError as error:
            _log.error("refusal could not be entered into the audit log", refused=kind, error=str(error))

    def tell_counts(self, *, stopping: bool = False) -> None:
        for kind, count in self._repeats.ended(self._clock(), stopping=stopping):
            self._audit.append(Event.REPEATED, what=kind, times=count)


def released(audit: AuditPort) -> Callable[[LedgerEntry], None]:
    """For ReleaseLedger: a sum that is about to be entered there."""

    def tell(entry: LedgerEntry) -> None:
        audit.append(
            Event.SUM_RELEASED,
            plan=entry.plan,
            round=entry.round,
            attempt=entry.attempt,
            ledger_entry=entry.sequence,
            ledger_digest=entry.digest,
            ledger_subject=entry.subject,
        )

    return tell


def _told(record: Record) -> tuple[Event, dict[str, Any]] | None:
    """None of what the log has from elsewhere (updates, from their receipts), or does not tell."""
    match record:
        case PlanBegun():
            return Event.PLAN_OFFERED, {"plan": record.plan, "name": record.name}
        case RoundOpened():
            return Event.ROUND_OPENED, {**_where(record.key), "model": record.model, "cohort": " ".join(record.cohort)}
        case SiloDropped():
            return Event.SILO_DROPPED, {
                **_where(record.key),
                "silo": record.silo,
                "outcome": record.outcome,
                "detail": record.detail,
            }
        case RoundClosed():
            silos = record.masked if record.masked is not None else [update.silo for update in record.updates]
            return Event.ROUND_CLOSED, {
                **_where(record.key),
                "outcome": record.result.outcome.value,
                "model": record.result.model,
                "silos": " ".join(silos),
                "updates": " ".join(update.digest for update in record.updates),
            }
        case RoundAbandoned():
            return Event.ROUND_ABANDONED, {**_where(record.key), "reason": record.reason}
        case EvaluationClosed():
            return Event.MODEL_SCORED, {
                **_where(record.key),
                "silos": " ".join(report.silo for report in record.reports),
                "best": "yes" if record.is_best else "no",
            }
        case _:
            return None


def _where(key: RoundKey) -> dict[str, Particular]:
    return {"plan": key.plan, "round": key.round, "attempt": key.attempt}


def _particular(value: object) -> Particular:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return value
    return value.hex() if isinstance(value, bytes) else str(value)
