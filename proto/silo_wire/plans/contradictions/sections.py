"""What of the sections of any plan does not go together."""

from collections.abc import Iterator

from silo_wire.plans.contradictions.masks import of_masks
from silo_wire.plans.contradictions.privacy import of_privacy
from silo_wire.plans.plan_values import PlanValues
from silo_wire.plans.sections.model import BASE_LAYOUT_FILE


def contradictions_of(plan: PlanValues) -> Iterator[str]:
    """Whatever does not go together, each with what to do."""
    yield from _of_the_share_cap(plan)
    yield from _of_the_initial_model(plan)
    yield from _of_adapters(plan)
    yield from _of_the_weighting(plan)
    if plan.aggregation.secure_aggregation:
        yield from of_masks(plan)
    yield from of_privacy(plan)


def _of_the_share_cap(plan: PlanValues) -> Iterator[str]:
    cap = plan.aggregation.max_weight_share
    if cap and cap * plan.schedule.min_silos < 1:
        yield (
            f"[aggregation] max_weight_share = {cap} cannot hold with min_silos = {plan.schedule.min_silos}: "
            f"raise it to at least {1 / plan.schedule.min_silos:.3f}"
        )


def _of_the_initial_model(plan: PlanValues) -> Iterator[str]:
    if plan.wire.model == "bfloat16" and plan.model.initial_bfloat16 is None:
        yield (
            '[wire] model = "bfloat16" without [model] initial_bfloat16, by which silos know the initial model: make a '
            "new plan with coordinator plan new"
        )


def _of_adapters(plan: PlanValues) -> Iterator[str]:
    """They have a base, and nothing else has; what is fixed of them is named."""
    section = plan.adapters
    named = {"base": plan.model.base is not None, BASE_LAYOUT_FILE: BASE_LAYOUT_FILE in plan.model.files}
    for what, is_there in named.items():
        if is_there != bool(plan.adapters.rank):
            yield (
                f"[model] {'has' if is_there else 'lacks'} {what}, [adapters] rank = {plan.adapters.rank}: make a "
                "new plan with coordinator plan new, where a rank is for good"
            )
    if (plan.model.fixed is not None) != section.fixes_a:
        yield (
            f"[model] {'lacks' if section.fixes_a else 'has'} fixed, [adapters] rank = {section.rank} and train = "
            f'"{section.train}": make a new plan with coordinator plan new, where train = "b" is for good, and so is '
            "any other"
        )
    if section.rank and section.train == "alternate" and plan.aggregation.server_optimizer == "adam":
        yield (
            '[aggregation] server_optimizer = "adam" does not go with [adapters] train = "alternate", under which each '
            "half takes every second step: adam's correction of its first steps would count the others too; set it to "
            '"yogi", "adagrad" or "sgd", or train to "b"'
        )


def _of_the_weighting(plan: PlanValues) -> Iterator[str]:
    weighting = plan.aggregation.weighs
    if plan.aggregation.secure_aggregation and not weighting.masks:
        yield (
            f'[aggregation] weighting = "{weighting.name}" does not go with secure_aggregation, under which the '
            "coordinator knows the sum of weights alone: set another one, or turn secure_aggregation off"
        )
    for it in weighting.clashes(plan.training):
        yield (
            f'{it.key} = {it.value} does not go with [aggregation] weighting = "{weighting.name}", {it.why}: set it to '
            f"{it.needed}"
        )
