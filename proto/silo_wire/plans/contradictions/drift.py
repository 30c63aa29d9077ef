"""What does not go with a correction of drift, which takes two round models and a silo's own deltas for what all silos
did (silo_wire/drift_correction.py)."""

from collections.abc import Iterator

from silo_wire.drift_correction import NO_CORRECTION
from silo_wire.plans.plan_values import PlanValues
from silo_wire.plans.robust import MEAN
from silo_wire.server_step.step_length import FIXED
from silo_wire.weightings.equal import EQUAL


def of_drift_correction(plan: PlanValues) -> Iterator[str]:
    """What does not go with `[training] drift_correction`, key by key."""
    if not plan.corrects_drift:
        return
    for key, has, needed, why in (
        *_unlike_local_training(plan),
        *_unlike_the_server(plan),
        *_unlike_all_silos(plan),
        *_unlike_promises(plan),
    ):
        yield (
            f'{key} = {has} does not go with [training] drift_correction = "{plan.training.drift_correction}", {why}: '
            f'set it to {needed}, or drift_correction to "{NO_CORRECTION.name}"'
        )


Clash = tuple[str, str, str, str]
"""Key, value, what it must be and why."""


def _unlike_local_training(plan: PlanValues) -> Iterator[Clash]:
    training = plan.training
    if training.optimizer != "sgd":
        yield (
            "[training] optimizer",
            f'"{training.optimizer}"',
            '"sgd"',
            "which reads gradients off deltas, to which steps of sgd alone are in proportion",
        )
    if not training.steps:
        yield "[training] steps", "0", "how many all silos make", "which divides a delta by its steps"
    if training.learning_rate_schedule != "constant":
        yield (
            "[training] learning_rate_schedule",
            f'"{training.learning_rate_schedule}"',
            '"constant"',
            "under which each step of a round counts the same",
        )
    if training.fedprox_mu:
        yield (
            "[training] fedprox_mu",
            f"{training.fedprox_mu:g}",
            "0",
            "which would take FedProx's pull for a gradient of the data",
        )
    for silo, override in training.overrides.items():
        if override.learning_rate not in (None, training.learning_rate):
            yield (
                f"[training.overrides.{silo}] learning_rate",
                f"{override.learning_rate:g}",
                f"{training.learning_rate:g}",
                "which needs the same steps x learning rate at all silos",
            )


def _unlike_the_server(plan: PlanValues) -> Iterator[Clash]:
    aggregation = plan.aggregation
    reads = "which reads the mean delta off two round models"
    if aggregation.weighs is not EQUAL:
        yield "[aggregation] weighting", f'"{aggregation.weighting}"', f'"{EQUAL.name}"', reads
    if aggregation.reducer != MEAN:
        yield "[aggregation] reducer", f'"{aggregation.reducer}"', f'"{MEAN}"', reads
    if plan.adapters.reprojects:
        yield "[adapters] train", f'"{plan.adapters.train}"', '"both", "b" or "alternate"', reads
    if aggregation.server_optimizer != "sgd":
        yield "[aggregation] server_optimizer", f'"{aggregation.server_optimizer}"', '"sgd"', reads
    elif aggregation.momentum:
        yield "[aggregation] momentum", f"{aggregation.momentum:g}", "0", reads
    if aggregation.server_rate_at_end != 1.0:
        yield "[aggregation] server_rate_at_end", f"{aggregation.server_rate_at_end:g}", "1", reads
    if aggregation.step_length != FIXED.name:
        yield "[aggregation] step_length", f'"{aggregation.step_length}"', f'"{FIXED.name}"', reads
    if aggregation.max_delta_norm:
        yield (
            "[aggregation] max_delta_norm",
            f"{aggregation.max_delta_norm:g}",
            "0",
            "under which a delta that is cut is not the one that its silo goes on with",
        )


def _unlike_all_silos(plan: PlanValues) -> Iterator[Clash]:
    for key in ("model", "update"):
        if (dtype := getattr(plan.wire, key)) != "float32":
            yield f"[wire] {key}", f'"{dtype}"', '"float32"', "for which it rounds more away than a round changes"
    if size := plan.schedule.cohort_size:
        yield (
            "[schedule] cohort_size",
            str(size),
            "0",
            "which begins anew in each round that lacks a silo of the round before",
        )


def _unlike_promises(plan: PlanValues) -> Iterator[Clash]:
    if plan.aggregation.secure_aggregation:
        yield (
            "[aggregation] secure_aggregation",
            "true",
            "false",
            "whose steps of sgd are as long as gradients, so that a sum may be one silo's delta",
        )
    if plan.privacy.level != "none":
        why = {
            "record": "which would carry the noise of one round into the gradients of the next",
            "silo": "for which neither noise nor a bound may be on deltas",
        }[plan.privacy.level]
        yield "[privacy] level", f'"{plan.privacy.level}"', '"none"', why
