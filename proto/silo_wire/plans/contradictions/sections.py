"""What of the sections of any plan does not go together."""

from collections.abc import Iterator

from silo_wire.plans.contradictions.drift import of_drift_correction
from silo_wire.plans.contradictions.masks import of_masks
from silo_wire.plans.contradictions.privacy import of_privacy
from silo_wire.plans.contradictions.reprojection import of_reprojection
from silo_wire.plans.contradictions.robust import of_reducer
from silo_wire.plans.contradictions.semi_supervised import of_semi_supervised
from silo_wire.plans.plan_values import PlanValues
from silo_wire.plans.robust import MEAN
from silo_wire.plans.sections.model import BASE_LAYOUT_FILE
from silo_wire.plans.work import COMMON
from silo_wire.server_step.step_length import FEDEXP
from silo_wire.weightings.fednova import FEDNOVA
from silo_wire.weightings.q_fedavg import Q_FEDAVG

MOST_MASKED_FAIRNESS = 1.0
"""Under masks. A silo whose loss is 2.5 times that of three others of its size is 0.46 of the sum with it, 0.68 with 2
and 0.97 with 5, by a model that nobody crafted."""


def contradictions_of(plan: PlanValues) -> Iterator[str]:
    """Whatever does not go together, each with what to do."""
    yield from _of_the_share_cap(plan)
    yield from _of_the_draw(plan)
    yield from _of_the_initial_model(plan)
    yield from _of_adapters(plan)
    yield from of_reprojection(plan)
    yield from _of_the_steps(plan)
    yield from _of_the_lengths(plan)
    yield from _of_the_weighting(plan)
    yield from of_reducer(plan)
    yield from _of_the_step_length(plan)
    yield from of_drift_correction(plan)
    if plan.aggregation.secure_aggregation:
        yield from of_masks(plan)
    yield from of_privacy(plan)
    yield from of_semi_supervised(plan)


def _of_the_share_cap(plan: PlanValues) -> Iterator[str]:
    cap = plan.aggregation.max_weight_share
    if cap and cap * plan.schedule.min_silos < 1:
        yield (
            f"[aggregation] max_weight_share = {cap} cannot hold with min_silos = {plan.schedule.min_silos}: "
            f"raise it to at least {1 / plan.schedule.min_silos:.3f}"
        )


def _of_the_draw(plan: PlanValues) -> Iterator[str]:
    size, least = plan.schedule.cohort_size, plan.schedule.min_silos
    if not size:
        return
    if plan.aggregation.secure_aggregation:
        least = max(least, plan.aggregation.min_survivors)
    if size < least:
        yield (
            f"[schedule] cohort_size = {size} draws fewer silos than the {least} that a round needs: raise it, or set "
            "0 for all that are ready"
        )
    if plan.joint:
        yield (
            f"[schedule] cohort_size = {size} does not go with noise that silos make together, which is sized for all "
            "silos that are there: set it to 0"
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
    if section.train != "both" and not section.rank:
        yield (
            f'[adapters] train = "{section.train}" says how adapters are trained, and with rank = 0 the plan has none: '
            "set rank above 0, or leave train out"
        )
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
    if section.rank and section.train == "alternate" and plan.aggregation.reducer == "centred_clipping":
        yield (
            '[aggregation] reducer = "centred_clipping" does not go with [adapters] train = "alternate": its centre, '
            'the last mean, is of the half that rests now; set another reducer, or train to "b" or "both"'
        )
    if section.rank and section.train == "alternate" and plan.aggregation.server_optimizer == "adam":
        yield (
            '[aggregation] server_optimizer = "adam" does not go with [adapters] train = "alternate", under which each '
            "half takes every second step: adam's correction of its first steps would count the others too; set it to "
            '"yogi", "adagrad" or "sgd", or train to "b"'
        )


def _of_the_steps(plan: PlanValues) -> Iterator[str]:
    """A number of steps for all silos takes the place of epochs."""
    training = plan.training
    if not training.steps:
        return
    epochs = {COMMON: training.epochs if training.epochs != 1 else None} | {
        f"[training.overrides.{silo}]": override.epochs for silo, override in training.overrides.items()
    }
    for who, number in epochs.items():
        if number is not None:
            yield (
                f"{who} epochs = {number} does not go with [training] steps = {training.steps}, which says how long a "
                "round is: leave epochs out, or set steps to 0"
            )
    if training.loss_reduction == "as_published":
        yield (
            f'[training] loss_reduction = "as_published" does not go with steps = {training.steps}: that code logs '
            'whole epochs; set it to "evaluated" or "logged", or steps to 0'
        )


def _of_the_lengths(plan: PlanValues) -> Iterator[str]:
    """Questions of one length share a template: a batch of them is easier or harder than the next."""
    training = plan.training
    if training.length_grouping > 1 and plan.logs_losses:
        yield (
            f"[training] length_grouping = {training.length_grouping} does not go with loss_reduction = "
            f'"{training.loss_reduction}", which takes how far apart the losses of steps are for what was learnt: '
            'set it to 1, or loss_reduction to "evaluated"'
        )


def _of_the_weighting(plan: PlanValues) -> Iterator[str]:
    weighting = plan.aggregation.weighs
    if plan.aggregation.secure_aggregation and not weighting.masks:
        yield (
            f'[aggregation] weighting = "{weighting.name}" does not go with secure_aggregation, under which the '
            "coordinator knows the sum of weights alone: set another one, or turn secure_aggregation off"
        )
    fairness = plan.aggregation.fairness
    if weighting.name == Q_FEDAVG.name and not fairness:
        yield f'[aggregation] weighting = "{weighting.name}" needs fairness: set it above 0, or weighting to "size"'
    if weighting.name != Q_FEDAVG.name and fairness:
        yield (
            f'[aggregation] fairness = {fairness:g} is read by weighting = "{Q_FEDAVG.name}" alone, and weighting is '
            f'"{weighting.name}": set fairness to 0, or weighting to "{Q_FEDAVG.name}"'
        )
    if plan.aggregation.secure_aggregation and fairness > MOST_MASKED_FAIRNESS:
        yield (
            f"[aggregation] fairness = {fairness:g} does not go with secure_aggregation: the silo that the model "
            f"serves worst would be nearly all of the sum; set at most {MOST_MASKED_FAIRNESS:g}, or turn "
            "secure_aggregation off"
        )
    if (at_end := plan.aggregation.server_rate_at_end) != 1.0 and plan.schedule.rounds == 1:
        yield (
            f"[aggregation] server_rate_at_end = {at_end:g} does not go with [schedule] rounds = 1, whose round is the "
            "first: set it to 1, or more rounds"
        )
    if (memory := plan.aggregation.reduction_memory) and not plan.weighted:
        yield (
            f'[aggregation] reduction_memory = {memory:g} does not go with weighting = "{weighting.name}", which needs '
            'no loss reduction: set it to 0, or weighting to "lorar"'
        )
    for it in weighting.clashes(plan.training):
        yield (
            f'{it.key} = {it.value} does not go with [aggregation] weighting = "{weighting.name}", {it.why}: set it to '
            f"{it.needed}"
        )


def _of_the_step_length(plan: PlanValues) -> Iterator[str]:
    """FedExP's own, in the clear, for the mean of all deltas."""
    aggregation = plan.aggregation
    if aggregation.step_length != FEDEXP.name:
        return
    key_by_key: tuple[tuple[bool, str, str, str], ...] = (
        (
            aggregation.server_optimizer != "sgd",
            f'[aggregation] server_optimizer = "{aggregation.server_optimizer}"',
            'server_optimizer to "sgd"',
            "which says how far a step goes, where adaptive optimizers say so themselves",
        ),
        (
            aggregation.server_optimizer == "sgd" and aggregation.momentum > 0,
            f"[aggregation] momentum = {aggregation.momentum:g}",
            "momentum to 0",
            "whose length is for the mean of one round",
        ),
        (
            aggregation.robust is not None,
            f'[aggregation] reducer = "{aggregation.reducer}"',
            f'reducer to "{MEAN}"',
            "whose length follows the norms of all deltas, those of hostile silos too",
        ),
        (
            aggregation.weighs is FEDNOVA,
            f'[aggregation] weighting = "{aggregation.weighting}"',
            "another weighting",
            "where that has a length of its own",
        ),
        (
            aggregation.secure_aggregation,
            "[aggregation] secure_aggregation = true",
            "secure_aggregation to false",
            "which needs the norms of single deltas, where masks show their sum alone",
        ),
        (
            plan.privacy.level == "silo",
            '[privacy] level = "silo"',
            'level to "none" or "record"',
            "whose norms no noise covers",
        ),
        (
            bool(plan.adapters.rank) and plan.adapters.train == "alternate",
            '[adapters] train = "alternate"',
            'train to "b" or "both"',
            "whose norms are of whole deltas, where a hostile silo could hide any length in the half that rests",
        ),
    )
    for wrong, has, remedy, why in key_by_key:
        if wrong:
            yield (
                f'{has} does not go with [aggregation] step_length = "{FEDEXP.name}", {why}: set {remedy}, or '
                'step_length to "fixed"'
            )
