"""Of `silo-agent check`: what this silo's rules and its people's decisions come to, and what people gave up of required
masks."""

from collections.abc import Sequence
from contextlib import suppress

from lorica_security.console.preflight import Misconfigured, meaning, misconfigured
from lorica_security.errors import LoricaError, PolicyRefusal
from lorica_security.secure_aggregation.groups.release_groups import too_little
from silo_agent.edges.check.misconfigurations import Mistake
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.release_groups import group_chain, small_by_approval
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.memory.masking_journal import masking_journal
from silo_agent.edges.memory.pins_file import How
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.policy.loosenings import loosened
from silo_agent.policy.record import Record
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_wire.plans.plan import PlanBundle


def check_record(policy: SiloPolicy) -> str:
    """What people decided and what this silo has masked, and whether its rules say that it goes on doing so."""
    with meaning(Mistake.RECORD_DAMAGED.value):
        record = policy.record()
    masked = [it for it in record.lineages if it.round]
    if masked and "require_secure_aggregation" not in policy.rules.model_fields_set:
        raise misconfigured(
            Mistake.MASKS_UNSAID.value,
            f"this silo masked under {len(masked)} plans, and [policy] does not say whether it always must",
        )
    return (
        f"people approved {len(record.approved)} plans with plan approve; this silo took part in masked rounds of "
        f"{len(masked)}"
    )


def check_plan(bundle: PlanBundle, policy: SiloPolicy) -> str:
    try:
        policy.check_plan(bundle)
    except PolicyRefusal as refusal:
        mistake = Mistake.UNAPPROVED if refusal.rule == "approved_plans" else Mistake.POLICY
        raise Misconfigured(mistake.value, str(refusal)) from refusal
    return f"{bundle.plan.name} ({bundle.plan.digest[:16]}), {bundle.plan.model.parameters:,} parameters, is allowed"


def check_peers(folder: SiloFolder, credentials: SiloCredentials, rules: PolicyRules, bundle: PlanBundle | None) -> str:
    """A round with masks needs a cohort, and everybody in it has to be known here."""
    with meaning(Mistake.PINS_DAMAGED.value):
        store = trust_store(folder, credentials, first_use=rules.trust_on_first_use)
        peers, trusted = store.peers(), store.trusted()
    needed = max(rules.min_cohort, bundle.plan.smallest_cohort if bundle else 0) - 1
    unconfirmed = sum(peer.how is How.FIRST_USE for peer in peers)
    found = f"{len(peers)} silos are pinned" + (f", {unconfirmed} of them on first use" if unconfirmed else "")
    if rules.trust_on_first_use:
        return f"{found}; others are on first use, which does not stop a coordinator that makes up silos"
    found += ", who count for nothing until people compare them" if unconfirmed else ""
    if len(trusted) < needed:
        raise misconfigured(
            Mistake.PINS_FEW.value,
            f"{found}, the smallest cohort that policy and plan allow takes {needed} beside this one",
        )
    return f"{found}, at least {needed} are needed"


def check_memory(folder: SiloFolder, credentials: SiloCredentials) -> str:
    with meaning(Mistake.MASKING_MEMORY.value):
        memory = masking_journal(folder, credentials).memory()
    return f"whole: {len(memory.plans)} plans, {memory.sequence} changes"


def check_groups(folder: SiloFolder, credentials: SiloCredentials, policy: SiloPolicy) -> str:
    with meaning(Mistake.GROUPS_DAMAGED.value):
        standing = group_chain(folder, credentials, policy).standing()
    if standing.objection is not None:
        raise misconfigured(Mistake.GROUPS_WAIT.value, standing.objection)
    if standing.held is None:
        return "none yet: the first masked round proposes them"
    link = standing.held.link
    if lacking := too_little(link, policy.demands().promise):
        raise misconfigured(Mistake.GROUPS_PROMISE.value, lacking)
    group = link.partition.group_of(credentials.silo)
    if group is None:
        return f"number {link.number}: this silo is in none of them, and masks nothing"
    if group == (credentials.silo,):
        return f"number {link.number}: this silo is a group of its own; the coordinator chooses which sums it is in"
    return f"number {link.number}: summed together or not at all are {', '.join(group)}"


def loosenings(folder: SiloFolder, credentials: SiloCredentials, policy: SiloPolicy) -> Sequence[tuple[str, str]]:
    """Of a file that is damaged, which a check before has told, nothing is said here; of the rules and of other files
    all is."""
    pinned, first, record = 0, 0, Record()
    with suppress(LoricaError):
        peers = trust_store(folder, credentials).peers()
        pinned, first = len(peers), sum(peer.how is How.FIRST_USE for peer in peers)
    with suppress(LoricaError):
        record = policy.record()
    found = list(loosened(policy.rules, pinned=pinned, on_first_use=first, record=record))
    found += small_by_approval(folder, credentials, policy)
    return found
