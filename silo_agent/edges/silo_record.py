"""What this silo's people decided by command and what it has masked, as its folder says now: what `SiloPolicy` asks for."""

from collections.abc import Callable

from silo_agent.edges.lineages import Lineages
from silo_agent.edges.plan_approvals import PlanApprovals
from silo_agent.edges.silo_folder import SiloFolder
from silo_agent.policy import Record


def record_of(folder: SiloFolder) -> Callable[[], Record]:
    approvals, lineages = PlanApprovals(folder.approvals), Lineages(folder.lineages)
    return lambda: approvals.record(lineages.all())
