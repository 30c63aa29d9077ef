"""What does not go with privacy of records or silos, or with noise that silos make together."""

import json
from collections.abc import Iterator

from silo_wire.plans.plan_values import PlanValues
from silo_wire.plans.privacy import LEAST_BOUND, MOST_BOUND
from silo_wire.weightings.named import named_for


def of_privacy(plan: PlanValues) -> Iterator[str]:
    level = plan.privacy.level
    if plan.training.optimizer == "adam_corrected" and level != "record":
        yield (
            f'[training] optimizer = "adam_corrected" does not go with [privacy] level = "{level}", under which '
            "gradients have "
            'no noise to correct for: set it to "adamw", or level to "record"'
        )
    if level != "none":
        unlike = _unlike_private(plan) if level == "record" else _unlike_silo_level(plan)
        for key, has, needed, why in (*unlike, *_scores(plan)):
            yield f'{key} = {has} does not go with [privacy] level = "{level}", {why}: set it to {needed}'
    if plan.joint:
        for key, has, needed, why in _unlike_joint(plan):
            yield f'{key} = {has} does not go with [privacy] noise = "joint", {why}: set it to {needed}'


def _unlike_joint(plan: PlanValues) -> Iterator[tuple[str, object, str, str]]:
    """The same for noise that silos make together, under which a round is one step of the sum of their gradients."""
    aggregation, privacy, training = plan.aggregation, plan.privacy, plan.training
    if not aggregation.secure_aggregation:
        yield "[aggregation] secure_aggregation", "false", "true", "under which no update is covered alone"
    if "joint" not in aggregation.weighs.promises:
        weighting = f'"{aggregation.weighting}"'
        yield "[aggregation] weighting", weighting, named_for("joint"), "under which all silos weigh the same"
    for key, value, needed, why in (
        ("[aggregation] max_delta_norm", aggregation.max_delta_norm, 0.0, "which cuts coordinates to delta_bound"),
        ("[privacy] steps", privacy.steps, 1, "under which a round is one step"),
        ("[privacy] average_decay", privacy.average_decay, 0.0, "under which a round has no iterates"),
        (
            "[privacy] neighbouring_relation",
            privacy.neighbouring_relation,
            "add_or_remove_one",
            "which no proof covers with sampling where a record is replaced",
        ),
    ):
        if value != needed:
            yield key, _shown(value), _shown(needed), why
    if training.optimizer == "adam_corrected":
        yield "[training] optimizer", '"adam_corrected"', '"adamw"', "under which no silo has an optimizer"
    if aggregation.threshold and not aggregation.colluders:
        # Of 5 silos and a threshold of 3 one that signs twice makes two sums, and their difference is one silo's noise.
        yield (
            "[aggregation] threshold",
            str(aggregation.threshold),
            "0, or colluders to at least 1",
            "whose promise holds where one silo of a sum works with the coordinator",
        )
    if not 0 < privacy.answer_after_s < plan.schedule.training_deadline_s:
        yield (
            "[privacy] answer_after_s",
            f"{privacy.answer_after_s:g}",
            f"more than any silo's gradients take, and less than [schedule] training_deadline_s = "
            f"{plan.schedule.training_deadline_s:g}",
            "since how long a silo takes tells how many records it drew",
        )
    if training.max_grad_norm and plan.gradient_reach < 1:
        yield (
            "[aggregation] delta_bound",
            f"{aggregation.delta_bound:g}",
            f"at least max_grad_norm / expected_batch_size = {training.max_grad_norm / privacy.expected_batch_size:g}",
            "whose range has room for one record",
        )
    for silo, override in training.overrides.items():
        if override.learning_rate is not None:
            yield (
                f"[training.overrides.{silo}]",
                "learning_rate",
                "batch_size alone",
                "under which the server steps",
            )


def _unlike_private(plan: PlanValues) -> Iterator[tuple[str, object, str, str]]:
    """Key, value, what it must be and why, for each key that does not go with record-level privacy."""
    training, weighting = plan.training, plan.aggregation.weighs
    if "record" not in weighting.promises:
        yield (
            "[aggregation] weighting",
            f'"{weighting.name}"',
            named_for("record"),
            "which releases no number of records",
        )
    if training.loss_reduction != "evaluated":
        yield (
            "[training] loss_reduction",
            f'"{training.loss_reduction}"',
            '"evaluated"',
            "under which no loss of a step is told",
        )
    if plan.aggregation.reduction_memory:
        yield (
            "[aggregation] reduction_memory",
            f"{plan.aggregation.reduction_memory:g}",
            "0",
            "under which a reduction is told as it was released, of its round alone",
        )
    if plan.wire.update == "int8":
        yield (
            "[wire] update",
            '"int8"',
            '"float32" or "bfloat16"',
            "with whose noise in every number of a block int8 has not been measured",
        )
    if not training.max_grad_norm:
        yield "[training] max_grad_norm", 0, "what one record's gradient may have", "which has noise to match that"
    for key, value, needed, why in (
        ("epochs", training.epochs, 1, "in which [privacy] steps says how long a round is"),
        ("steps", training.steps, 0, "in which [privacy] steps says how long a round is"),
        ("gradient_accumulation", training.gradient_accumulation, 1, "whose batches are as large as memory allows"),
        ("fedprox_mu", training.fedprox_mu, 0, "whose steps have private gradients alone"),
        ("precision", training.precision, "float32", "whose bounds hold for exact sums"),
        ("gradient_checkpointing", training.gradient_checkpointing, False, "whose gradients keep what entered a layer"),
        # What is drawn together would depend on the lengths of those that are not.
        ("length_grouping", training.length_grouping, 1, "whose examples are drawn each by itself"),
        # One stream of masks for a batch: a record more would shift those of all that come after it.
        ("dropout", training.dropout, 0.0, "in which no example's gradient may depend on the others of its batch"),
    ):
        if value != needed:
            shown = "the model's own" if value is None else str(value)
            if isinstance(needed, bool):
                yield f"[training] {key}", _shown(value), _shown(needed), why
            else:
                yield f"[training] {key}", shown, str(needed), why
    if training.max_grad_norm and not LEAST_BOUND <= training.max_grad_norm <= MOST_BOUND:
        yield (
            "[training] max_grad_norm",
            training.max_grad_norm,
            f"{LEAST_BOUND:g} to {MOST_BOUND:g}",
            "whose clipping is done in float32",
        )
    for silo, override in training.overrides.items():
        if override.epochs is not None or override.gradient_accumulation is not None:
            yield (
                f"[training.overrides.{silo}]",
                "epochs or gradient_accumulation",
                "neither",
                "whose schedule is one for all",
            )


def _unlike_silo_level(plan: PlanValues) -> Iterator[tuple[str, object, str, str]]:
    """The same for silo-level privacy, whose noise matches the most that one silo adds to a sum."""
    aggregation = plan.aggregation
    if "silo" not in aggregation.weighs.promises:
        yield (
            "[aggregation] weighting",
            f'"{aggregation.weighting}"',
            named_for("silo"),
            "whose weights are shares of a public cap",
        )
    if not aggregation.weight_cap:
        yield (
            "[aggregation] max_weight",
            0,
            'the most that a silo may weigh, or weighting to "equal"',
            "whose noise is made for the largest weight",
        )
    if not aggregation.max_delta_norm:
        yield (
            "[aggregation] max_delta_norm",
            0,
            "the L2 norm that deltas are clipped to",
            "whose noise is made for the longest delta",
        )
    if aggregation.max_weight_share:
        yield (
            "[aggregation] max_weight_share",
            aggregation.max_weight_share,
            "0",
            "whose sum is divided by the public nominal_silos and not by what silos weigh",
        )
    if plan.wire.update != "float32":
        yield (
            "[wire] update",
            f'"{plan.wire.update}"',
            '"float32"',
            "whose clipping bounds what one round adds: rounding that is made up for later goes beyond it",
        )


def _scores(plan: PlanValues) -> Iterator[tuple[str, object, str, str]]:
    evaluation = plan.evaluation
    for key, value, needed in (
        ("every", evaluation.every, "0"),
        ("initial", evaluation.initial, "false"),
        ("last", evaluation.last, "false"),
    ):
        if value:
            yield f"[evaluation] {key}", value, needed, "under which no scores of a silo's records are told"


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
