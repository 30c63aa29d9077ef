"""What a row of the coordinator's tables says: as records, and back."""

from typing import Any

from sqlalchemy import Row

from lorica_coordinator.service.issued import Certificate
from lorica_coordinator.service.records import EnrolledSilo
from lorica_security.identifiers import Identity, SiloName
from silo_wire.messages import Evaluation


def certificate_row(certificate: Certificate) -> dict[str, object]:
    return {
        "serial": certificate.serial,
        "digest": certificate.digest,
        "uri": certificate.identity.uri,
        "issued_at": certificate.issued_unix_s,
        "expires_at": certificate.expires_unix_s,
        "revoked_at": certificate.revoked_unix_s,
    }


def certificate_of(row: Row[Any]) -> Certificate:
    return Certificate(
        serial=row.serial,
        digest=row.digest,
        identity=Identity.from_uri(row.uri),
        issued_unix_s=row.issued_at,
        expires_unix_s=row.expires_at,
        revoked_unix_s=row.revoked_at,
    )


def silo_of(row: Row[Any]) -> EnrolledSilo:
    return EnrolledSilo(
        silo=SiloName(row.silo),
        identity_public_key=row.identity_public_key,
        certificate_serial=row.certificate_serial,
        certificate_digest=row.certificate_digest,
        certificate_expires_unix_s=row.certificate_expires,
        enrolled_unix_s=row.enrolled_at,
        last_seen_unix_s=row.last_seen,
        revoked_unix_s=row.revoked_at,
        agent_version=row.agent_version,
        agent_wire=row.agent_wire,
    )


def evaluation_of(row: Row[Any]) -> Evaluation:
    return Evaluation(
        split=row.split,
        examples=row.examples,
        exact_matches=row.exact_matches,
        executed=row.executed,
        execution_matches=row.execution_matches,
        loss_per_token=row.loss_per_token,
        seconds=row.seconds,
    )
