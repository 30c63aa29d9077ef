"""What does not go with secure aggregation, under which the coordinator sees sums alone."""

from collections.abc import Iterator

from silo_wire.plans.plan_values import PlanValues
from silo_wire.plans.sections.training import MOST_MASKED_MU

LEAST_GRAD_NORM = 1e-3
"""Under masks. With less, an optimizer's own small constants decide what a step is, and float32's rounding whether
there is one."""
LEAST_ADAPTER_EPOCHS = 2
"""Under masks, where A and B are trained at once. B begins at 0, and the gradient of A is 0 in the first step: a silo
that makes no other adds nothing to any A."""


def of_masks(plan: PlanValues) -> Iterator[str]:
    """What does not go with masks."""
    yield from _of_sums_alone(plan)
    yield from _of_steps_that_tell(plan)
    yield from _of_cohorts_that_do_not_hold(plan)


def _of_sums_alone(plan: PlanValues) -> Iterator[str]:
    """What a coordinator that sees nothing but a sum cannot do."""
    if not plan.aggregation.weight_cap:
        yield (
            "[aggregation] max_weight = 0 with secure_aggregation = true and weighting = "
            f'"{plan.aggregation.weighting}": a '
            "masked sum has one cap on weights for the whole plan; set max_weight to what the largest silo may "
            "weigh, to begin with "
            f'{plan.aggregation.weighs.first_cap}, or weighting to "equal"'
        )
    if plan.aggregation.max_weight_share:
        yield (
            f"[aggregation] max_weight_share = {plan.aggregation.max_weight_share} cannot be applied to masked "
            "updates, of which only the sum is seen: set it to 0, or turn secure_aggregation off"
        )
    if plan.wire.update != "float32":
        yield (
            f'[wire] update = "{plan.wire.update}" does not go with secure_aggregation, under which updates travel as '
            'masked 32-bit integers: use "float32", or turn secure_aggregation off'
        )


def _of_steps_that_tell(plan: PlanValues) -> Iterator[str]:
    """What would make a delta a function of how many optimizer steps its silo made, and that tells how many examples it
    has."""
    training = plan.training
    if training.weight_decay:
        yield (
            f"[training] weight_decay = {training.weight_decay:g} does not go with secure_aggregation: it moves "
            "parameters that no example reaches by a public function of a silo's optimizer steps, and one sum tells "
            "the steps of all silos; set it to 0, or turn secure_aggregation off"
        )
    if training.fedprox_mu > MOST_MASKED_MU:
        yield (
            f"[training] fedprox_mu = {training.fedprox_mu:g} does not go with secure_aggregation, under which it "
            f"holds a silo of many steps still beside one of a single step: set at most {MOST_MASKED_MU:g}"
        )
    if 0 < training.max_grad_norm < LEAST_GRAD_NORM and plan.privacy.level != "record":
        yield (
            f"[training] max_grad_norm = {training.max_grad_norm:g} leaves next to nothing of a gradient, which "
            f"does not go with secure_aggregation: set 0 for no clipping, or at least {LEAST_GRAD_NORM:g}"
        )
    if training.optimizer == "sgd":
        yield (
            '[training] optimizer = "sgd" does not go with secure_aggregation: its steps are as long as gradients, so '
            'with a model under which one silo alone has any the sum is that silo\'s delta; use "adamw" or '
            '"adafactor", which divide a gradient by its own size'
        )
    yield from _of_a_single_step_of_adapters(plan)


def _of_a_single_step_of_adapters(plan: PlanValues) -> Iterator[str]:
    """Whatever its batch and its examples, a silo makes a step for each epoch, and may make no other."""
    if not plan.adapters.rank or plan.adapters.train != "both":  # one half is trained at a time, and B first
        return
    if plan.privacy.level == "record":  # all silos make [privacy] steps
        return
    key = "steps" if plan.training.steps else "epochs"
    for who, work in plan.training.works.items():
        if work.epochs < LEAST_ADAPTER_EPOCHS:
            yield (
                f"{who} {key} = {work.epochs} with [adapters] rank = {plan.adapters.rank} does not go with "
                "secure_aggregation: a silo that makes a single optimizer step adds nothing to half of the "
                f"adapters, where the sum is what the other silos add; set at least {LEAST_ADAPTER_EPOCHS}, or train "
                'to "b" or "alternate", or turn secure_aggregation off'
            )


def _of_cohorts_that_do_not_hold(plan: PlanValues) -> Iterator[str]:
    """The rules of secure aggregation's parameters, for the smallest cohorts that this plan lets begin."""
    # Here, not above: numpy, which this brings, is for plans with masks alone.
    from lorica_security.secure_aggregation import parameters

    wanted, silos = plan.aggregation, plan.smallest_cohort
    key = "[schedule] min_silos" if silos == plan.schedule.min_silos else "[semi_supervised] min_labelled"
    colluders, threshold = wanted.colluders, wanted.threshold
    if silos < parameters.LEAST_COHORT:  # what is asked of the others follows from it
        yield (
            f"{key} = {silos} is too few for secure aggregation, since a sum of two shows each the "
            f"other: raise it to at least {parameters.LEAST_COHORT}"
        )
        return
    least = parameters.least_survivors(colluders)
    if not least <= wanted.min_survivors <= silos:
        yield (
            f"[aggregation] min_survivors = {wanted.min_survivors} does not hold with {_name(key)} = {silos} and "
            f"colluders = {colluders}: set it to at least {least}, and {_name(key)} to no less"
        )
    # More is asked of the threshold nowhere: a cohort that needs a higher one has it raised (parameters.Terms).
    if threshold and not parameters.LEAST_COHORT <= threshold <= silos:
        yield (
            f"[aggregation] threshold = {threshold} does not hold with {_name(key)} = {silos}: set "
            f"{parameters.LEAST_COHORT} to {silos}, or 0 for the default of each cohort"
        )


def _name(key: str) -> str:
    return key.rpartition(" ")[2]
