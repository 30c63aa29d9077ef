"""What does not go with answers that silos without labels try on their own database."""

from collections.abc import Iterator
from typing import Final

from silo_wire.plans.plan_values import PlanValues
from silo_wire.plans.sections.semi_supervised import SemiSupervisedSection

READS_ROWS: Final = ("nonempty", "agrees")
"""Filters that look at results, hence at rows of the database."""


def of_answer_filter(plan: PlanValues) -> Iterator[str]:
    section = plan.semi_supervised
    usual = SemiSupervisedSection()
    if section.filter != "agrees" and section.samples != usual.samples:
        yield (
            f'[semi_supervised] samples = {section.samples} is read with filter = "agrees" alone, and filter is '
            f'"{section.filter}": leave samples out, or set filter to "agrees"'
        )
    if section.filter == "none":
        return
    filter_is = f'[semi_supervised] filter = "{section.filter}"'
    if not plan.task.is_sql:
        yield (
            f'{filter_is} does not go with [task] kind = "{plan.task.kind}", whose silos have no database to try an '
            'answer on: set filter to "none"'
        )
    if section.teacher not in ("ema", "round"):
        yield (
            f'{filter_is} is read where a teacher answers, and teacher is "{section.teacher}": set filter to "none", '
            'or teacher to "ema" or "round"'
        )
    if plan.aggregation.secure_aggregation:
        yield (
            f"{filter_is} does not go with [aggregation] secure_aggregation, under which a silo whose answers are all "
            "dropped adds nothing, and the sum is of fewer: a model can see to it that it is of one; set filter to "
            '"none", or secure_aggregation to false'
        )
    if plan.privacy.level != "none" and section.filter in READS_ROWS:
        yield (
            f'{filter_is} does not go with [privacy] level = "{plan.privacy.level}": it depends on rows of the '
            'database, which no clipped question covers; set filter to "executes", which only prepares a statement '
            'there, or to "none"'
        )
