"""What does not go with silos that train without labels, and what of it there is not yet."""

from collections.abc import Iterator
from typing import Final

from silo_wire.drift_correction import NO_CORRECTION
from silo_wire.plans.plan_values import PlanValues
from silo_wire.plans.sections.named_silos import ALL_THAT_BEGIN_SO
from silo_wire.plans.sections.semi_supervised import SemiSupervisedSection
from silo_wire.weightings.equal import EQUAL
from silo_wire.weightings.size import SIZE

WEIGHTINGS: Final = (EQUAL, SIZE)
"""What a teacher's answers say of a silo's loss is no task loss: it falls most where the student agrees with itself."""


def of_semi_supervised(plan: PlanValues) -> Iterator[str]:
    section = plan.semi_supervised
    if not section.unlabelled:
        yield from _of_keys_that_nobody_reads(section)
        return
    for key, value, remedy, why in (*_not_there_yet(section), *_unlike(plan)):
        yield f"{key} = {value} does not go with [semi_supervised] unlabelled, {why}: set it to {remedy}"
    if ALL_THAT_BEGIN_SO in section.unlabelled:
        yield f'[semi_supervised] unlabelled = ["{ALL_THAT_BEGIN_SO}"] leaves no silo with labels: name some silos'
    if section.loss == "probabilities" and not section.student_dropout:
        yield (
            '[semi_supervised] student_dropout = 0 does not go with loss = "probabilities": a round begins with a '
            "student that is its teacher, and what it would learn is how numbers are rounded; set it above 0, or loss "
            'to "answer"'
        )
    if section.teacher != "ema" and section.ema_decay != SemiSupervisedSection().ema_decay:
        yield (
            f'[semi_supervised] ema_decay = {section.ema_decay:g} is read with teacher = "ema" alone, and teacher is '
            f'"{section.teacher}": leave ema_decay out, or set teacher to "ema"'
        )


def _of_keys_that_nobody_reads(section: SemiSupervisedSection) -> Iterator[str]:
    usual = SemiSupervisedSection()
    for key in type(section).model_fields:
        if getattr(section, key) != getattr(usual, key):
            yield (
                f"[semi_supervised] {key} = {getattr(section, key)} is read by silos without labels alone, and "
                f"unlabelled names none: leave {key} out, or name silos in unlabelled"
            )


def _not_there_yet(section: SemiSupervisedSection) -> Iterator[tuple[str, str, str, str]]:
    if section.order == "alternate":
        yield (
            "[semi_supervised] order",
            '"alternate"',
            '"together"',
            "whose silos no coordinator draws in rounds of their own yet",
        )
    if section.teacher in ("none", "mlm"):
        yield (
            "[semi_supervised] teacher",
            f'"{section.teacher}"',
            '"ema" or "round"',
            "which train from a teacher's answers and from nothing else yet",
        )


def _unlike(plan: PlanValues) -> Iterator[tuple[str, str, str, str]]:
    aggregation = plan.aggregation
    if aggregation.secure_aggregation:
        yield (
            "[aggregation] secure_aggregation",
            "true",
            "false",
            "of whom one whose teacher is never sure adds nothing, so that a sum could be a single silo's delta",
        )
    if plan.privacy.level == "record":
        yield (
            "[privacy] level",
            '"record"',
            '"none" or "silo"',
            "whose questions no private training takes yet",
        )
    if plan.corrects_drift:
        yield (
            "[training] drift_correction",
            f'"{plan.training.drift_correction}"',
            f'"{NO_CORRECTION.name}"',
            "whose gradients are against a teacher of their own",
        )
    if aggregation.weighs not in WEIGHTINGS:
        yield (
            "[aggregation] weighting",
            f'"{aggregation.weighting}"',
            " or ".join(f'"{weighting.name}"' for weighting in WEIGHTINGS),
            "whose loss is against their own teacher and compares with no task loss",
        )
