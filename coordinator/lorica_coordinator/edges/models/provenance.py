"""What the coordinator signs of an exported model, from its own records."""

from collections.abc import Mapping, Sequence

from lorica_coordinator.service.records import COMPLETED, RoundRow, SignedModel
from lorica_coordinator.service.views.disclosure import of_all_silos
from lorica_security.audit.chain import Head
from lorica_security.host.software_version import software_version
from lorica_security.on_disk.provenance import Promise, Provenance, RoundMade
from silo_wire.plans.plan import Plan

_COMMITTED = "committed"


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
        exact_match=next((of_all_silos(row).micro_exact_match for row in made if row.model == exported.model), None),
        audit_entry=head.sequence,
        audit_digest=head.digest,
        files=dict(files),
    )
