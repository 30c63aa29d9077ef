"""What the coordinator signs of an exported model, from its own records."""

from collections.abc import Mapping

from lorica_coordinator.edges.models.model_card import Made
from lorica_coordinator.service.records import SignedModel
from lorica_security.audit.chain import Head
from lorica_security.host.software_version import software_version
from lorica_security.on_disk.provenance import Promise, Provenance
from silo_wire.plans.plan import Plan


def provenance_of(
    plan: Plan, exported: SignedModel, *, made: Made, head: Head, now: float, files: Mapping[str, str]
) -> Provenance:
    """`made` is of the exported model, `head` of the coordinator's audit log, `files` are name and SHA-256 of what is
    exported, `now` is in Unix seconds. Of single silos it says nothing."""
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
        rounds=made.rounds,
        promise=Promise(
            secure_aggregation=plan.aggregation.secure_aggregation,
            level=plan.privacy.level,
            epsilon=plan.privacy.target_epsilon if promised else None,
            delta=plan.privacy.dp_delta if promised else None,
        ),
        exact_match=made.score,
        audit_entry=head.sequence,
        audit_digest=head.digest,
        files=dict(files),
    )
