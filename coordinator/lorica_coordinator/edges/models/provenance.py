"""What the coordinator signs of an exported model, from its own records."""

from collections.abc import Mapping, Sequence

from lorica_coordinator.service.records import COMPLETED, RoundRow, SignedModel
from lorica_security.audit.chain import Head
from lorica_security.host.software_version import software_version
from lorica_security.on_disk.provenance import Promise, Provenance, RoundMade
from silo_wire.plans.plan import Plan

_COMMITTED = "committed"
LEAST_SCORED = 2


def provenance_of(
    plan: Plan, exported: SignedModel, *, rounds: Sequence[RoundRow], head: Head, now: float, files: Mapping[str, str]
) -> Provenance:
    """`rounds` are all of the plan's, `head` is of the coordinator's audit log, `files` are name and SHA-256 of what is
    exported, `now` is in Unix seconds. Of single silos it says nothing."""
    made = [row for row in rounds if row.outcome in COMPLETED]
    promised = plan.privacy.level != "none"
    return Provenance(
        federation=plan.federation,
        software=software_version(),
        exported_unix_s=int(now),
        plan_name=plan.name,
        plan=plan.digest,
        begun_from=plan.model.source,
        model=exported.model,
        round=exported.round,
        rounds=tuple(
            RoundMade(
                round=row.round,
                attempt=row.attempt,
                silos=sum(silo.outcome == _COMMITTED for silo in row.silos),
                model=row.model,
            )
            for row in made
        ),
        promise=Promise(
            secure_aggregation=plan.aggregation.secure_aggregation,
            level=plan.privacy.level,
            epsilon=plan.privacy.target_epsilon if promised else None,
            delta=plan.privacy.dp_delta if promised else None,
        ),
        exact_match=next((_of_several(row) for row in made if row.model == exported.model), None),
        audit_entry=head.sequence,
        audit_digest=head.digest,
        files=dict(files),
    )


def _of_several(row: RoundRow) -> float | None:
    """Of one silo's dev split alone it would be that silo's; under masks it comes of a sum over a cohort."""
    scored = sum(silo.evaluation is not None for silo in row.silos)
    return row.micro_exact_match if scored >= LEAST_SCORED or row.masked is not None else None
