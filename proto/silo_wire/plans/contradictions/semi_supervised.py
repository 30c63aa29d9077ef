"""What does not go with silos that train without labels, and what of it there is not yet."""

from collections.abc import Collection, Iterator
from typing import Final

from silo_wire.drift_correction import NO_CORRECTION
from silo_wire.plans.contradictions.answer_filter import of_answer_filter
from silo_wire.plans.plan_values import PlanValues
from silo_wire.plans.sections.named_silos import ALL_THAT_BEGIN_SO
from silo_wire.plans.sections.semi_supervised import SemiSupervisedSection
from silo_wire.weightings.equal import EQUAL
from silo_wire.weightings.size import SIZE

WEIGHTINGS: Final = (EQUAL, SIZE)
"""What a teacher's answers say of a silo's loss is no task loss: it falls most where the student agrees with itself."""
_READ_WITH: Final = {"ema_decay": ("ema",), "loss": ("ema", "round"), "min_confidence": ("ema", "round")}
"""By key, the teachers with which a silo without labels reads it."""


def of_semi_supervised(plan: PlanValues) -> Iterator[str]:
    section = plan.semi_supervised
    if not section.unlabelled:
        yield from _of_keys_that_nobody_reads(section, "unlabelled names none")
        return
    for key, value, remedy, why in _unlike(plan):
        yield f"{key} = {value} does not go with [semi_supervised] unlabelled, {why}: set it to {remedy}"
    if section.teacher == "none":
        yield from _of_keys_that_nobody_reads(
            section, 'teacher = "none" asks them for nothing', but=("unlabelled", "teacher")
        )
    elif section.order == "alternate":
        yield from _of_turns(plan)
    elif section.min_labelled != SemiSupervisedSection().min_labelled:
        yield (
            f'[semi_supervised] min_labelled = {section.min_labelled} is read with order = "alternate" alone, and '
            f'order is "{section.order}": leave min_labelled out, or set order to "alternate"'
        )
    if section.teacher != "none":
        yield from of_answer_filter(plan)
    if ALL_THAT_BEGIN_SO in section.unlabelled:
        yield f'[semi_supervised] unlabelled = ["{ALL_THAT_BEGIN_SO}"] leaves no silo with labels: name some silos'
    if section.teacher in ("ema", "round") and section.loss == "probabilities" and not section.student_dropout:
        yield (
            '[semi_supervised] student_dropout = 0 does not go with loss = "probabilities": a round begins with a '
            "student that is its teacher, and what it would learn is how numbers are rounded; set it above 0, or loss "
            'to "answer"'
        )
    usual = SemiSupervisedSection()
    for key, teachers in _READ_WITH.items():
        value = getattr(section, key)
        named = " or ".join(f'"{teacher}"' for teacher in teachers)
        if section.teacher not in (*teachers, "none") and value != getattr(usual, key):
            yield (
                f"[semi_supervised] {key} = {value} is read with teacher = {named} alone, and teacher is "
                f'"{section.teacher}": leave {key} out, or set teacher to {named}'
            )


def _of_keys_that_nobody_reads(section: SemiSupervisedSection, why: str, *, but: Collection[str] = ()) -> Iterator[str]:
    usual = SemiSupervisedSection()
    remedy = "set teacher to another one" if but else "name silos in unlabelled"
    for key in type(section).model_fields:
        if key not in but and getattr(section, key) != getattr(usual, key):
            yield (
                f"[semi_supervised] {key} = {getattr(section, key)} is read by silos without labels alone, and "
                f"{why}: leave {key} out, or {remedy}"
            )


def _of_turns(plan: PlanValues) -> Iterator[str]:
    """Rounds of silos with labels alone, each followed by one of silos without: their two steps are equation 4 of
    FedParsing, and nothing else may say how far a step goes."""
    aggregation, section, adapters = plan.aggregation, plan.semi_supervised, plan.adapters
    sgd = aggregation.server_optimizer == "sgd"
    wrong: tuple[tuple[bool, str, str, str], ...] = (
        (
            not sgd,
            f'[aggregation] server_optimizer = "{aggregation.server_optimizer}"',
            "which has another length of step than the two rounds",
            'server_optimizer to "sgd"',
        ),
        (
            aggregation.server_learning_rate != 1.0,
            f"[aggregation] server_learning_rate = {aggregation.server_learning_rate:g}",
            "where the kind of round says how far a step goes",
            "server_learning_rate to 1",
        ),
        (
            aggregation.server_rate_at_end != 1.0,
            f"[aggregation] server_rate_at_end = {aggregation.server_rate_at_end:g}",
            "where the kind of round says how far a step goes",
            "server_rate_at_end to 1",
        ),
        (
            sgd and aggregation.momentum > 0,
            f"[aggregation] momentum = {aggregation.momentum:g}",
            "where a step would go on with that of other silos",
            "momentum to 0",
        ),
        (
            aggregation.robust is not None,
            f'[aggregation] reducer = "{aggregation.reducer}"',
            "whose rounds are not all of silos enough to be outvoted",
            'reducer to "mean"',
        ),
        (
            aggregation.step_length != "fixed",
            f'[aggregation] step_length = "{aggregation.step_length}"',
            "where the kind of round says how far a step goes",
            'step_length to "fixed"',
        ),
        (
            plan.privacy.level == "silo",
            '[privacy] level = "silo"',
            "whose noise is for sums of the same silos in each round",
            'level to "none"',
        ),
        (
            bool(adapters.rank) and adapters.train in ("alternate", "reproject"),
            f'[adapters] train = "{adapters.train}"',
            "where one half would be trained with labels alone"
            if adapters.train == "alternate"
            else "whose step is no mean",
            'train to "b" or "both"',
        ),
        (
            plan.schedule.rounds % 2 == 1,
            f"[schedule] rounds = {plan.schedule.rounds}",
            "where two rounds are one of the paper's",
            "rounds to an even number",
        ),
        (
            0 < aggregation.max_weight_share * section.min_labelled < 1,
            f"[aggregation] max_weight_share = {aggregation.max_weight_share:g}",
            f"which cannot hold in a round of min_labelled = {section.min_labelled}",
            f"max_weight_share to 0, or to at least {1 / section.min_labelled:.3f}",
        ),
    )
    for is_wrong, has, why, remedy in wrong:
        if is_wrong:
            yield (
                f'{has} does not go with [semi_supervised] order = "alternate", {why}: set {remedy}, or order to '
                '"together"'
            )


def _unlike(plan: PlanValues) -> Iterator[tuple[str, str, str, str]]:
    """With silos that train without labels."""
    aggregation, section = plan.aggregation, plan.semi_supervised
    if section.teacher == "none":  # they train in no round
        return
    if aggregation.secure_aggregation and section.order == "together":
        yield (
            "[semi_supervised] order",
            '"together"',
            '"alternate" with teacher "mlm", or secure_aggregation to false',
            "of whom under masks two plans that differ in one silo's labels would show that silo's part of a sum",
        )
    elif aggregation.secure_aggregation and section.teacher in ("ema", "round"):
        yield (
            "[aggregation] secure_aggregation",
            "true",
            'false, or teacher to "mlm"',
            "whose rounds have nobody with labels: a model that is sure of whatever it answers leaves nothing to "
            "learn, so that a sum could be the delta of the one silo that it is not sure of",
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
