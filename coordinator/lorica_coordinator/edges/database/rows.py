"""What a row of the coordinator's tables says: as records, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row

from lorica_coordinator.service.issued import Certificate
from lorica_coordinator.service.records import COMPLETED, EnrolledSilo, MaskedTotals, RoundRow, SiloRow
from lorica_security.identifiers import Identity, SiloName
from silo_wire.canonical import Digest
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


def round_of_rows(
    row: Row[Any], of_silos: Sequence[Row[Any]], scores: Mapping[tuple[int, str], Evaluation]
) -> RoundRow:
    members = [item for item in of_silos if (item.round, item.attempt) == (row.round, row.attempt)]
    scored = row.outcome in (*COMPLETED, "evaluated")
    found = {silo: score for (number, silo), score in scores.items() if number == row.round} if scored else {}
    trained = tuple(
        SiloRow(
            silo=SiloName(item.silo),
            outcome=item.outcome,
            detail=item.detail,
            examples=item.examples,
            loss_max=item.loss_max,
            loss_min=item.loss_min,
            weight=item.weight,
            share=item.share,
            delta_norm=item.delta_norm,
            evaluation=found.pop(item.silo, None),
        )
        for item in members
    )
    # Whoever only evaluated: round 0, or an evaluation that was done again after a stop, by another cohort.
    further = tuple(
        SiloRow(silo=SiloName(silo), outcome="evaluated", evaluation=score) for silo, score in sorted(found.items())
    )
    return RoundRow(
        round=row.round,
        attempt=row.attempt,
        outcome=row.outcome,
        detail=row.detail,
        opened_unix_s=row.opened_at,
        closed_unix_s=row.closed_at,
        model=Digest(row.model),
        weight_fallback=row.weight_fallback,
        masked=None
        if row.coordinates is None
        else MaskedTotals(weight_sum=row.weight_sum, saturated=row.saturated, coordinates=row.coordinates),
        silos=trained + further,
        macro_exact_match=row.macro_exact_match,
        micro_exact_match=row.micro_exact_match,
    )
