"""Which rules this silo has below their default, and what each of them costs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass
from silo_agent.policy.record import Record
from silo_agent.policy.rules import PolicyRules

MOST_TRUSTED_PEERS = 3
"""So many peers may all be taken for honest without a word of it in `silo-agent check`."""


def loosened(rules: PolicyRules, *, pinned: int, on_first_use: int, record: Record) -> Iterator[tuple[str, str]]:
    """What this silo's people gave up of what required masks promise by themselves: the key, and what it costs.

    `pinned` counts the silos that are pinned here, `on_first_use` those of them that nobody compared.
    """
    if not rules.require_secure_aggregation:
        masked = [it.plan for it in record.lineages if it.round]
        if masked and "require_secure_aggregation" in rules.model_fields_set:
            yield (
                "require_secure_aggregation",
                f"it is false, and this silo masked under {len(masked)} plans: of the next one the coordinator may "
                "see its update alone",
            )
        return
    if rules.approved_plans == "any":
        yield (
            "approved_plans",
            'it is "any": the coordinator chooses model and settings, and a model made for it can single out one '
            "silo in a sum",
        )
    elif rules.approved_plans != "ask":
        yield (
            "approved_plans",
            'it lists plans: nobody here compared their initial models, as "ask" would have people do',
        )
    if rules.verify != "joint":
        yield (
            "verify",
            'it is "off": nobody here finds out whether a round model is one that was made to single out a silo'
            if rules.verify == "off"
            else 'it is "spot": a round model that is wrong in one place, to single out a silo, is mostly not '
            "found out",
        )
    if rules.trust_on_first_use:
        yield (
            "trust_on_first_use",
            "it is true: a coordinator can make up silos, and a sum be of this one and made-up ones",
        )
    elif on_first_use:
        yield (
            "trust_on_first_use",
            f"{on_first_use} silos are pinned by the key that they came with first, and count for nothing now: "
            "compare each by telephone, then `silo-agent trust add`",
        )
    if rules.colluders == 0 and pinned > MOST_TRUSTED_PEERS:
        yield (
            "colluders",
            f"it is 0 of {pinned} peers: one of them that works with the coordinator may uncover what masks hide",
        )
    if rules.max_work_ratio > PolicyRules.model_fields["max_work_ratio"].default:
        yield (
            "max_work_ratio",
            f"it is {rules.max_work_ratio:g}: a silo may train so many times more than another, and the sum be "
            "mostly its delta",
        )
    if rules.shared_budget == "none":
        yield (
            "shared_budget",
            'it is "none": a second folder with the same records, or a copy of this one, spends max_epsilon once more',
        )
    if rules.tasks:
        yield (
            "tasks",
            f"it names {', '.join(rules.tasks)}: code that is not Lorica's reads this silo's lines, and says what its "
            "scores are",
        )
    for key, cost in _LIMITS.items():
        value, usual = getattr(rules, key), PolicyRules.model_fields[key].default
        if value > usual:
            yield key, f"it is {value:,}, where {usual:,} is the default: {cost}"
    if rules.min_grad_norm < (usual := PolicyRules.model_fields["min_grad_norm"].default):
        yield (
            "min_grad_norm",
            f"it is {rules.min_grad_norm:g}, where {usual:g} is the default: a plan may learn nothing, and spend "
            "epsilon",
        )
    for plan in sorted(set(record.approved) - set(record.compared)):
        yield (
            "--without-comparing-the-model",
            f"plan {plan[:16]} was approved so: its model may be made to single out one silo",
        )
    for pair in sorted(sorted(pair) for pair in record.pairs):
        both = " and ".join(plan[:16] for plan in pair)
        yield "--although", f"plans {both} were approved beside each other: their sums may differ by one silo's update"


_LIMITS = {
    "max_parameters": "the more of them, the more of its records a model can hold",
    "max_upload_bytes": "the more of them leave in a round, the more they can tell",
    "max_rounds": "each further sum tells more of the same records",
    "max_epochs": "the longer it trains in a round, the more a delta tells of single records",
    "max_epsilon": "the promise to each record is weaker",
    "max_epsilon_alone": "silos that work together against this one learn more of each record",
    "max_model_value": "a model may be made for something else than to learn",
    "max_dp_delta": "the promise to each record is weaker",
}
"""Rules whose default is a limit, and what a higher one costs."""
