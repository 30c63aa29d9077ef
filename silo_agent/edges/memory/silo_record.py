"""What this silo's people decided by command and what it has masked, as its folder says now: what `SiloPolicy` asks
for."""

from collections.abc import Callable

from lorica_security.identity.seal import Seal
from silo_agent.edges.disk.plan_approvals import PlanApprovals
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.memory.lineages import Lineages
from silo_agent.policy.record import Record


def record_of(folder: SiloFolder, credentials: SiloCredentials) -> Callable[[], Record]:
    seal = Seal(credentials.identity_key)
    approvals, lineages = PlanApprovals(folder.approvals, seal), Lineages(folder.lineages, seal)
    return lambda: approvals.record(lineages.all())
