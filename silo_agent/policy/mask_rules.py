"""What a plan with masks must promise: cohort, threshold, survivors, colluders, work that silos share alike."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

from lorica_security.errors import PolicyRefusal
from silo_wire.model_folders.tokenizer_parts import odd_parts
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.work import MOST_SETTINGS, MOST_WORK_RATIO, widest_gap

if TYPE_CHECKING:
    pass
from silo_agent.policy.plan_limits import some_of
from silo_agent.policy.rules import PolicyRules


def _rounded_up(ratio: Fraction) -> float:
    """To hundredths, as somebody would write it; at most MOST_WORK_RATIO where `ratio` is."""
    return math.ceil(ratio * 100) / 100


def mask_refusals(rules: PolicyRules, bundle: PlanBundle) -> Iterator[PolicyRefusal]:
    from lorica_security.secure_aggregation.parameters import default_threshold

    wanted, silos = bundle.plan.aggregation, bundle.plan.smallest_cohort
    quorum = "[schedule] min_silos" if silos == bundle.plan.schedule.min_silos else "[semi_supervised] min_labelled"
    for rule, key, offered, demanded in (
        ("min_cohort", quorum, silos, rules.min_cohort),
        # The default grows with the cohort: that of the smallest is the least there can be.
        (
            "min_threshold",
            "[aggregation] threshold",
            wanted.threshold or default_threshold(silos),
            rules.min_threshold,
        ),
        ("min_survivors", "[aggregation] min_survivors", wanted.min_survivors, rules.min_survivors),
        ("colluders", "[aggregation] colluders", wanted.colluders, rules.colluders),
    ):
        if offered < demanded:
            yield PolicyRefusal(
                rule,
                f"{key} of plan {bundle.plan.name} comes to {offered} in its smallest cohort, [policy] {rule} of this "
                f"silo wants at least {demanded}: change one of them",
            )
    yield from _work(rules, bundle.plan)
    odd = list(odd_parts(bundle.files))
    if odd:
        yield PolicyRefusal(
            "initial_model",
            f"the tokenizer of plan {bundle.plan.name} is none of T5's family: {some_of(odd)}; this silo takes none "
            "of another make under secure_aggregation, since a tokenizer can leave text to one silo alone, whose "
            "delta the sum then is: have the operator offer a plan with the model's own tokenizer",
        )


def _work(rules: PolicyRules, plan: Plan) -> Iterator[PolicyRefusal]:
    """Whoever trains far more than all others is alone in the sum; so is the only one that trains less, in two sums."""
    allowed = rules.max_work_ratio
    gap = widest_gap(plan.training.works)
    if gap is None:
        yield PolicyRefusal(
            "max_work_ratio",
            f"plan {plan.name} has more than {MOST_SETTINGS} different settings in [training.overrides], which this "
            "silo does not compare: have the operator give silos the same ones",
        )
    elif gap.ratio > Fraction(repr(allowed)):
        remedy = "have the operator bring the overrides together"
        if gap.ratio <= MOST_WORK_RATIO:
            remedy += f", or set [policy] max_work_ratio = {_rounded_up(gap.ratio):g}"
        yield PolicyRefusal(
            "max_work_ratio",
            f"{gap.first} and {gap.second} of plan {plan.name} differ {float(gap.ratio):.4g}-fold in learning rate "
            f"x optimizer steps, [policy] max_work_ratio of this silo allows {allowed:g} under secure_aggregation, "
            f"since a sum of one silo that trains and others that hardly do is that silo's delta: {remedy}",
        )
