"""Who may call what: one row for every RPC of the wire. An RPC without a row cannot be served (a test walks them
all)."""

from typing import Final

from lorica_coordinator.edges.keys.key_store import OPERATOR_NAME
from lorica_security.errors import AuthorisationError
from lorica_security.identifiers import Identity, Role

_SILO: Final = frozenset({Role.SILO})
_OPERATOR: Final = frozenset({Role.OPERATOR})
_READER: Final = frozenset({Role.OPERATOR, Role.VIEWER})

ALLOWED: Final[dict[str, frozenset[Role]]] = {
    "/silo_wire.v1.Federation/Attend": _SILO,
    "/silo_wire.v1.Federation/FetchPlan": _SILO,
    "/silo_wire.v1.Federation/DeclareReadiness": _SILO,
    "/silo_wire.v1.Federation/FetchModel": _SILO,
    "/silo_wire.v1.Federation/UploadOffset": _SILO,
    "/silo_wire.v1.Federation/UploadUpdate": _SILO,
    "/silo_wire.v1.Federation/DeclareTrained": _SILO,
    "/silo_wire.v1.Federation/AnswerMask": _SILO,
    "/silo_wire.v1.Federation/DeclineRound": _SILO,
    "/silo_wire.v1.Federation/ReportProgress": _SILO,
    "/silo_wire.v1.Federation/ReportEvaluation": _SILO,
    "/silo_wire.v1.Federation/CountersignLedger": _SILO,
    "/silo_wire.v1.Federation/FetchGroups": _SILO,
    "/silo_wire.v1.Federation/SignGroups": _SILO,
    "/silo_wire.v1.Federation/FetchEvidence": _SILO,
    "/silo_wire.v1.Federation/FetchPieces": _SILO,
    "/silo_wire.v1.Federation/ShareVerdict": _SILO,
    "/silo_wire.v1.Federation/FetchVerdicts": _SILO,
    "/silo_wire.v1.Federation/RenewCertificate": _SILO,
    "/silo_wire.v1.Federation/SucceedIdentity": _SILO,
    "/silo_wire.v1.Operator/GetStatus": _READER,
    "/silo_wire.v1.Operator/ListRounds": _READER,
    "/silo_wire.v1.Operator/Invite": _OPERATOR,
    "/silo_wire.v1.Operator/StartPlan": _OPERATOR,
    "/silo_wire.v1.Operator/StopPlan": _OPERATOR,
    "/silo_wire.v1.Operator/PausePlan": _OPERATOR,
    "/silo_wire.v1.Operator/ResumePlan": _OPERATOR,
    "/silo_wire.v1.Operator/Revoke": _OPERATOR,
    "/silo_wire.v1.Operator/GrantAccess": _OPERATOR,
    "/silo_wire.v1.Operator/RenewAccess": _READER,
    "/silo_wire.v1.Operator/ListAccess": _OPERATOR,
    "/silo_wire.v1.Operator/ExportModel": _OPERATOR,
    "/silo_wire.v1.Operator/CollectGarbage": _OPERATOR,
    "/silo_wire.v1.Operator/GetGroups": _READER,
    "/silo_wire.v1.Operator/ProposeGroups": _OPERATOR,
    "/silo_wire.v1.Operator/TakeGroupsBack": _OPERATOR,
    "/silo_wire.v1.Operator/ListAuthorities": _READER,
    "/silo_wire.v1.Operator/ChangeAuthority": _OPERATOR,
}


OF_THE_HOST: Final = frozenset({"/silo_wire.v1.Operator/ChangeAuthority"})
"""For the operator on the coordinator's own host alone: whoever steals a laptop's certificate must not come by the
federation."""


def authorise(identity: Identity, method: str) -> None:
    """Raise AuthorisationError unless a certificate of this role may call `method` (a full gRPC method name)."""
    if identity.role not in ALLOWED.get(method, frozenset()):
        raise AuthorisationError(f"{identity.uri} has role {identity.role.value}, which may not call {method}")
    if method in OF_THE_HOST and identity.name != OPERATOR_NAME:
        raise AuthorisationError(
            f"{identity.uri} may not call {method}: give this command on the coordinator's own host"
        )
