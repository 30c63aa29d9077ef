"""What does not go with a robust reducer, which compares single deltas and believes nothing that silos tell."""

from collections.abc import Iterator

from silo_wire.plans.plan_values import PlanValues
from silo_wire.plans.robust import MEAN, ROBUST_RULES, RobustRule
from silo_wire.weightings.equal import EQUAL


def of_reducer(plan: PlanValues) -> Iterator[str]:
    """What does not go with `[aggregation] reducer`, and keys of another one, which would be set for nothing."""
    rule = plan.aggregation.robust
    for key in dict.fromkeys(other.key for other in ROBUST_RULES if other.key):
        if (rule is None or rule.key != key) and (value := getattr(plan.aggregation, key)):
            readers = " or ".join(f'"{other.name}"' for other in ROBUST_RULES if other.key == key)
            yield (
                f"[aggregation] {key} = {value:g} is read by reducer = {readers} alone, and reducer is "
                f'"{plan.aggregation.reducer}": set {key} to 0, or reducer to {readers}'
            )
    if rule is None:
        return
    for key, has, needed, why in _unlike_robust(plan, rule):
        yield (
            f'{key} = {has} does not go with [aggregation] reducer = "{rule.name}", {why}: set it to {needed}, or '
            f'reducer to "{MEAN}"'
        )
    yield from _of_its_silos(plan, rule)


def _unlike_robust(plan: PlanValues, rule: RobustRule) -> Iterator[tuple[str, str, str, str]]:
    """Key, value, what it must be and why."""
    aggregation = plan.aggregation
    if aggregation.weighs is not EQUAL:
        yield (
            "[aggregation] weighting",
            f'"{aggregation.weighting}"',
            f'"{EQUAL.name}"',
            "which ignores the numbers that silos tell of themselves, since a hostile silo tells what it likes",
        )
    for cap in ("max_weight", "max_weight_share"):
        if value := getattr(aggregation, cap):
            yield f"[aggregation] {cap}", f"{value:g}", "0", "under which all silos weigh the same"
    if aggregation.secure_aggregation:
        yield "[aggregation] secure_aggregation", "true", "false", rule.not_masked
    if plan.privacy.level == "silo":
        yield (
            "[privacy] level",
            '"silo"',
            '"none" or "record"',
            "whose result one silo can move further than noise for a clipped sum covers",
        )


def _of_its_silos(plan: PlanValues, rule: RobustRule) -> Iterator[str]:
    """The quorum is that of every round: one that lacks silos waits or is abandoned, so none is reduced with fewer."""
    if rule.key and not getattr(plan.aggregation, rule.key):
        yield f'[aggregation] reducer = "{rule.name}" needs {rule.key}: set {rule.key_is}'
        return
    least, quorum = rule.least_silos(plan.aggregation), plan.schedule.min_silos
    if quorum < least:
        yield (
            f'[schedule] min_silos = {quorum} is too few for [aggregation] reducer = "{rule.name}", which needs '
            f"{least}: {rule.why_so_many}; raise min_silos"
            + (f", or change {rule.key} = {getattr(plan.aggregation, rule.key):g}" if rule.key else "")
        )
