"""What a private plan must promise, and what its rounds may cost of this silo's epsilon."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lorica_security.errors import PolicyRefusal
from lorica_security.identifiers import SiloName
from lorica_security.privacy.accounting import Budget, GaussianRelease
from lorica_security.privacy.renyi_filter import favoured_order, filtered_epsilon
from silo_wire.plans.plan import Plan

if TYPE_CHECKING:
    pass
from silo_agent.policy.rules import PolicyRules


def privacy_refusals(rules: PolicyRules, silo: SiloName, plan: Plan) -> Iterator[PolicyRefusal]:
    if rules.require_privacy not in ("none", plan.privacy.level):
        yield PolicyRefusal(
            "require_privacy",
            f"plan {plan.name} has [privacy] level {plan.privacy.level!r}, [policy] require_privacy of this silo wants "
            f"{rules.require_privacy!r}: have the operator set [privacy] level in the plan",
        )
    if plan.privacy.level == "none":
        return
    if plan.privacy.level == "record" and rules.unit_field not in ("", plan.privacy.unit_field):
        yield PolicyRefusal(
            "unit_field",
            f"plan {plan.name} promises privacy for each {plan.privacy.unit_field or 'line'!r}, [policy] unit_field "
            f"of this silo wants it for each {rules.unit_field!r}: have the operator set [privacy] unit_field in the "
            f"plan",
        )
    norm = plan.training.for_silo(silo).max_grad_norm
    if plan.privacy.level == "record" and norm < rules.min_grad_norm:
        yield PolicyRefusal(
            "min_grad_norm",
            f"plan {plan.name} clips gradients to max_grad_norm = {norm:g}, [policy] min_grad_norm of this silo "
            f"wants at least {rules.min_grad_norm:g}: have the operator raise [training] max_grad_norm in the plan",
        )
    yield from _joint_noise(rules, plan)
    of_round = [release for _, release in plan.releases_of_round]
    unit = plan.privacy.unit_field
    of_rounds = [replace(release, steps=release.steps * plan.schedule.rounds) for release in of_round]
    epsilon = filtered_cost(rules, of_rounds, of_round, plan)
    if epsilon > rules.max_epsilon:
        yield PolicyRefusal(
            "max_epsilon",
            f"the {plan.schedule.rounds} rounds of plan {plan.name} cost epsilon {epsilon:.3g} at dp_delta "
            f"{rules.max_dp_delta:g} by the filter that holds over all plans, [policy] max_epsilon of this silo is "
            f"{rules.max_epsilon:g}: change one of them"
            + (
                f", or set [policy] unit_field = {unit!r} where epsilon is meant for each {unit!r} and not for each "
                "line"
                if unit and not rules.unit_field
                else ""
            ),
        )


def filtered_cost(
    rules: PolicyRules, of_rounds: Sequence[GaussianRelease], of_round: Sequence[GaussianRelease], plan: Plan
) -> float:
    """What a plan's rounds come to by the filter that its first round would open."""
    budget, unit = budget_of(rules), plan.privacy.unit_field
    relation = budget.relation_or_own((mechanism, unit) for mechanism, _ in plan.releases_of_round)
    return filtered_epsilon(
        of_rounds,
        favoured=favoured_order(of_round, epsilon=budget.epsilon, dp_delta=budget.dp_delta, relation=relation),
        dp_delta=budget.dp_delta,
        relation=relation,
    )


def _joint_noise(rules: PolicyRules, plan: Plan) -> Iterator[PolicyRefusal]:
    if not plan.joint:
        return
    if rules.trust_on_first_use:
        yield PolicyRefusal(
            "trust_on_first_use",
            f"plan {plan.name} counts on noise of {plan.noise_makers} silos, and [policy] trust_on_first_use of "
            "this silo would take silos that the coordinator invented for some of them: set it to false and pin the "
            "others' keys, or have the operator set "
            '[privacy] noise = "own"',
        )
    of_rounds = [
        replace(release.alone, steps=release.steps * plan.schedule.rounds) for _, release in plan.releases_of_round
    ]
    alone = filtered_cost(rules, of_rounds, [release for _, release in plan.releases_of_round], plan)
    # At a large max_dp_delta it may cost nothing.
    if not rules.max_epsilon_alone or alone > rules.max_epsilon_alone:
        yield PolicyRefusal(
            "max_epsilon_alone",
            f"the noise of plan {plan.name} is made by {plan.noise_makers} silos together: if all others worked "
            f"against this one, its {plan.schedule.rounds} rounds would cost epsilon {alone:.3g} at dp_delta "
            f"{rules.max_dp_delta:g}, [policy] max_epsilon_alone of this silo is {rules.max_epsilon_alone:g}: change "
            f"it, or have the operator set [privacy] noise = "
            '"own"',
        )


def budget_of(rules: PolicyRules) -> Budget:
    """What this silo may spend of epsilon, over all plans."""
    return Budget(
        epsilon=rules.max_epsilon,
        dp_delta=rules.max_dp_delta,
        alone=rules.max_epsilon_alone,
        unit=rules.unit_field,
    )
